"""The collectives from messages: right for any length and world, with the textbook's counts, and faults that show."""

from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.comm import wire
from minidist.plan import cost

A = md.algorithms
ALL_REDUCES = ("ring_all_reduce", "tree_all_reduce", "halving_doubling_all_reduce")


def part_of(rank, length, dtype):
    """Small whole numbers, different on every rank and for every element."""
    values = (torch.arange(length) * (rank + 2) + 3 * rank + 1) % 7
    return (values % 2 if dtype is torch.bool else values).to(dtype)


def insides(size):
    return [k for k in range(1, size + 1) if size % k == 0]


def check_algorithms(world, lengths, dtypes):
    """Names of the algorithms that give anything else than the sum, or touch what they should not."""
    wrong, rank, size = [], world.rank, world.size
    for dtype in dtypes:
        for length in lengths:
            parts = [part_of(r, length, dtype) for r in range(size)]
            whole = parts[0].clone()
            for part in parts[1:]:
                whole += part
            cuts = md.partition(length, size)

            def expect(name, got, right, name_of=(dtype, length)):
                if got.dtype != right.dtype or not torch.equal(got, right):
                    wrong.append(f"{name} {name_of}: {got.tolist()} for {right.tolist()}")

            for name in ALL_REDUCES:
                x = parts[rank].clone()
                expect(name, getattr(A, name)(x, world), whole)
                expect(f"{name} in place", x, whole)
            for inside in insides(size):
                expect(f"hierarchical {inside}", A.hierarchical_all_reduce(parts[rank].clone(), world, inside), whole)
            x = parts[rank].clone()
            expect("ring_reduce_scatter", A.ring_reduce_scatter(x, world), whole[cuts[rank]])
            expect("ring_reduce_scatter's x", x, parts[rank])
            for name in ("ring_all_gather", "bruck_all_gather"):
                expect(name, getattr(A, name)(parts[rank], world), torch.cat(parts))
                expect(f"ragged {name}", getattr(A, name)(whole[cuts[rank]], world), whole)
            expect("pairwise_all_to_all", A.pairwise_all_to_all(parts[rank], world), world.all_to_all(parts[rank]))
            root = length % size
            expect("tree_broadcast", A.tree_broadcast(parts[rank].clone(), world, root), parts[root])
            x = A.tree_reduce(parts[rank].clone(), world, root)
            expect("tree_reduce", x, whole if rank == root else parts[rank])
    return wrong


@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_length_on_any_world(ranks):
    assert md.launch(check_algorithms, ranks, ((0, 1, ranks + 1, 16), (torch.int64,))) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_type(ranks):
    assert md.launch(check_algorithms, ranks, ((5,), wire.DTYPES)) == [[]] * ranks


def check_shapes(world):
    """Views, more dimensions, sizes given by the caller."""
    wrong, rank, size = [], world.rank, world.size
    base = torch.arange(24.0).reshape(4, 6) * (rank + 1)
    total = torch.arange(24.0).reshape(4, 6) * (size * (size + 1) // 2)
    for name in ALL_REDUCES:
        x = base.clone()
        getattr(A, name)(x[:, ::2], world)
        if not torch.equal(x[:, ::2], total[:, ::2]) or not torch.equal(x[:, 1::2], base[:, 1::2]):
            wrong.append(name)
    if not torch.equal(A.ring_reduce_scatter(base.t(), world), total.t()[md.partition(6, size)[rank]]):
        wrong.append("ring_reduce_scatter")
    scalar = torch.tensor(float(rank))
    for name in ("ring_all_gather", "bruck_all_gather"):
        if getattr(A, name)(scalar, world).tolist() != list(range(size)):
            wrong.append(f"{name} of scalars")
    if A.ring_reduce_scatter(scalar, world).tolist() != ([sum(range(size))] if rank == 0 else []):
        wrong.append("ring_reduce_scatter of scalars")
    if A.ring_all_reduce(scalar.clone(), world).item() != sum(range(size)):
        wrong.append("ring_all_reduce of scalars")
    send = [[(r + s) % 3 for s in range(size)] for r in range(size)]
    rows = [torch.arange(2 * sum(send[r])).reshape(-1, 2) + 100 * r for r in range(size)]
    recv = [send[r][rank] for r in range(size)]
    got = A.pairwise_all_to_all(rows[rank], world, send[rank], recv)
    if not torch.equal(got, torch.cat([rows[r].split(send[r])[rank] for r in range(size)])):
        wrong.append("pairwise_all_to_all")
    return wrong


def test_views_rows_and_given_sizes():
    assert md.launch(check_shapes, 3) == [[]] * 3


# ---- what they send ----


def sent_by(world, function):
    """(messages, elements) that this rank sends in it; x is int32."""
    world.barrier()
    world.recorder.clear()
    function()
    sends = [call for call in world.recorder.calls if call.op in ("send", "isend")]
    assert world.recorder.bytes_sent() == sum(call.sent for call in sends)
    return len(sends), sum(call.sent for call in sends) // 4


def counts(world, length):
    x = torch.zeros(length, dtype=torch.int32)
    piece = x[md.partition(length, world.size)[world.rank]]
    runs = {name: lambda name=name: getattr(A, name)(x, world) for name in ALL_REDUCES}
    runs |= {name: lambda name=name: getattr(A, name)(x, world) for name in ("tree_broadcast", "tree_reduce")}
    runs |= {name: lambda name=name: getattr(A, name)(piece, world) for name in ("ring_all_gather", "bruck_all_gather")}
    runs |= {
        name: lambda name=name: getattr(A, name)(x, world) for name in ("ring_reduce_scatter", "pairwise_all_to_all")
    }
    runs |= {f"hierarchical {k}": lambda k=k: A.hierarchical_all_reduce(x, world, k) for k in insides(world.size)}
    return {name: sent_by(world, run) for name, run in runs.items()}


def textbook(length, n):
    """(messages, elements) of the rank that sends most, from `minidist.plan.cost`, which cites the sources."""
    formulas = {
        "ring_all_reduce": cost.ring_all_reduce,
        "ring_reduce_scatter": cost.ring_half,
        "ring_all_gather": cost.ring_half,
        "pairwise_all_to_all": cost.ring_half,
        "bruck_all_gather": cost.bruck_all_gather,
        "halving_doubling_all_reduce": cost.halving_doubling_all_reduce,
        "tree_broadcast": cost.tree,
    }
    counts = {name: (t.messages, t.count) for name, t in ((name, f(length, n)) for name, f in formulas.items())}
    for k in insides(n):
        share, machines = ceil(length / k), n // k
        between = cost.ring_all_reduce(share, machines)
        counts[f"hierarchical {k}"] = (2 * (k - 1) + between.messages, 2 * (k - 1) * share + between.count)
    return counts


def check_counts(found, length, n):
    """Exactly the textbook's where n is a power of two that divides the length; nowhere more than the formulas."""
    right = textbook(length, n)
    exact = n & (n - 1) == 0 and length % n == 0
    for name, (messages, elements) in right.items():
        most = (max(rank[name][0] for rank in found), max(rank[name][1] for rank in found))
        # Halving-doubling's formula counts the chain of messages; a partner sends one of the two that fold a rank in.
        folded = name.startswith("halving") and n & (n - 1)
        chain = (messages - 1, elements - length) if folded else (messages, elements)
        assert most[0] == chain[0], f"{name}: {most[0]} messages, not {chain[0]}"
        assert most[1] <= chain[1], f"{name}: {most[1]} elements, more than {chain[1]}"
        if exact:
            everyone = [rank[name] for rank in found] if name != "tree_broadcast" else [most]
            assert everyone == [(messages, elements)] * len(everyone), f"{name}: {everyone}"


@pytest.mark.parametrize(("n", "length"), [(2, 16), (3, 16), (4, 16), (4, 10), (6, 7), (8, 32)])
def test_messages_and_elements(n, length):
    found = md.launch(counts, n, (length,))
    check_counts(found, length, n)
    if (n, length) == (4, 16):  # C12
        assert [rank["ring_all_reduce"] for rank in found] == [(6, 24)] * 4
        assert [rank["ring_all_gather"] for rank in found] == [(3, 12)] * 4


def test_the_counts_notice_one_message_too_many_and_one_element_too_many():
    found = md.launch(counts, 2, (16,))
    check_counts(found, 16, 2)
    messages, elements = found[0]["ring_all_reduce"]
    for other in ((messages + 1, elements), (messages, elements + 1)):
        wrong = [dict(rank, ring_all_reduce=other) for rank in found]
        with pytest.raises(AssertionError, match="ring_all_reduce"):
            check_counts(wrong, 16, 2)


# ---- index arithmetic, without ranks: every message of the ring is matched, and every piece visits every rank ----


@given(st.integers(1, 64))
def test_the_ring_sends_each_rank_what_it_expects(n):
    for rank in range(n):
        left = (rank - 1) % n
        for step in range(1, n):
            assert (left - step) % n == (rank - step - 1) % n, "reduce: the piece sent is the piece added to"
            assert (left - step + 1) % n == (rank - step) % n, "gather: the piece sent is the piece replaced"
        added = [(rank - step - 1) % n for step in range(1, n)]
        assert len(set(added)) == n - 1
        assert n == 1 or added[-1] == rank


@given(st.integers(1, 64))
def test_the_tree_reaches_everyone_once(n):
    reached = [0]
    for have in A._doublings(n):
        reached += [me + have for me in range(have) if me + have < n]
    assert sorted(reached) == list(range(n))


# ---- faults: each of these variants must fail the check that ours passes ----


def check_reduce_scatter(world, reduce_scatter, lengths):
    wrong = []
    for length in lengths:
        parts = [part_of(r, length, torch.int64) for r in range(world.size)]
        x, whole = parts[world.rank].clone(), sum(parts[1:], parts[0])
        world.recorder.clear()
        got = reduce_scatter(x, world)
        sends = [call.nbytes for call in world.recorder.calls if call.op == "isend"]
        share = md.partition(length, world.size)[world.rank]
        if not torch.equal(got, whole[share]):
            wrong.append("sum")
        if not torch.equal(x, parts[world.rank]):
            wrong.append("x changed")
        if len(sends) != world.size - 1 or any(nbytes > 8 * -(-length // world.size) for nbytes in sends):
            wrong.append("messages")
    return sorted(set(wrong))


def ring(x, comm, cut=md.partition, shift=1, copy=True):
    """The package's ring with its parts exchangeable."""
    x = x.clone() if copy else x
    pieces = [x[part] for part in cut(len(x), comm.size)]
    rank, n = comm.rank, comm.size
    for step in range(1, n):
        outgoing, own = pieces[(rank - step) % n], pieces[(rank - step - shift) % n]
        incoming = torch.empty_like(pieces[(rank - step - 1) % n])
        own += A.exchange(comm, outgoing, (rank + 1) % n, incoming, (rank - 1) % n)
    return pieces[rank]


def tensor_split(length, n):
    ends = [0]
    for piece in torch.arange(length).tensor_split(n):
        ends.append(ends[-1] + len(piece))
    return [slice(a, b) for a, b in pairwise(ends)]


def whole_tensor(x, comm):
    total, passing = x.clone(), x.clone()
    for _ in range(comm.size - 1):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        passing = A.exchange(comm, passing, right, torch.empty_like(passing), left)
        total += passing
    return total[md.partition(len(x), comm.size)[comm.rank]]


def variants(world):
    def alone_too_early(x, comm):
        return x[:0] if comm.size == 1 else ring(x, comm)

    candidates = {
        "ours": A.ring_reduce_scatter,
        "the ring here": ring,
        "wrong slot": lambda x, comm: ring(x, comm, shift=2),
        "tensor_split": lambda x, comm: ring(x, comm, cut=tensor_split),
        "into x": lambda x, comm: ring(x, comm, copy=False),
        "whole tensor": whole_tensor,
        "early return": alone_too_early,
    }
    n = world.size
    found = {name: [check_reduce_scatter(world, f, (2 * n,))] for name, f in candidates.items()}
    for name in (name for name in candidates if name != "wrong slot"):  # that one would add pieces of different lengths
        found[name].append(check_reduce_scatter(world, candidates[name], (2 * n + 1,)))
    return found


def test_planted_faults_fail_the_check():
    found = md.launch(variants, 3)
    right = [[], []]
    assert all(rank["ours"] == rank["the ring here"] == right for rank in found)
    assert any("sum" in rank["wrong slot"][0] for rank in found)
    assert all(rank["tensor_split"][0] == [] for rank in found), "it is right where the length divides"
    assert any("sum" in rank["tensor_split"][1] for rank in found)
    assert any("x changed" in rank["into x"][0] for rank in found)
    assert all("messages" in rank["whole tensor"][0] for rank in found)
    alone = md.launch(variants, 1)[0]
    assert alone["ours"] == right
    assert alone["early return"] != right


def all_send_first(world):
    x = torch.ones(4)
    world.send(x, (world.rank + 1) % world.size)
    world.recv(x, (world.rank - 1) % world.size)


def test_a_ring_that_sends_before_it_receives_is_a_deadlock():
    with pytest.raises(md.LaunchError) as failure:
        md.launch(all_send_first, 2, timeout=20)
    assert failure.value.verdict == "deadlock"


def refused(world):
    texts = []
    for call in (
        lambda: A.hierarchical_all_reduce(torch.ones(4), world, inside=3),
        lambda: A.tree_broadcast(torch.ones(4), world, src=2),
        lambda: A.pairwise_all_to_all(torch.ones(4), world, send_sizes=[2, 2]),
        lambda: A.ring_all_reduce(torch.ones(4, dtype=torch.int16), world),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    return texts


def test_what_cannot_work_is_refused_by_name():
    texts = md.launch(refused, 2)[0]
    for text, words in zip(texts, ("inside=3", "src=2", "both", "int16"), strict=True):
        assert words in text
