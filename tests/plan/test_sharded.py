"""The predicted step of stage 3, by hand and by its bounds."""

import random
from itertools import pairwise

import pytest

from minidist.plan.sharded import sharded_step


def step(prefetch=True, layers=4, forward=2, backward=4, gather=1, root=0.0, update=0.0, ranks=1):
    """Layers of one byte each; sending a byte takes `gather` seconds."""
    return sharded_step(
        [forward] * layers,
        [backward] * layers,
        [1] * layers,
        lambda nbytes: gather * nbytes,
        lambda nbytes: gather * nbytes,
        root_nbytes=root,
        prefetch=prefetch,
        update_s=update,
        ranks=ranks,
    )


def names(timeline, lane="comm"):
    return [str(span.action) for span in timeline.lane(0, lane)]


def test_prefetch_hides_all_but_the_first_gathering_of_each_pass_and_the_last_reduction():
    """4 layers, 2 s forward and 4 s backward, 1 s to gather or reduce one."""
    assert step().makespan == (1 + 4 * 2) + (1 + 4 * 4) + 1
    assert step(prefetch=False).makespan == 4 * (1 + 2) + 4 * (1 + 4) + 1
    assert step(update=3.0).makespan == step().makespan + 3


def test_what_belongs_to_no_layer_is_gathered_first_in_each_pass_and_reduced_last():
    with_root = step(root=0.5)
    assert with_root.makespan == step().makespan + 3 * 0.5
    assert names(with_root)[:3] == ["gather root", "gather 0", "gather 1"]
    assert names(with_root)[-2:] == ["reduce 0", "reduce root"]


def test_where_gathering_is_slower_than_computing_the_link_decides():
    slow = step(gather=10)
    # Computing shows twice: the last forward pass, and half a backward pass until the second layer is asked for.
    assert slow.makespan == 4 * 10 + 2 + 8 * 10 + 2
    assert slow.lane(0, "compute")[0].start == 10


def test_every_layer_is_gathered_twice_and_reduced_once():
    for prefetch in (True, False):
        sent = names(step(prefetch, root=1.0))
        assert sorted(sent) == sorted(
            [f"gather {what}" for what in (*range(4), "root")] * 2 + [f"reduce {what}" for what in (*range(4), "root")]
        )


def test_a_layer_computes_after_it_was_gathered_and_the_link_carries_one_thing_at_a_time():
    rng = random.Random(0)
    for _ in range(200):
        layers = rng.randint(1, 6)
        made = sharded_step(
            [rng.uniform(0, 3) for _ in range(layers)],
            [rng.uniform(0, 3) for _ in range(layers)],
            [rng.randint(1, 9) for _ in range(layers)],
            lambda nbytes: nbytes / 3,
            lambda nbytes: nbytes / 2,
            root_nbytes=rng.choice([0, 2]),
            prefetch=rng.random() < 0.5,
        )
        link, compute = made.lane(0, "comm"), made.lane(0, "compute")
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(link))
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(compute))
        gathered = {"forward": {}, "backward": {}}
        for span in link:
            kind, layer = str(span.action).split(" ")
            if kind == "gather":
                gathered["backward" if layer in gathered["forward"] else "forward"][layer] = span.end
        for span in compute:
            which, layer = str(span.action).split(" ")
            assert gathered[which][layer] <= span.start + 1e-12


def test_prefetch_never_takes_longer_and_all_ranks_do_the_same():
    assert step(ranks=3).ranks == (0, 1, 2)
    for gather in (0, 0.5, 1, 2, 4, 8):
        assert step(gather=gather).makespan <= step(prefetch=False, gather=gather).makespan
    assert step(gather=0).makespan == pytest.approx(4 * (2 + 4))
