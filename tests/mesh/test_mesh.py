"""Mesh: the arithmetic for any grid, the groups every rank makes, and the Comms on real ranks."""

import re
from itertools import combinations
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.mesh import Mesh, check_axes, coordinate_of, groups_along, rank_at

CUBE = {"pp": 2, "dp": 2, "tp": 2}
grids = st.lists(st.integers(1, 4), max_size=4).map(lambda sizes: dict(zip("abcd", sizes, strict=False)))


@given(grids)
def test_coordinates_and_ranks_are_each_others_inverse(axes):
    places = [coordinate_of(rank, axes) for rank in range(prod(axes.values()))]
    assert [rank_at(place, axes) for place in places] == list(range(len(places)))
    for place in places:
        assert list(place) == list(axes)
        assert all(0 <= place[axis] < size for axis, size in axes.items())


def test_the_last_axis_varies_fastest():
    assert [tuple(coordinate_of(rank, CUBE).values()) for rank in range(4)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
    ]
    assert coordinate_of(5, {"dp": 2, "tp": 4}) == {"dp": 1, "tp": 1}


def check_groups(groups, names, axes):
    """Every rank in exactly one group; a group's members share all coordinates but `names`, and come in mesh order."""
    assert sorted(rank for group in groups for rank in group) == list(range(prod(axes.values())))
    for group in groups:
        assert len(group) == prod(axes[name] for name in names)
        places = [coordinate_of(rank, axes) for rank in group]
        assert len({tuple(place[axis] for axis in axes if axis not in names) for place in places}) == 1
        inside = {name: axes[name] for name in names}
        assert [rank_at({name: place[name] for name in names}, inside) for place in places] == list(range(len(group)))


@given(grids, st.data())
def test_groups(axes, data):
    names = tuple(axis for axis in axes if data.draw(st.booleans()))
    check_groups(groups_along(names, axes), names, axes)


def test_that_check_notices_the_axes_taken_from_the_wrong_end():
    assert groups_along(("dp",), {"dp": 2, "tp": 3}) == [[0, 3], [1, 4], [2, 5]]
    check_groups([[0, 3], [1, 4], [2, 5]], ("dp",), {"dp": 2, "tp": 3})
    with pytest.raises(AssertionError):
        check_groups([[0, 1], [2, 3], [4, 5]], ("dp",), {"dp": 2, "tp": 3})


class Recorded:
    """Stands for the world: notes what is asked of it, sends nothing."""

    def __init__(self, rank, size):
        self.rank, self.size, self.made = rank, size, []

    def subgroups(self, groups, name):
        self.made.append((name, groups))
        mine = next(group for group in groups if self.rank in group)
        return name, mine


@pytest.mark.parametrize("axes", [CUBE, {"dp": 8}, {"pp": 1, "dp": 4, "cp": 1, "tp": 2}, {"dp": 1}, {}])
def test_all_ranks_make_the_same_groups_in_the_same_order(axes):
    size = prod(axes.values())
    worlds = [Recorded(rank, size) for rank in range(size)]
    meshes = [Mesh(axes, world) for world in worlds]
    assert all(world.made == worlds[0].made for world in worlds)
    made = sum(len(groups) for _, groups in worlds[0].made if len(groups[0]) > 1)
    alone = size if size > 1 else 0  # groups of one rank, which cost nothing; the world itself is there already
    assert made == prod(1 + n for n in axes.values() if n > 1) - 1 - alone
    for rank, mesh in enumerate(meshes):
        for count in range(1, len(axes) + 1):
            for names in combinations(axes, count):
                expected = next(group for group in groups_along(names, axes) if rank in group)
                got = mesh[names]
                assert got is mesh.world if len(expected) == size else got[1] == expected


def test_the_wrong_number_of_ranks_is_explained():
    check_axes(CUBE, 8)
    for axes, ranks, message in [
        (
            CUBE,
            4,
            "the mesh pp=2 x dp=2 x tp=2 has 8 ranks, the world has 4: start 8 ranks, or use pp=1 or dp=1 or tp=1",
        ),
        (CUBE, 16, "start 8 ranks, or use pp=4 or dp=4 or tp=4"),
        (CUBE, 7, "has 8 ranks, the world has 7: start 8 ranks"),
        ({"dp": 2, "tp": 3}, 9, "start 6 ranks, or use dp=3"),
        ({}, 2, "the mesh without axes has 1 ranks, the world has 2"),
        ({"dp": 0}, 1, "'dp': 0"),
        ({"dp": 2.0}, 2, "'dp': 2.0"),
        ({3: 2}, 2, "3: 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            check_axes(axes, ranks)
    with pytest.raises(ValueError, match="has 8 ranks, the world has 4"):
        Mesh(CUBE, Recorded(0, 4))


def test_names_are_checked():
    mesh = Mesh(CUBE, Recorded(3, 8))
    assert repr(mesh) == "Mesh(pp=2, dp=2, tp=2; this is rank 3, at pp=0, dp=1, tp=1)"
    with pytest.raises(KeyError, match="no axis 'ep' in this mesh: its axes are pp, dp, tp"):
        mesh["dp", "ep"]
    with pytest.raises(
        ValueError, match=re.escape("mesh['tp', 'dp']: name each axis once and in mesh order, mesh['dp', 'tp']")
    ):
        mesh["tp", "dp"]
    with pytest.raises(ValueError, match="once"):
        mesh["dp", "dp"]


def on_real_ranks(world):
    """What each rank sees of a 2 x 2 x 2 mesh, and of one with an axis of one rank."""
    mesh, seen = md.Mesh(CUBE, world), {}
    for count in (1, 2, 3):
        for names in combinations(CUBE, count):
            comm = mesh[names]
            total = comm.all_reduce(torch.tensor([world.rank]))
            seen[names] = (comm.ranks, comm.rank, total.item())
    if mesh.coordinate["pp"] == 0:  # asking is not a collective: half of the ranks may
        seen["half"] = mesh["dp", "tp"].all_reduce(torch.ones(1)).item()
    flat = md.Mesh({"pp": 1, "dp": 4, "tp": 2}, world)
    x = torch.tensor([float(world.rank)])
    seen["alone"] = (flat["pp"].size, flat["pp"].all_reduce(x.clone()).item(), flat["pp", "tp"].ranks)
    data = md.stdlib_tokens(seq=16, batch=8)
    tokens = data.batch(5, rank=flat.coordinate["dp"], ranks=flat["dp"].size)[0]
    seen["tokens"] = tokens.flatten().tolist()
    return mesh.coordinate, seen


def test_on_real_ranks():
    results = md.launch(on_real_ranks, ranks=8)
    batches = set()
    for rank, (coordinate, seen) in enumerate(results):
        assert coordinate == coordinate_of(rank, CUBE)
        for count in (1, 2, 3):
            for names in combinations(CUBE, count):
                group = next(group for group in groups_along(names, CUBE) if rank in group)
                assert seen[names] == (tuple(group), group.index(rank), sum(group))
        assert seen.get("half") == (4 if rank < 4 else None)
        assert seen["alone"] == (1, rank, (rank // 2 * 2, rank // 2 * 2 + 1))
        # Two ranks of a tp group read the same tokens, and no two replicas do.
        assert seen["tokens"] == results[rank // 2 * 2][1]["tokens"]
        batches.add(tuple(seen["tokens"]))
    assert len(batches) == 4
