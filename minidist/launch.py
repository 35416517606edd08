"""Ranks as processes: run one function on several of them, and always get an answer."""

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidist.launcher import arguments, environment, parent, payload, report
from minidist.launcher.frames import Library
from minidist.launcher.job import Ending, Job

_launcher = parent.Launcher()  # what this process keeps between launches


class LaunchError(RuntimeError):
    """A world did not end well. ``verdict`` is deadlock, error, timeout or lost; the message says what happened."""

    def __init__(self, verdict: str, message: str):
        super().__init__(message)
        self.verdict = verdict

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the frames of this package."""
        return str(self).splitlines()


def launch(
    fn: Callable[..., Any],
    ranks: int | None = None,
    args: Sequence[Any] = (),
    timeout: float = 60,
    backend: str | None = None,
    check: bool = True,
    seed: int = 0,
    pace: Any = None,
    concurrent: bool = False,
) -> list[Any]:
    """Run ``fn(world, *args)`` on every rank, and return the list of what the ranks returned.

    ``world`` is the Comm of all ranks. ``fn`` may be defined anywhere, also in a notebook cell.

    ranks: how many processes (None: 4). timeout: seconds after which they are stopped. backend: "gloo" (None) or "nccl".
    check: compare every call across the ranks before it is made. seed: of every rank's global generators; each rank's
    ``world.generator`` differs. pace: a Cluster whose times the run takes. concurrent: do not wait for a running launch.

    Under torchrun or srun no process is started: ``fn`` runs here, as the rank that the environment says, and the list
    holds its result alone. ``ranks`` may then only repeat the environment's number.

    Raises LaunchError if a rank raised, crashed, or all were stuck; ValueError, TypeError or NameError, before anything
    starts, for what cannot work; KeyboardInterrupt, after the ranks are gone, when interrupted.
    """
    arguments.check_call(fn, args)
    arguments.check_names(fn)
    job = Job(4 if ranks is None else ranks, timeout, backend or "gloo", check, pace is not None, seed)
    job = _with_this_process(job, fn)
    try:
        pieces = payload.dump((fn, tuple(args), pace))
    except Exception as error:
        raise arguments.why_unpicklable(fn, args, error, payload.dump) from None
    with _launcher.turn(concurrent):
        try:
            ending, results = parent.converse(_launcher.open_world(), job, pieces)
        except parent.Lost as error:
            raise LaunchError("lost", f"the process that watches the ranks went away: {error}") from None
    if ending.verdict != "ok":
        raise LaunchError(ending.verdict, _explain(ending, job.timeout))
    return results


def _with_this_process(job: Job, fn: Any) -> Job:
    from dataclasses import replace

    env = dict(os.environ)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cores = len(os.sched_getaffinity(0))
    threads = int(env["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in env else max(1, cores // job.ranks)
    return replace(job, threads=threads, cwd=os.getcwd(), path=parent.search_path(), env=env)


def _explain(ending: Ending, timeout: float) -> str:
    return report.explain(ending, timeout, linecache.getline, lambda file: file, Library.here())
