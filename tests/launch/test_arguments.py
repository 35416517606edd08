"""What cannot work is refused before anything starts, with what to change."""

import dataclasses
import functools
import pickle
import threading

import numpy
import pytest
import torch

import minidist as md
from minidist.launcher import arguments
from minidist.launcher.job import Job
from minidist.launcher.parent import Launcher


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_):
        raise AssertionError("something was started")

    monkeypatch.setattr(Launcher, "run", fail)


def fine(world, x=1):
    return x


lock = threading.Lock()


class Holder:
    def __init__(self):
        self.generator = (i for i in range(3))

    def method(self, world):
        return next(self.generator)


def refers_to_a_lock(world):
    return lock


def calls_what_is_missing(world):
    return also_calls(world)


def also_calls(world):
    return [defined_nowhere for _ in range(3)]  # noqa: F821


def handles_it_itself(world):
    try:
        return defined_nowhere
    except NameError:
        return 0


def sets_it_itself(world):
    global set_here
    set_here = 1
    return set_here


def sets_it_for_another():
    global set_there
    set_there = 1


def has_it_set(world):
    sets_it_for_another()
    return set_there


BAD = [
    (dict(ranks=0), ValueError, "ranks must be a whole number from 1 to 256, and is 0"),
    (dict(ranks="4"), TypeError, "ranks must be a whole number"),
    (dict(ranks=2.0), TypeError, "ranks must be a whole number"),
    (dict(ranks=True), TypeError, "ranks must be a whole number"),
    (dict(timeout=0), ValueError, "timeout must be a number of seconds, from above 0 to 10^7, and is 0"),
    (dict(timeout=float("nan")), ValueError, "timeout"),
    (dict(timeout="5"), TypeError, "timeout"),
    (dict(seed=0.5), TypeError, "seed must be a whole number"),
    (dict(seed=2**64), ValueError, "seed must be a whole number of at most 64 bits, and is 18446744073709551616"),
    (dict(check="no"), TypeError, "check must be True or False, and is 'no'"),
    (dict(backend=""), ValueError, "backend must be one of gloo, nccl, or None for gloo, and is ''"),
    (dict(backend="mpi"), ValueError, "backend must be one of gloo, nccl"),
    (dict(pace="fast"), TypeError, "pace must be a Cluster, and is 'fast'"),
    (dict(pace=md.Cluster), TypeError, "pace must be a Cluster"),
    (dict(pace=md.Cluster(machines=1, chips=2)), ValueError, "pace has 1 x 2 chips for 4 ranks"),
    (dict(args=5), TypeError, "write args=(x,)"),
    (dict(args=(1, 2)), TypeError, "each rank calls fine(world, args[0], args[1]), but it is fine(world, x=1)"),
    (dict(fn=fine(None)), TypeError, "launch takes a function, not int: write md.launch(f), not md.launch(f(...))"),
    (dict(fn=lambda: 0), TypeError, "each rank calls <lambda>(world)"),
    (dict(fn=calls_what_is_missing), NameError, "name 'defined_nowhere' is not defined: "),
    (dict(fn=refers_to_a_lock), TypeError, "'lock' (a lock), which refers_to_a_lock uses, cannot be sent to the ranks"),
    (dict(fn=Holder().method), TypeError, "the object whose method this is (a Holder) cannot be sent"),
    (dict(args=(lock,)), TypeError, "args[0] (a lock) cannot be sent to the ranks"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_refused(options: dict, kind: type[Exception], message: str):
    with pytest.raises(kind) as caught:
        md.launch(**{"fn": fine, **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("gpus", [0, 1])
def test_more_nccl_ranks_than_gpus(gpus: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match="each of the 2 ranks") as caught:
        md.launch(fine, ranks=2, backend="nccl")
    assert ("no GPU" if gpus == 0 else "1 GPU") in str(caught.value)
    assert "backend='gloo'" in str(caught.value)


def has_a_class_inside(world):
    @dataclasses.dataclass
    class Point:
        x: int = 0

        def again(self) -> "Point":
            return Point(self.x)

    return Point().again()


def decorate(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)

    return wrapper


def recursive():
    def inner(world):
        return inner(world) or later

    if recursive is None:
        later = 1  # its cell stays empty
    return inner


GOOD = [fine, handles_it_itself, sets_it_itself, has_it_set, has_a_class_inside, Holder.method, Launcher, print]
GOOD += [functools.partial(fine, x=2), decorate(fine), recursive()]


@pytest.mark.parametrize("fn", GOOD)
def test_names_that_are_there(fn):
    arguments.check_names(fn)


@pytest.mark.parametrize("fn", [also_calls, decorate(also_calls), functools.partial(also_calls)])
def test_the_line_of_a_missing_name(fn):
    with pytest.raises(NameError, match=r"'defined_nowhere' is not defined: \S+ line \d+, reads it"):
        arguments.check_names(fn)


def test_numbers_of_numpy_will_do():
    job = Job(numpy.int64(2), numpy.float32(3.5), seed=numpy.int32(7))
    again = Job.decode(job.encode())
    assert (again.ranks, again.timeout, again.seed) == (2, 3.5, 7)


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(md.LaunchError("deadlock", "all wait")))
    assert (error.verdict, str(error)) == ("deadlock", "all wait")
