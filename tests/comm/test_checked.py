"""Checked mode: calls that do not belong together are refused before anything is sent, and right programs never are."""

import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.comm.checked import Board, CommMismatch, Entry, Ledger, conflict, names_of, short


def refusal(function, ranks=2, **options):
    """What a launch of `function` that must fail says."""
    with pytest.raises(md.LaunchError) as failure:
        md.launch(function, ranks, timeout=30, **options)
    assert failure.value.verdict == "error", str(failure.value)
    return str(failure.value)


# ---- on real ranks ----


def swapped(world):
    """C13: rank 0 reduces A, then B; rank 1 B, then A. (A = 1 + r, B = 10(r + 1); right is 3 and 30.)"""
    a, b = torch.tensor([1.0 + world.rank]), torch.tensor([10.0 * (world.rank + 1)])
    if world.rank == 0:
        world.all_reduce(a)
        world.all_reduce(b)
    else:
        world.all_reduce(b)
        world.all_reduce(a)
    return a.item(), b.item()


def test_c13_swapped_order():
    text = refusal(swapped)
    for words in (
        "CommMismatch",
        "rank 0: all_reduce",
        "rank 1: all_reduce",
        "called a",
        "called b",
        "test_checked.py",
    ):
        assert words in text
    # Unchecked, the sums mix: the reason for the check.
    assert md.launch(swapped, 2, check=False) == [(21.0, 12.0), (12.0, 21.0)]


def loop_in_another_order(world, turns):
    """The same through a loop: one place in the program, and one name that both tensors have."""
    a, b, c = torch.tensor([1.0]), torch.tensor([10.0]), torch.tensor([100.0])
    tensors = [a, b, c][:turns]
    for x in tensors if world.rank == 0 else tensors[1:] + tensors[:1]:
        world.all_reduce(x)
        world.barrier()


def test_c13_swapped_in_a_dict():
    def swapped_entries(world):
        p = {"A": torch.tensor([1.0 + world.rank]), "B": torch.tensor([10.0 * (world.rank + 1)])}
        if world.rank == 0:
            world.all_reduce(p["A"])
            world.all_reduce(p["B"])
        else:
            world.all_reduce(p["B"])
            world.all_reduce(p["A"])

    text = refusal(swapped_entries)
    assert "called p['A']" in text
    assert "called p['B']" in text
    assert "give both one name" in text  # what to do where it is meant


def test_a_bucket_of_gradients_never_meets_a_metric_of_its_shape():
    def mixed(world):
        replica = md.DataParallel(torch.nn.Linear(2, 2, bias=False), world)
        loss = replica(torch.ones(1, 2)).sum()
        if world.rank == 0:
            world.all_reduce(torch.ones(4))
        loss.backward()
        if world.rank == 1:
            world.all_reduce(torch.ones(4))

    text = refusal(mixed)
    assert "all_reduce(op='sum') of float32 [4] at test_checked.py" in text
    assert "all_reduce(op='sum') of float32 [4] in minidist.parallel.data" in text


@pytest.mark.parametrize("turns", [2, 3])
def test_c13_loops_in_different_orders(turns):
    text = refusal(partial(loop_in_another_order, turns=turns))
    assert "; before, a met b" in text or "; before, b met a" in text


def test_different_shapes_and_types_name_the_call_and_the_ranks():
    def mixed(world):
        world.barrier()
        world.all_reduce(torch.ones(3 + world.rank % 2))

    text = refusal(mixed, 3)
    for words in ("call 2 of 'world'", "all_reduce(op='sum') of float32 [3]", "all_reduce(op='sum') of float32 [4]"):
        assert words in text

    def types(world):
        world.broadcast(torch.ones(3, dtype=(torch.float32, torch.float64)[world.rank]), 0)

    assert "float64" in refusal(types)


def test_a_ragged_collective_notices_the_wrong_partner_while_it_waits():
    def mixed(world):
        if world.rank == 0:
            world.all_gather(torch.ones(3))
        else:
            world.reduce_scatter(torch.ones(3))

    text = refusal(mixed)
    assert "all_gather of float32 [3]" in text
    assert "reduce_scatter(op='sum') of float32 [3]" in text


def test_messages_that_do_not_fit():
    """A short message into a larger buffer, which gloo accepts; one of another type, which ends the process."""

    def short_message(world):
        if world.rank == 0:
            world.send(torch.ones(3), 1, tag=4)
        else:
            world.recv(torch.ones(4), 0, tag=4)

    text = refusal(short_message)
    for words in ("message 0 from rank 0 to rank 1", "tag 4", "send(dst=1, tag=4) of float32 [3]", "float32 [4]"):
        assert words in text

    def other_type(world):
        if world.rank == 0:
            world.isend(torch.ones(4), 1).wait()
        else:
            world.irecv(torch.ones(2, dtype=torch.float64), 0).wait()

    assert "float64 [2]" in refusal(other_type)


def test_a_short_message_is_what_gloo_accepts():
    def short_message(world):
        x = torch.ones(3) if world.rank == 0 else torch.zeros(4)
        world.send(x, 1) if world.rank == 0 else world.recv(x, 0)
        return x.tolist()

    assert md.launch(short_message, 2, check=False)[1] == [1.0, 1.0, 1.0, 0.0]


def test_inside_a_group_ranks_are_named_twice():
    def mixed(world):
        group = world.subgroups([[0], [1, 2]], name="pair")
        group.all_reduce(torch.ones(2 + group.rank))

    text = refusal(mixed, 3)
    assert "'pair'" in text
    assert "rank 1 (world rank 2)" in text


def test_different_divisions():
    def mixed(world):
        world.subgroups([[0, 1], [2]] if world.rank else [[0], [1, 2]])

    assert "subgroups([[0, 1], [2]])" in refusal(mixed, 3)


def right_programs(world):
    """Calls that look alike and differ in what may differ."""
    rank, size = world.rank, world.size
    even, odd = torch.ones(2), torch.ones(2)
    world.broadcast(even if rank == 0 else odd, 0)  # another name on every rank
    buffer = even if rank % 2 == 0 else odd
    world.all_reduce(buffer)  # two names, one of them common
    data, zeros = torch.ones(2), torch.zeros(2)
    for _ in range(3):
        world.all_reduce(data.clone() if rank == 0 else zeros)
        world.all_gather(data if rank == 0 else zeros)  # two names from one place
    for _ in range(3):
        even, odd = odd, even
        world.all_reduce(even)
    world.reduce(odd if rank else odd.clone(), 0)  # here without a name
    world.all_gather(torch.ones(rank))
    world.all_to_all(torch.ones(size), [size] + [0] * (size - 1))
    handles = [world.all_reduce(torch.ones(100), async_op=True) for _ in range(50)]
    if rank == 0:
        world.send(torch.ones(0), 1, tag=7)
    if rank == 1:
        world.recv(torch.ones(2, 0), 0, tag=7)  # as many elements
    shards = [torch.ones(2) for _ in range(size)]
    for turn in range(size):
        world.all_gather(shards[(rank + turn) % size])  # an entry of a list, another on every rank
    group = world.subgroups([list(range(rank_ + 1)) for rank_ in [1]])
    if group is not None:  # the others go on meanwhile
        group.all_reduce(torch.ones(1))
    return sum(handle.wait().sum().item() for handle in handles)


def test_right_programs_are_let_through():
    assert md.launch(right_programs, 3) == [50 * 100 * 3] * 3


# ---- the board, in one process ----


def two_ledgers(check=True, board=Board):
    memory = bytearray(board.nbytes(2))
    return [Ledger(board(memory, rank, 2), (0, 1), rank, "world", "world", check) for rank in range(2)]


def test_the_second_to_come_raises_and_shows_both():
    first, second = two_ledgers()
    first.collective("all_reduce of float32 [3]", "all_reduce of float32 [3] at a.py:1")
    with pytest.raises(
        CommMismatch, match=r"(?s)call 1 .*rank 0: all_reduce .* a\.py:1.*rank 1: all_reduce .* b\.py:2"
    ):
        second.collective("all_reduce of float32 [4]", "all_reduce of float32 [4] at b.py:2")


def test_order_counts_not_time():
    first, second = two_ledgers()
    for what in "abc":
        first.collective(what)
    for what in "abc":
        second.collective(what)
    first.collective("d")
    with pytest.raises(CommMismatch, match="call 4"):
        second.collective("e")


def test_overwritten_entries_are_not_compared():
    """A root far ahead of the other: calls of other shapes have taken the slots that the other looks into."""

    class Few(Board):
        SLOTS = 8

    ahead, behind = two_ledgers(board=Few)
    for i in range(20):
        ahead.collective(f"broadcast of float32 [{i % 3}]")
    for i in range(20):
        behind.collective(f"broadcast of float32 [{i % 3}]")
    ahead.collective("a")
    with pytest.raises(CommMismatch, match="call 21"):
        behind.collective("b")


def test_unchecked_nothing_is_compared():
    first, second = two_ledgers(check=False)
    first.collective("a")
    second.collective("b")


def test_messages_are_counted_by_ends_and_tag():
    first, second = two_ledgers()
    for tag in (0, 1, 0):
        first.message(f"{tag}", "", 0, 1, tag, 0.0)
    first.message("back", "", 1, 0, 0, 0.0)
    second.message("1", "", 0, 1, 1, 0.0)
    second.message("0", "", 0, 1, 0, 0.0)
    second.message("back", "", 1, 0, 0, 0.0)
    with pytest.raises(CommMismatch, match="message 1 from rank 0 to rank 1"):
        second.message("3", "", 0, 1, 0, 0.0)


def test_a_torn_entry_is_not_read():
    memory = bytearray(Board.nbytes(1))
    board = Board(memory, 0, 1)
    board.write(Entry(5, 0, 0.0, "whole", ""))
    assert board.read(0, 5, 0) is not None
    memory[5 * Board.SLOT_BYTES + 34] ^= 1
    assert board.read(0, 5, 0) is None


def test_a_long_entry_loses_names_first_and_lengths_last():
    board = Board(bytearray(Board.nbytes(1)), 0, 1)
    names = tuple(f"a_rather_long_name_{i:04}" * 3 for i in range(24))
    board.write(Entry(1, 0, 0.0, "what", "shown", tuple(range(64)), tuple(range(64)), names[:8], names))
    entry = board.read(0, 1, 0)
    assert entry is not None
    assert (entry.what, entry.send, entry.recv, entry.named) == ("what", tuple(range(64)), tuple(range(64)), ())


@given(st.text(max_size=300), st.text(max_size=300))
def test_short_texts_are_equal_for_equal_texts_only(a, b):
    assert len(short(a)) <= 160
    assert (short(a) == short(b)) == (a == b)


def entry(named=(), others=(), send=(), recv=(), site="here"):
    return Entry(0, 0, 0.0, "same", "", send, recv, named, others, site)


def test_names_conflict_only_where_each_is_the_others_other_and_the_places_differ():
    def there(named, others):
        return entry(named, others, site="there")

    swap = conflict(entry(("a",), ("b",)), there(("b",), ("a",)), 0, 1)
    assert "rank 0 passes a where rank 1 passes b" in swap
    assert not conflict(entry(("a",), ("b",)), entry(("b",), ("a",)), 0, 1), "one place: meant so"
    assert not conflict(entry(("a",), ("b",)), there(("a",), ("b",)), 0, 1)
    assert not conflict(entry(("a", "x"), ("b",)), there(("b", "x"), ("a",)), 0, 1), "a name in common"
    assert not conflict(entry(("a",), ()), there(("b",), ("a",)), 0, 1), "rank 0 has no b"
    assert not conflict(entry((), ("b",)), there(("b",), ("a",)), 0, 1), "no name here"


def test_lengths_conflict_where_one_expects_what_the_other_does_not_send():
    mine, theirs = entry(send=(0, 2), recv=(0, 3)), entry(send=(3, 0), recv=(2, 0))
    assert not conflict(mine, theirs, 0, 1)
    assert "rank 1 sends 3 to rank 0, which expects 1" in conflict(entry(send=(0, 2), recv=(0, 1)), theirs, 0, 1)


def test_lengths_are_compared_also_where_both_ranks_wrote_the_same():
    first, second = two_ledgers()
    first.collective("all_to_all", send=(1, 2), recv=(1, 3))
    with pytest.raises(CommMismatch, match="rank 1 sends 1 to rank 0, which expects 3"):
        second.collective("all_to_all", send=(1, 2), recv=(1, 3))


def test_all_to_all_with_lengths_that_do_not_match():
    def mixed(world):
        send, recv = ([1, 2], [1, 0]) if world.rank == 0 else ([0, 3], [1, 3])
        world.all_to_all(torch.ones(3), send, recv)

    assert "rank 0 sends 2 to rank 1, which expects 1" in refusal(mixed)


def test_looking_at_names_keeps_no_tensor_alive():
    alive = []

    class Noted(torch.Tensor):
        def __del__(self):
            alive.remove(1)

    def caller():
        big, x = torch.zeros(2).as_subclass(Noted), torch.zeros(1)
        alive.append(1)
        assert names_of(x, sys._getframe()) == (("x",), ("big",))
        with suppress(NameError):
            del big
        return list(alive)

    assert caller() == []


def test_looking_at_names_leaves_the_callers_locals_alone():
    def caller():
        x = torch.zeros(1)
        mine = locals()
        names_of(x, sys._getframe())
        return mine

    assert "x" in caller()
