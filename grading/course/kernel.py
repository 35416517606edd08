"""The process that a learner's notebook runs in: an IPython kernel in the sandbox, reached over sockets in a folder.

A network would be needed otherwise, and the sandbox has none.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from grading.course import sandbox

HANDED_IN = "/handed-in"  # inside the sandbox: the files beside the notebook, read-only
NOT_FOR_THE_KERNEL = ("*.ipynb", "timestamp.txt", ".minidist")


class _OneSpec(KernelSpecManager):
    """Knows one kernel, whatever the notebook asks for."""

    def __init__(self, argv: list[str], **keywords: Any) -> None:
        super().__init__(**keywords)
        self.argv = argv

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(
            argv=self.argv, display_name="learner", language="python", interrupt_mode="message", resource_dir=""
        )


class Place:
    """A folder for one kernel's life: its sockets, and copies of the files handed in. Closing it removes all."""

    def __init__(self, handed_in: Path | None, *, sandboxed: bool) -> None:
        self.sandboxed = sandboxed
        self.folder = Path(tempfile.mkdtemp(prefix="md-"))  # short: a socket's path has at most 107 bytes
        self.files = self.folder / "files"
        self.work = self.folder / "work"  # where a kernel without a sandbox works
        self.files.mkdir()
        self.work.mkdir()
        self.started = 0
        if handed_in is not None and handed_in.is_dir():
            copy_files(handed_in, self.files)

    def manager(self, control: int = -1) -> AsyncKernelManager:
        """A manager whose kernel starts here, each with sockets of its own. control: see grading.inside."""
        self.started += 1
        sockets = self.folder / f"s{self.started}"
        sockets.mkdir()
        inside = ["-P", "-m", "grading.inside"]
        options = [str(control), "-f", "{connection_file}"]
        if self.sandboxed:
            before = sandbox.command(shared=[sockets], read_only={HANDED_IN: self.files})
            argv = [*before, sys.executable, *inside, HANDED_IN, *options]
        else:
            settings = [f"{name}={value}" for name, value in sandbox.environment(str(self.work)).items()]
            argv = ["env", "-i", *settings, sys.executable, *inside, str(self.files), *options]
        manager = AsyncKernelManager(kernel_spec_manager=_OneSpec(argv), kernel_name="learner")
        manager.transport = "ipc"
        manager.connection_file = str(sockets / "k.json")
        manager.ip = str(sockets / "k")
        return manager

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def copy_files(source: Path, target: Path) -> None:
    """Copy what was handed in beside the notebook; links, devices and what only the grader needs stay behind."""

    def left_behind(folder: str, names: list[str]) -> set[str]:
        special = {name for name in names if not _plain(Path(folder) / name)}
        return special | set(shutil.ignore_patterns(*NOT_FOR_THE_KERNEL)(folder, names))

    with contextlib.suppress(shutil.Error):  # a file that cannot be read is not there for the learner's code either
        shutil.copytree(source, target, ignore=left_behind, dirs_exist_ok=True)


def _plain(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or path.is_dir())
