"""A sandbox for a learner's code: bubblewrap with no network, its own processes, and nothing of the course in sight.

Inside there is a read-only system, this Python, and of this repository the two packages without what only graders
have: checks, mutants, solutions, questions. The code works in /box, an empty folder in memory.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts")
FOR_GRADERS = ("checks", "mutants", "src", "questions", "course", "hints")  # folders of grading/ that stay outside
MEMORY_BYTES = 512 << 20  # of each folder in memory
BOX = "/box"


def available() -> bool:
    """Whether a sandbox can be started here: it is tried."""
    return problem() == ""


@cache
def problem() -> str:
    """Why no sandbox can be started here, "" if one can."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, and this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        trial = [*command(), sys.executable, "-c", "print('inside')"]
        run = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap did not come back: {error}"
    return "" if run.stdout.strip() == "inside" else (run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1]


def command(shared: Sequence[Path] = (), read_only: Mapping[str, Path] | None = None) -> list[str]:
    """The words to put before a command. shared: folders to write to; read_only: folders by their path inside."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    words += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
    for name in SYSTEM:
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        else:
            words += ["--ro-bind-try", name, name]
    words += ["--proc", "/proc", "--dev", "/dev"]
    size = ["--size", str(MEMORY_BYTES)] if _knows_size() else []
    for name in ("/dev/shm", "/tmp", BOX):
        words += [*size, "--tmpfs", name]
    for path in dict.fromkeys((sys.base_prefix, sys.prefix, ROOT / "minidist", ROOT / "grading")):
        words += ["--ro-bind", str(path), str(path)]
    for name in FOR_GRADERS:
        if (ROOT / "grading" / name).is_dir():
            words += ["--tmpfs", str(ROOT / "grading" / name)]
    for inside, path in (read_only or {}).items():
        words += ["--ro-bind", str(path), inside]
    for path in shared:
        words += ["--bind", str(path), str(path)]
    words += ["--remount-ro", "/", "--chdir", BOX, "--clearenv"]
    for name, value in environment().items():
        words += ["--setenv", name, value]
    return [*words, "--"]


def environment(home: str = BOX) -> dict[str, str]:
    """What a learner's process finds in its environment: nothing of the instructor's."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTHONNOUSERSITE": "1",
        "HOME": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
        "MINIDIST_TEXT": "1",
    }


@cache
def _knows_size() -> bool:
    """bwrap before 0.7 cannot bound a folder in memory."""
    run = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return "--size" in run.stdout
