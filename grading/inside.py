"""How a learner's kernel starts while it is graded: `python -P -m grading.inside FOLDER CONTROL KERNEL_OPTION...`

Kernel and ranks both need torch, whose import takes longer than all else. So it is imported once, here, and a process
that forks ranks is split off before the kernel begins. Both belong to one learner, and both are in one sandbox: neither
has more to gain there than the learner's functions have anyway, since what ranks send, and what they return, is judged
from outside.
"""

import os
import resource
import shutil
import socket
import sys

LIMITS = (("CORE", 0), ("FSIZE", 256 << 20), ("NPROC", 512), ("DATA", 6 << 30))


def main(argv: list[str]) -> None:
    """FOLDER: files handed in, to be copied here. CONTROL: the descriptor of the ranks' grader, -1 for no ranks."""
    folder, control, *options = argv
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a kernel greets whoever started it from a terminal
    if os.path.isdir(folder):
        shutil.copytree(folder, os.getcwd(), dirs_exist_ok=True)
    for name, limit in LIMITS:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    if int(control) >= 0:
        fork_ranks(int(control))
    sys.path.insert(0, os.getcwd())  # where modules that were handed in lie; only now, so that none stands in for ours
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance([*options, "--HistoryManager.hist_file=:memory:"])


def fork_ranks(control: int) -> None:
    """Split off the process that ranks are forked from; it ends when the grader does, or the kernel."""
    import grading.check  # noqa: F401  what every assignment imports
    from grading.ranks import warm

    if os.fork() == 0:
        try:
            os.setsid()
            warm.main(socket.socket(fileno=control))
        finally:
            os._exit(0)
    os.close(control)


if __name__ == "__main__":
    main(sys.argv[1:])
