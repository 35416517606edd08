"""`grading COMMAND ...`: each command is `main(argv) -> exit status` of a module, imported when it is asked for."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# command: (module, what it does). An instructor's commands work in their course folder.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "new-course": ("grading.course.new_course", "make a course folder of your own"),
        "release": ("grading.course.release", "make an assignment as learners get it"),
        "collect": ("grading.course.collect", "sort what was handed in, by learner"),
        "grade": ("grading.course.grade", "grade what was handed in"),
        "regrade": ("grading.course.regrade", "grade again, and show what changed"),
        "feedback": ("grading.course.feedback", "make the pages that learners get back"),
        "export": ("grading.course.export", "write the grades to a CSV file"),
        "report": ("grading.course.report", "show what was hard, and for whom"),
        "doctor": ("grading.course.doctor", "say what this machine lacks for grading"),
        "validate": ("grading.validate", "look for mistakes in question files"),
        "progress": ("grading.progress", "show what you have done in the course"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; without one, or with one that is not known, list them."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name not in COMMANDS:
        known = "\n".join(f"  grading {command:12s} {text}" for command, (_, text) in COMMANDS.items())
        if name in ("-h", "--help"):
            print(f"Commands (each with --help):\n{known}")
            return 0
        print(f"{name!r} is no command. There are:\n{known}", file=sys.stderr)
        return 2
    from grading.course.plain import plain
    from grading.course.settings import CourseError

    try:
        return importlib.import_module(COMMANDS[name][0]).main(rest)
    except CourseError as error:
        print(plain(f"grading {name}: {error}"), file=sys.stderr)
    except KeyboardInterrupt:
        print(f"grading {name}: stopped. What was done before is kept, and nothing is left running", file=sys.stderr)
        return 130
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        reason = error.strerror or str(error)
        text = (
            f"grading {name}: cannot go on:{where}: {reason}. Grades and files that were there are as they were; mend "
            "this and run the same command again"
        )
        print(plain(text), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
