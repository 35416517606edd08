"""Whatever goes from one placement to another is still the same tensor: any sizes, empty shards, any summands."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import placement
from minidist.comm import wire
from minidist.comm.comm import Comm
from minidist.placement import Partial, Replicate, Shard

RANKS = (1, 2, 3, 4)
SHAPES = ((1,), (3,), (6, 2), (5, 3, 2), (2, 0, 3), (7, 4), (1, 9))
DTYPES = (torch.float64, torch.bfloat16, torch.int64)


def whole(shape, dtype=torch.float64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=draw).to(dtype)


def parts(x, where, ranks, seed=1):
    """What each rank has of x: the definition, in torch alone."""
    if isinstance(where, Replicate):
        return [x] * ranks
    if isinstance(where, Shard):
        return [x[(slice(None),) * where.dim + (cut,)] for cut in md.partition(x.shape[where.dim], ranks)]
    summands = [whole(x.shape, x.dtype, seed + r) for r in range(ranks - 1)]
    return [*summands, x - sum(summands, torch.zeros_like(x))]


def placements(shape):
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(len(shape)))]


def cases():
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        for src, dst in itertools.product(placements(shape), repeat=2):
            if src == dst or not isinstance(dst, Partial):
                yield shape, dtype, src, dst


def wrong(world):
    """The cases whose result is not what the definition says, and whether any input was changed."""
    found = []
    for shape, dtype, src, dst in cases():
        x = whole(shape, dtype)
        mine = parts(x, src, world.size)[world.rank]
        before = mine.clone()
        got = md.redistribute(mine, src, dst, world)
        expected = parts(x, dst, world.size)[world.rank]
        if not (got.shape == expected.shape and torch.equal(got, expected) and torch.equal(mine, before)):
            found.append((shape, dtype, src, dst))
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_every_pair_of_placements(ranks):
    assert md.launch(wrong, ranks=ranks) == [[]] * ranks


FAULTS = {
    "torch.tensor_split's cut": (placement, "partition", lambda n, ranks: _tensor_split(n, ranks)),
    "a mean for a sum": (Comm, "all_reduce", lambda comm, x: x.div_(comm.size)),
}


def _tensor_split(n, ranks):
    starts = [r * (n // ranks) + min(r, n % ranks) for r in range(ranks + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(starts)]


def spoiled(world):
    """Whether this rank's result is wrong under each fault. Five rows on 4 ranks are 2, 2, 1, 0 and not 2, 1, 1, 1."""
    found = {}
    for name, fault in FAULTS.items():
        x = whole((5, 3))
        with mock.patch.object(*fault):
            got = [md.redistribute(x, Replicate(), Shard(0), world), md.redistribute(x, Partial(), Replicate(), world)]
        right = [x[md.partition(5, world.size)[world.rank]], x * world.size]
        found[name] = not all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    return found


def test_mistakes_are_seen():
    everywhere = md.launch(spoiled, ranks=4)
    assert all(any(found[name] for found in everywhere) for name in FAULTS)


# ---- any shape, any chain --------------------------------------------------------------------------------------------


@st.composite
def journeys(draw):
    """A shape and placements to go through one after the other."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    stops = draw(st.lists(st.sampled_from([*placements(shape)[2:], Replicate()]), min_size=1, max_size=4))
    return shape, [draw(st.sampled_from(placements(shape))), *stops]


def travel(world, many):
    """Goes through every journey and back to Replicate: the results that are not the tensor it began with."""
    found = []
    for shape, stops in many:
        x = whole(shape)
        local = parts(x, stops[0], world.size)[world.rank]
        for src, dst in itertools.pairwise([*stops, Replicate()]):
            local = md.redistribute(local, src, dst, world)
        if not torch.equal(local, x):
            found.append((shape, stops))
    return found


@settings(max_examples=5, deadline=None)
@given(many=st.lists(journeys(), min_size=20, max_size=40), ranks=st.integers(1, 4))
def test_any_journey_ends_where_it_began(many, ranks):
    assert md.launch(travel, ranks=ranks, args=(many,)) == [[]] * ranks


def ragged(world):
    """Shards that no partition would have cut: 0, 1, 4 rows."""
    mine = torch.arange(world.rank**2 * 2).view(-1, 2) + 100 * world.rank
    whole = md.redistribute(mine, Shard(0), Replicate(), world)
    across = md.redistribute(mine, Shard(0), Shard(1), world)
    return whole.shape == (5, 2) and torch.equal(across, whole[:, md.partition(2, world.size)[world.rank]])


def test_shards_of_any_length_come_together():
    assert all(md.launch(ragged, ranks=3))


def nothing_of_any_type(world):
    """All shards are empty."""
    found = [md.redistribute(torch.zeros(0, 3, dtype=dtype), Shard(0), Replicate(), world) for dtype in wire.DTYPES]
    return [(tuple(x.shape), x.dtype) for x in found] == [((0, 3), dtype) for dtype in wire.DTYPES]


def test_empty_shards_of_any_type_come_together():
    assert all(md.launch(nothing_of_any_type, ranks=2))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_done_says_so():
    solo = Comm(group=None, ranks=(0,), rank=0)
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="nothing undoes a sum"):
        md.redistribute(x, Replicate(), Partial(), solo)
    with pytest.raises(ValueError, match=r"shape \[2, 3\] has no dim 2"):
        md.redistribute(x, Shard(2), Replicate(), solo)
    with pytest.raises(ValueError, match="has no dim 0"):
        md.redistribute(torch.zeros(()), Replicate(), Shard(0), solo)
    with pytest.raises(TypeError, match="not 'Shard'"):
        md.redistribute(x, "Shard", Replicate(), solo)
    assert md.redistribute(x, Shard(-1), Shard(1), solo) is x
