"""Alpha-beta costs against the published formulas, evaluated here from their text."""

from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.plan import cost

# (p ranks, n bytes) -> (number of alphas, number of betas), as in Thakur, Rabenseifner, Gropp and Patarasuk, Yuan.
PUBLISHED = {
    ("all_gather", "ring"): lambda p, n: (p - 1, (p - 1) / p * n),
    ("all_gather", "doubling"): lambda p, n: (log2(p), (p - 1) / p * n),
    ("all_gather", "bruck"): lambda p, n: (ceil(log2(p)), (p - 1) / p * n),
    ("broadcast", "tree"): lambda p, n: (ceil(log2(p)), ceil(log2(p)) * n),
    ("broadcast", "scatter_all_gather"): lambda p, n: (log2(p) + p - 1, 2 * (p - 1) / p * n),
    ("reduce_scatter", "halving"): lambda p, n: (log2(p), (p - 1) / p * n),
    ("reduce_scatter", "ring"): lambda p, n: (p - 1, (p - 1) / p * n),
    ("reduce", "tree"): lambda p, n: (ceil(log2(p)), ceil(log2(p)) * n),
    ("all_reduce", "halving_doubling"): lambda p, n: (2 * log2(p), 2 * (p - 1) / p * n),
    ("all_reduce", "ring"): lambda p, n: (2 * (p - 1), 2 * (p - 1) / p * n),
    ("all_reduce", "tree"): lambda p, n: (2 * ceil(log2(p)), 2 * ceil(log2(p)) * n),
    ("all_to_all", "bruck"): lambda p, n: (log2(p), n / 2 * log2(p)),
    ("all_to_all", "pairwise"): lambda p, n: (p - 1, (p - 1) / p * n),
}


def check_published(algorithms, p, n):
    for (op, name), formula in PUBLISHED.items():
        traffic = algorithms[op][name](n, p)
        assert (traffic.messages, traffic.count) == pytest.approx(formula(p, n)), f"{op} by {name}"


@given(st.integers(0, 6), st.integers(0, 100))
def test_powers_of_two_that_divide_are_as_published(k, pieces):
    check_published(cost.ALGORITHMS, 2**k, 2**k * 2 * pieces)


def test_every_algorithm_is_covered():
    names = {(op, name) for op, known in cost.ALGORITHMS.items() for name in known}
    assert names - set(PUBLISHED) == {("barrier", "dissemination")}


def test_the_check_notices_half_a_ring():
    wrong = dict(cost.ALGORITHMS, all_reduce=dict(cost.ALGORITHMS["all_reduce"], ring=cost.ring_half))
    with pytest.raises(AssertionError, match="all_reduce by ring"):
        check_published(wrong, 4, 16)


@given(st.integers(2, 40), st.integers(0, 1000))
def test_elsewhere_whole_pieces_are_sent(p, n):
    assert cost.ring_all_reduce(n, p) == cost.Traffic(2 * (p - 1), 2 * (p - 1) * ceil(Fraction(n, p)))
    assert cost.tree(n, p).messages == ceil(log2(p)) == cost.log2_ceil(p)


def test_the_published_sanity_case():
    """A ring all-reduce of 1 GB over 8 ranks at 100 GB/s a direction takes 17.5 ms."""
    assert cost.seconds("all_reduce", 10**9, 8, md.Link(0.0, 100e9)) * 1e3 == pytest.approx(17.5)
    latency = md.Link(alpha_s=1e-3)
    assert cost.seconds("all_reduce", 10**9, 8, latency) == pytest.approx(14e-3)
    assert cost.seconds("all_reduce", 10**9, 8, latency, "tree") == pytest.approx(6e-3)


def test_c12_bytes():
    """4 ranks, 16 elements: an all-reduce sends 24 of them, an all-gather of 16 in all sends 12."""
    assert [cost.bytes_sent(op, 64, 4) // 4 for op in ("all_reduce", "all_gather", "reduce_scatter")] == [24, 12, 12]
    assert cost.bytes_sent("all_reduce", 10**9, 1) == 0
    assert cost.bytes_sent("barrier", 0, 4) == 0


@given(st.integers(1, 50), st.integers(0, 10**12))
def test_bus_factors_are_those_of_nccl_tests(n, nbytes):
    published = {
        "all_reduce": Fraction(2 * (n - 1), n),
        "reduce_scatter": Fraction(n - 1, n),
        "all_gather": Fraction(n - 1, n),
        "all_to_all": Fraction(n - 1, n),
        "broadcast": Fraction(int(n > 1)),
        "reduce": Fraction(int(n > 1)),
    }
    for op, factor in published.items():
        assert cost.bus_factor(op, n) == factor
        assert cost.bytes_sent(op, nbytes, n) == ceil(factor * nbytes)


def test_a_hierarchy_pays_where_links_differ():
    fast, slow = md.Link(1e-6, 100e9), md.Link(1e-5, 10e9)
    flat = cost.seconds("all_reduce", 10**9, 16, slow)
    assert cost.hierarchical_seconds(10**9, 2, 8, fast, slow) < flat / 5
    assert cost.hierarchical_seconds(10**9, 1, 8, fast, slow) == pytest.approx(
        cost.seconds("all_reduce", 10**9, 8, fast)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cost.seconds("gather", 1, 2, md.Link()), "op 'gather' is none of all_reduce"),
        (lambda: cost.seconds("all_reduce", 1, 2, md.Link(), "rings"), "by 'rings' is not known; by ring, halving"),
        (lambda: cost.bytes_sent("allreduce", 1, 2), "op 'allreduce'"),
        (lambda: cost.halving(4, 3), "power of two"),
    ],
)
def test_what_has_no_formula_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(st.integers(1, 50), st.integers(1, 64), st.integers(1, 8))
def test_sequence_parallelism_moves_the_same_bytes_forward(tokens, dim, ranks):
    """Where the ranks divide the tokens; Korthikanti et al., 4.2.2. Going back it gathers what entered once more."""
    plain = cost.tensor_parallel_layer(tokens * ranks, dim, ranks)
    cut = cost.tensor_parallel_layer(tokens * ranks, dim, ranks, sequence=True)
    whole = tokens * ranks * dim * 4
    assert plain["forward"] == plain["backward"] == {"all_reduce": 2 * 2 * (ranks - 1) * whole // ranks}
    assert sum(cut["forward"].values()) == plain["forward"]["all_reduce"]
    assert cut["backward"]["regather"] == cut["forward"]["all_gather"]
    assert cut["backward"]["norm gradients"] == 2 * ceil(2 * Fraction(ranks - 1, ranks) * dim * 4)
