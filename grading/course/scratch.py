"""Folders to work in, within the course folder: they go when the work ends, also one that ended by force."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grading.files import locked

WORK = ".grading"  # in the course folder: what is being worked on, and what was printed while grading
LOGS = "logs"
EXCHANGE = "exchange"
OWNED = ".owned"  # locked for as long as a process works in the folder
ELSEWHERE = ".elsewhere"  # names another folder that goes with it


@contextlib.contextmanager
def scratch(root: Path, name: str) -> Iterator[Path]:
    """A new folder in root/.grading, removed at the end; those whose process is gone are removed first."""
    work = root / WORK
    work.mkdir(exist_ok=True)
    with locked(work):  # no other process is between making a folder and owning it
        for folder in work.iterdir():
            if folder.name not in (LOGS, EXCHANGE) and folder.is_dir() and not _is_owned(folder):
                _remove(folder)
        mine = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
        owned = open(mine / OWNED, "wb")  # noqa: SIM115  closed below
        with contextlib.suppress(OSError):  # a file system without locks: then nobody removes it but us
            _lock(owned.fileno())
    try:
        with owned:
            yield mine
    finally:
        _remove(mine)


def exchange(root: Path) -> Path:
    """Where formgrader's own release button puts things. Nobody looks there, but without it formgrader complains."""
    return root / WORK / EXCHANGE


@contextlib.contextmanager
def short_scratch(beside: Path) -> Iterator[str]:
    """A folder with a short path, since sockets lie in it; it goes with the folder beside, which scratch made."""
    with tempfile.TemporaryDirectory(prefix="md-", ignore_cleanup_errors=True) as folder:
        (beside / ELSEWHERE).write_text(folder, encoding="utf-8")
        yield folder


def _is_owned(folder: Path) -> bool:
    """Whether a process still works there; where that cannot be told, yes."""
    try:
        with open(folder / OWNED, "rb") as file:
            _lock(file.fileno())
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _lock(file: int) -> None:
    """Lock an open file; the forks of a process hold it too. Raises OSError if another does, or none can."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        other = Path((folder / ELSEWHERE).read_text(encoding="utf-8"))
        if other.parent == Path(tempfile.gettempdir()) and other.name.startswith("md-") and not other.is_symlink():
            shutil.rmtree(other, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
