"""Writing files so that nobody ever sees half of one, and so that two processes take turns."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

NO_LOCKS_HERE = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # some network and cluster file systems


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
    """Hold folder's lock: a second process that wants it waits; a process that dies lets go of it.

    On a file system that knows no locks it goes on without one.
    """
    with open(folder / ".lock", "a+b") as file:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in NO_LOCKS_HERE:
                    raise
        yield
