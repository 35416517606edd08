"""`grading COMMAND ...`: each command is `main(argv) -> exit status` of a module, imported when it is asked for."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# command: (module, what it does)
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "validate": ("grading.validate", "look for mistakes in question files"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; without one, or with one that is not known, list them."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    known = "\n".join(f"  grading {command:12s} {text}" for command, (_, text) in COMMANDS.items())
    if name in ("-h", "--help"):
        print(f"Commands (each with --help):\n{known}")
        return 0
    print(f"{name!r} is no command. There are:\n{known}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
