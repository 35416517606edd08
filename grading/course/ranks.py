"""Ranks for a learner's functions, forked beside the learner's kernel (grading.inside)."""

import socket
import tempfile
from collections.abc import Callable

from grading.ranks.host import RankHost
from grading.ranks.run import Job, Run

READY_S = 120.0  # for importing torch on a busy machine


class RanksBesideKernel(RankHost):
    """A host that uses the process split off from a kernel, as long as that is there.

    A learner's code can end that process, with the kernel or without: then one is started in a sandbox of its own, so
    that nothing is decided by its absence.
    """

    def adopt(self, control: socket.socket) -> None:
        """Use the process at the other end of control from now on; it says when it is ready."""
        self.close()
        self._control, self._said = control, b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close
        self._greeted = False

    def start(self) -> None:
        """See that there is a process to fork ranks from. Raises NoRanks."""
        if self._control is not None and self._process is None and self._is_there():
            return
        super().start()

    def run(self, job: Job, waiting: Callable[[str], None] | None = None) -> Run:
        """As a host does. If its process goes away meanwhile, it is run again from one that no learner's code sees."""
        beside = self._process is None
        run = super().run(job, waiting)
        if beside and run.mistake == "lost-host":
            self.close()
            return super().run(job, waiting)
        return run

    def _is_there(self) -> bool:
        try:
            if not self._greeted:
                self.control.settimeout(READY_S)
                self._hear()
                self.control.setblocking(False)
                self._greeted = True
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True  # it has nothing to say
        except OSError:
            return False
