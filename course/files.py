"""Where things lie, and writing files so that nobody ever sees half of one."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "course" / "src"
NOTEBOOKS = ROOT / "course"
WORKSPACE = ROOT / "workspace"


def write_atomically(path: Path, content: bytes) -> None:
    """Put content at path in one step: a reader, or a crash, finds the old file or the new one."""
    path = path.resolve()  # a linked file stays a link
    draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold folder's lock: a second process that wants it waits; a process that dies lets go of it."""
    with open(folder / ".lock", "a+b") as file:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
