"""The predicted data-parallel step and the alpha-beta fit."""

import random

import pytest

from minidist.plan.fit import fit_alpha_beta
from minidist.plan.step import buckets, data_parallel_step


def step(overlap, bucket=10, all_reduce_s=lambda nbytes: nbytes / 5, layers=4, ranks=1):
    return data_parallel_step(
        [1] * layers, [2] * layers, [10] * layers, all_reduce_s, bucket, overlap=overlap, update_s=1, ranks=ranks
    )


def test_overlap_hides_all_but_the_last_bucket():
    """Backward 2 s a layer, averaging 2 s a layer: with overlap only the first layer's averaging shows."""
    assert step(overlap=False).makespan == 4 + 8 + 8 + 1
    assert step(overlap=True).makespan == 4 + 8 + 2 + 1
    assert step(overlap=True).overlap == 6 / 8
    assert step(overlap=False).overlap == 0


def test_one_bucket_of_everything_cannot_overlap():
    assert step(overlap=True, bucket=1000).makespan == step(overlap=False, bucket=1000).makespan


def test_where_averaging_is_slower_than_backward_the_link_decides():
    slow = step(overlap=True, all_reduce_s=lambda nbytes: nbytes)
    assert slow.makespan == 4 + 2 + 4 * 10 + 1  # forward, the last layer's backward, four buckets in a row


def test_every_byte_travels_once_and_buckets_keep_the_order_of_the_backward_pass():
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.randint(0, 50) for _ in range(rng.randint(1, 12))]
        room = rng.randint(1, 80)
        filled = buckets(sizes, room)
        assert [layer for bucket in filled for layer in bucket] == list(reversed(range(len(sizes))))
        assert all(len(bucket) == 1 or sum(sizes[layer] for layer in bucket) <= room for bucket in filled)


def test_every_rank_has_the_same_predicted_spans():
    timeline = step(overlap=True, ranks=3)
    assert timeline.kind == "predicted"
    assert timeline.ranks == (0, 1, 2)
    first, second = ([(s.action, s.start, s.end) for s in timeline.spans if s.rank == rank] for rank in (0, 2))
    assert first == second


def test_fit_finds_alpha_and_beta_through_noise():
    rng = random.Random(1)
    sizes = [4**k for k in range(1, 13)]
    alpha, beta = fit_alpha_beta(sizes, [(2e-4 + 1e-9 * s) * rng.uniform(0.9, 1.1) for s in sizes])
    assert alpha == pytest.approx(2e-4, rel=0.1)
    assert beta == pytest.approx(1e-9, rel=0.1)


def test_fit_is_not_ruled_by_the_largest_message():
    """Unweighted least squares would put alpha anywhere, even below zero, for 2 % noise on the largest time."""
    sizes = [1, 100, 10_000, 1_000_000, 100_000_000]
    seconds = [1e-4 + 1e-9 * s for s in sizes]
    seconds[-1] *= 1.02
    alpha, _ = fit_alpha_beta(sizes, seconds)
    assert alpha == pytest.approx(1e-4, rel=0.05)


def test_fit_gives_no_negative_numbers():
    assert fit_alpha_beta([1, 2, 4], [1, 2.2, 4.8])[0] == 0
    assert fit_alpha_beta([1, 2, 4], [4, 2, 1])[1] == 0


@pytest.mark.parametrize(("sizes", "seconds"), [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1])])
def test_fit_refuses_what_it_cannot_fit(sizes, seconds):
    with pytest.raises(ValueError, match=r"measure|monotonic"):
        fit_alpha_beta(sizes, seconds)
