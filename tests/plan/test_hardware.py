"""Chips, links and clusters: units, layout, presets against the published table, refusals."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.plan import hardware

FAST, SLOW = md.Link(alpha_s=1e-6, bytes_per_s=1e11), md.Link(alpha_s=1e-5, bytes_per_s=1e9)


def test_seconds():
    assert md.Link(alpha_s=2.0, bytes_per_s=4.0).seconds(8) == 4.0
    assert SLOW.beta_s_per_byte == pytest.approx(1e-9)
    assert md.Chip(flops_per_s=5.0).seconds(10) == 2.0
    assert md.Link().seconds(10**12) == 0.0, "what is not given is not a limit"


@given(st.integers(1, 6), st.integers(1, 6))
def test_ranks_fill_machine_by_machine(machines, chips):
    cluster = md.Cluster(machines=machines, chips=chips, inside=FAST, between=SLOW)
    homes = [cluster.machine(rank) for rank in range(cluster.ranks)]
    assert homes == [machine for machine in range(machines) for _ in range(chips)]
    for src in range(cluster.ranks):
        for dst in range(cluster.ranks):
            if src != dst:
                assert cluster.link(src, dst) is (FAST if homes[src] == homes[dst] else SLOW)


def test_the_slowest_link_of_a_ring_decides():
    cluster = md.Cluster(machines=2, chips=2, inside=FAST, between=SLOW)
    assert cluster.slowest((0, 1)) is FAST
    assert cluster.slowest((0, 1, 2, 3)) is SLOW
    late = md.Cluster(machines=2, chips=2, inside=md.Link(alpha_s=1.0), between=SLOW)
    assert late.slowest((0, 1, 2, 3), 1) is late.inside, "for small messages the one with the longer latency"
    assert late.slowest((0, 1, 2, 3), 10**10) is late.between


def test_presets_are_the_published_peaks():
    """Dense 16-bit TFLOP/s, GB, TB/s of the vendors' sheets."""
    published = {
        hardware.V100: (125, 32, 0.9),
        hardware.A100: (312, 80, 2.039),
        hardware.H100: (989.4, 80, 3.35),
        hardware.H200: (989.4, 141, 4.8),
        hardware.B200: (2250, 180, 8.0),
        hardware.MI300X: (1307.4, 192, 5.3),
    }
    for chip, (tera, giga, tera_bytes) in published.items():
        assert (chip.flops_per_s, chip.memory_bytes) == pytest.approx((tera * 1e12, giga * 1e9))
        assert chip.memory_bytes_per_s == pytest.approx(tera_bytes * 1e12)
        assert "github.com" in chip.source
    for make, inside, between in (
        (hardware.dgx_a100, 300e9, 25e9),
        (hardware.dgx_h100, 450e9, 50e9),
        (hardware.dgx_b200, 900e9, 50e9),
    ):
        cluster = make(machines=3)
        assert (cluster.ranks, cluster.link(0, 7).bytes_per_s, cluster.link(7, 8).bytes_per_s) == (24, inside, between)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: md.Link(bytes_per_s=0), "Link: bytes_per_s must be greater than 0, got 0"),
        (lambda: md.Link(alpha_s=-1e-6), "Link: alpha_s must be 0 or greater"),
        (lambda: md.Link(alpha_s=math.nan), "alpha_s"),
        (lambda: md.Chip(flops_per_s=-1), "Chip: flops_per_s"),
        (lambda: md.Cluster(machines=0), "Cluster: machines must be a whole number from 1, got 0"),
        (lambda: md.Cluster(chips=2.0), "chips must be a whole number"),
        (lambda: md.Cluster(machines=2, chips=2).machine(4), "rank 4 has no chip: 2 machines of 2 chips take 4 ranks"),
        (lambda: md.Cluster(chips=2).link(1, 1), "no link from rank 1 to itself"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_they_do_not_change():
    with pytest.raises(FrozenInstanceError):
        SLOW.alpha_s = 0.0  # type: ignore[misc]
    assert replace(SLOW, alpha_s=0.0).bytes_per_s == SLOW.bytes_per_s
