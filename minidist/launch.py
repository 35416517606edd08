"""Ranks as processes: run one function on several of them, and always get an answer."""

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from minidist.comm.comm import Comm
from minidist.launcher import arguments, environment, parent, payload, report, sources, world
from minidist.launcher.job import Job

_launcher = parent.Launcher()  # what this process keeps between launches


class LaunchError(RuntimeError):
    """A world did not end well. ``verdict`` is deadlock, error, timeout or lost; the message says what happened."""

    __module__ = "minidist"  # how a traceback names it

    def __init__(self, verdict: str, message: str):
        super().__init__(message)
        self.verdict = verdict

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.verdict, str(self))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the frames of this package."""
        return f"LaunchError: {self}".splitlines()


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

    ranks: how many processes (None: 4). timeout: seconds until they are stopped. backend: "gloo"
    (None) or "nccl". check: compare every call across the ranks before it is made. seed: of every
    rank's global generators, while each rank's ``world.generator`` differs. pace: a Cluster whose
    times the run takes. concurrent: do not wait for another launch of this process to end.

    Under torchrun or srun no process is started: ``fn`` runs here, as the rank that the environment
    says, and the list holds its result alone. ``ranks`` may then only repeat the environment's
    number.

    Raises LaunchError if a rank raised, crashed, or all were stuck; ValueError, TypeError or
    NameError, before anything starts, for what cannot work; KeyboardInterrupt, after the ranks are
    gone, when interrupted.
    """
    arguments.check_call(fn, args)
    job = Job(
        4 if ranks is None else ranks,
        timeout,
        "gloo" if backend is None else backend,
        check,
        pace is not None,
        seed,
    )
    here = _environment()
    if not here.alone:
        _check_here(here, ranks, pace)
        comm = world_from_env(backend, timeout, seed)
        world.seed_generators(seed)
        return [fn(comm, *args)]
    if job.backend == "nccl":
        environment.check_devices(job.ranks, "nccl", torch.cuda.device_count())
    arguments.check_pace(pace, job.ranks)
    arguments.check_names(fn)
    with _launcher.turn(concurrent):
        return _run_there(fn, args, job, pace)


def world_from_env(backend: str | None = None, timeout: float = 600, seed: int = 0) -> Comm:
    """The Comm of the world that torchrun or srun started; where neither did, of a world of one.

    backend: None takes "nccl" where every rank of a machine has a GPU of its own, else "gloo". timeout: seconds that a
    collective may take. seed: see ``launch``. Rank 0 prints what was found. Raises RuntimeError if the environment is
    half set or impossible.
    """
    here = _environment()
    first = not dist.is_initialized()
    backend = backend if first or backend else dist.get_backend()
    backend, device = environment.place(here, backend, torch.cuda.device_count())
    meet = f"tcp://{here.master}" if here.master else ""
    if first and here.rank == 0:  # before joining, which is where a wrong environment shows
        print(f"{here.table()}\n{'backend':<14}{backend} on {device}", file=sys.stderr)
    comm = world.join(backend, meet, here.rank, here.size, timeout, seed, torch.device(device))
    if first:
        atexit.register(_leave)
    return comm


def _environment() -> environment.Environment:
    inside = os.environ.get("MINIDIST_RANK")
    if inside is not None and not dist.is_initialized():
        raise RuntimeError(
            f"this process belongs to rank {inside} of a launch: it cannot start ranks, or join another world. "
            "A call at the top of a file that ranks import belongs under: if __name__ == '__main__'"
        )
    if inside is not None:
        return environment.Environment(dist.get_rank(), dist.get_world_size(), dist.get_rank(), "launch")
    return environment.resolve(os.environ)


def _check_here(here: environment.Environment, ranks: int | None, pace: Any) -> None:
    """Raise if this process, one of the ranks that something else started, cannot do what is asked."""
    if here.source == "launch":
        raise RuntimeError(f"launch was called on rank {here.rank} of a launch; a rank cannot start ranks")
    if ranks is not None and ranks != here.size:
        raise ValueError(
            f"ranks={ranks}, but {here.source} started {here.size} ranks: leave ranks out, or start another number"
        )
    if pace is not None:
        raise ValueError(f"pace works with ranks that launch starts itself, not under {here.source}")


def _run_there(fn: Callable[..., Any], args: Sequence[Any], job: Job, pace: Any) -> list[Any]:
    """On processes of our own."""
    _launcher.warm_up()
    try:
        packed = payload.dump((fn, tuple(args), pace))
    except Exception as error:
        raise arguments.why_unpicklable(fn, args, error, payload.dump) from None
    texts = sources.not_on_disk(packed.files)
    job = replace(job, sources=texts, cwd=os.getcwd(), path=parent.search_path(), **_settings(job.ranks))
    look = report.Look(sources.line, sources.name)
    try:
        ending, results = _launcher.run(job, packed.pieces)
    except parent.Lost as lost:
        raise LaunchError("lost", f"the process that starts the ranks went away: {lost}") from None
    except parent.Interrupted as stop:
        raise _interrupt(report.interrupted(stop.ending, look)) from None
    if ending.verdict != "ok":
        raise LaunchError(ending.verdict, report.explain(ending, job.timeout, look))
    return _values(results)


def _interrupt(message: str) -> KeyboardInterrupt:
    """What Ctrl-C raises, with a message, which is all that IPython shows."""
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: f"KeyboardInterrupt: {message}".splitlines()  # type: ignore[attr-defined]
    return error


def _settings(ranks: int) -> dict[str, Any]:
    """What the ranks take from this process's environment, and what they get where it says nothing."""
    env = dict(os.environ)
    if sys.platform != "win32":
        env.setdefault("GLOO_SOCKET_IFNAME", environment.loopback())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"env": env, "threads": environment.threads(env, cores, ranks)}


def _values(fds: list[int]) -> list[Any]:
    """What the ranks returned, from its descriptors, which are closed."""
    values = []
    try:
        for fd in fds:
            values.append(payload.read(fd))
    except Exception as error:
        what = f"what rank {len(values)} returned cannot be read here: {type(error).__name__}: {error}"
        raise LaunchError("error", what) from error
    finally:
        for fd in fds:
            os.close(fd)
    return values


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
