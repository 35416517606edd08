"""Gradient accumulation: no_sync keeps gradients local, and the next synchronised backward averages all of them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidist as md

INPUTS = [(1.0, 3.0), (2.0, 4.0)]  # rank -> its two micro-batches. loss = w x, so the whole batch's gradient is 5


class Weight(nn.Module):
    """x -> w x."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * x


def usual(replica, first, second):
    """Forward and backward of the first micro-batch inside."""
    with replica.no_sync():
        replica(first).backward()
    replica(second).backward()


def forwards_first(replica, first, second):
    """Both forward passes outside, and only the first backward inside."""
    losses = replica(first), replica(second)
    with replica.no_sync():
        losses[0].backward()
    losses[1].backward()


def interrupted(replica, first, second):
    """An exception leaves no_sync; what follows is a step like any other."""
    try:
        with replica.no_sync():
            replica(first)
            raise KeyError("data")
    except KeyError:
        pass
    replica(first).backward()
    replica(second).backward()


def nested(replica, first, second):
    with replica.no_sync():
        with replica.no_sync():
            pass
        replica(first).backward()
    replica(second).backward()


def all_inside(replica, first, second):
    with replica.no_sync():
        replica(first).backward()
        replica(second).backward()


class FlagNotRestored(md.DataParallel):
    """no_sync without its finally."""

    def no_sync(self):
        return self._Inside(self)

    class _Inside:
        def __init__(self, replica):
            self.replica = replica

        def __enter__(self):
            self.replica._accumulating = True

        def __exit__(self, kind, *rest):
            if kind is None:
                self.replica._accumulating = False


def gradient(world, case, wrap):
    replica = wrap(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case(replica, *(torch.tensor(x) for x in INPUTS[world.rank]))
    return replica.module.w.grad.item(), getattr(replica, "synced", None)


def cases(world):
    ours = lambda world: md.DataParallel(Weight(), world)
    theirs = lambda world: DistributedDataParallel(Weight())
    wrong = lambda world: FlagNotRestored(Weight(), world)
    found = {case.__name__: gradient(world, case, ours) for case in (usual, forwards_first, interrupted, nested)}
    found["all inside"] = gradient(world, all_inside, ours)
    found["torch: usual"] = gradient(world, usual, theirs)
    found["torch: forwards first"] = gradient(world, forwards_first, theirs)
    found["fault: flag not restored"] = gradient(world, interrupted, wrong)
    return found


@pytest.fixture(scope="module")
def everywhere():
    return md.launch(cases, ranks=2)


def test_accumulated_gradient_is_that_of_the_whole_batch(everywhere):
    for found in everywhere:
        for case in (usual, forwards_first, interrupted, nested):
            assert found[case.__name__] == (5.0, True)
        assert found["torch: usual"][0] == 5.0
    # What the comparison must see: torch's wrapper where the flag was read during the forward pass, and a lost flag.
    assert [found["torch: forwards first"][0] for found in everywhere] == [4.5, 5.5]
    assert [found["fault: flag not restored"] for found in everywhere] == [(4.0, False), (6.0, False)]


def test_a_step_without_averaging_can_be_told(everywhere):
    assert [found["all inside"] for found in everywhere] == [(4.0, False), (6.0, False)]


def test_synced_follows_the_backward_passes(solo):
    replica = md.DataParallel(Weight(), solo)
    seen = [replica.synced]
    replica(torch.ones(())).backward()
    seen.append(replica.synced)
    with replica.no_sync():
        replica(torch.ones(())).backward()
    seen.append(replica.synced)
    replica(torch.ones(())).backward()
    assert [*seen, replica.synced] == [False, True, False, True]
