"""The grader's side of messages, without processes: matching, the log, deadlocks, and what ranks may not say."""

import pytest
import torch

from grading.ranks.codec import Damaged
from grading.ranks.relay import MOST_EVENTS, Relay, Wrong
from grading.ranks.run import Job

AT = ("f", 3, "comm.isend(x, 1)")


def relay(ranks: int = 2, allowed=("isend", "irecv", "all_reduce"), calls: int = 1, **more) -> Relay:
    return Relay(Job(b"", [[{}] * ranks] * calls, frozenset(allowed), **more))


def isend(number: int, peer: int, x=None, tag: int = 0) -> dict:
    x = torch.arange(3.0) if x is None else x
    return {"op": "isend", "id": number, "peer": peer, "tag": tag, "x": x, "at": AT}


def irecv(number: int, peer: int, x=None, tag: int = 0) -> dict:
    return {**isend(number, peer, torch.empty(3) if x is None else x, tag), "op": "irecv"}


def wait(number: int) -> dict:
    return {"op": "wait", "id": number, "at": AT}


def joins(number: int, name: str = "all_reduce", x=None, **args) -> dict:
    x = torch.ones(2) if x is None else x
    return {"op": "collective", "id": number, "name": name, "args": args or {"op": "sum"}, "x": x, "at": AT}


def test_a_send_is_over_when_its_receive_is_posted():
    world = relay()
    assert world.receive(0, isend(1, 1)) == []
    assert world.receive(0, wait(1)) == []
    ((rank, reply),) = world.receive(1, irecv(1, 0))
    assert (rank, reply) == (0, {"id": 1, "x": None})
    ((rank, reply),) = world.receive(1, wait(1))
    assert rank == 1
    assert reply["x"].tolist() == [0, 1, 2]
    (message,) = world.messages
    assert (message.src, message.dst, message.elements, message.dtype) == (0, 1, 3, "float32")
    assert message.sent == 1
    assert message.posted == 3
    assert message.taken == 4


def test_messages_of_one_pair_and_tag_keep_their_order():
    world = relay()
    world.receive(0, isend(1, 1, torch.tensor([1.0])))
    world.receive(0, isend(2, 1, torch.tensor([2.0]), tag=5))
    world.receive(0, isend(3, 1, torch.tensor([3.0])))
    got = []
    for number, tag in ((1, 0), (2, 0), (3, 5)):
        world.receive(1, irecv(number, 0, torch.empty(1), tag))
        got += [reply["x"].item() for _, reply in world.receive(1, wait(number))]
    assert got == [1, 3, 2]


def test_a_deadlock_is_seen_as_soon_as_the_last_rank_waits():
    world = relay(3)
    for rank in range(3):
        world.receive(rank, isend(1, (rank + 1) % 3))
        assert not world.settled
        world.receive(rank, wait(1))
    assert world.settled
    why, mistake = world.stuck()
    assert mistake == "wait-before-receive"
    assert "rank 1 waits for its isend to rank 2 (line 3 of f: comm.isend(x, 1))" in why


def test_a_rank_that_returned_leaves_the_others_waiting():
    world = relay()
    world.receive(0, irecv(1, 1))
    world.receive(0, wait(1))
    world.receive(1, {"op": "returned", "value": None})
    assert world.settled
    why, mistake = world.stuck()
    assert mistake == "unequal-message-counts"
    assert "rank 1 has returned" in why


def test_a_message_that_does_not_fit_its_buffer():
    world = relay()
    world.receive(0, isend(1, 1))
    with pytest.raises(Wrong, match="rank 0 sends 3 float32 to rank 1, whose buffer for it holds 2 float32") as caught:
        world.receive(1, irecv(1, 0, torch.empty(2)))
    assert caught.value.mistake == "wrong-buffer-size"
    world = relay()
    world.receive(0, isend(1, 1))
    with pytest.raises(Wrong) as caught:
        world.receive(1, irecv(1, 0, torch.empty(3, dtype=torch.float64)))
    assert caught.value.mistake == "wrong-buffer-dtype"


def test_a_collective_waits_for_all_and_is_computed_here():
    world = relay()
    world.receive(0, joins(1, x=torch.tensor([1.0, 2.0])))
    assert world.receive(0, wait(1)) == []
    ((rank, reply),) = world.receive(1, joins(1, x=torch.tensor([10.0, 20.0])))
    assert rank == 0
    assert reply["x"].tolist() == [11, 22]


def test_collectives_that_do_not_belong_together():
    world = relay(allowed=("all_reduce", "barrier"))
    world.receive(0, joins(1))
    with pytest.raises(Wrong, match="Ranks call different things as their collective number 1"):
        world.receive(1, joins(1, "barrier"))
    world = relay()
    world.receive(0, joins(1))
    with pytest.raises(Wrong) as caught:
        world.receive(1, joins(1, x=torch.ones(3)))
    assert caught.value.mistake == "different-shapes"


def test_what_is_not_allowed_is_a_shortcut():
    world = relay(allowed=("isend", "irecv"))
    with pytest.raises(Wrong, match=r"rank 0 called comm.all_reduce .* you may use comm.irecv, comm.isend") as caught:
        world.receive(0, joins(1))
    assert caught.value.verdict == "shortcut"
    with pytest.raises(Wrong):
        relay(allowed=()).receive(0, isend(1, 1))


def test_a_given_function_may_what_the_learner_may_not():
    world = relay(allowed=("isend",), given={"all_gather": b""}, given_calls={"all_gather": {"all_gather"}})
    assert world.receive(0, {**joins(1, "all_gather"), "given": "all_gather"}) == []
    with pytest.raises(Wrong):  # nothing is given under this name
        world.receive(1, {**joins(1, "all_gather"), "given": "reduce_scatter"})
    with pytest.raises(Wrong):  # the given function does not make this call
        world.receive(1, {**joins(1, "all_reduce"), "given": "all_gather"})


def test_a_rank_is_told_once_what_came():
    world = relay()
    world.receive(0, isend(1, 1))
    world.receive(1, irecv(1, 0))
    assert len(world.receive(1, wait(1))) == 1
    with pytest.raises(Damaged):
        world.receive(1, wait(1))
    with pytest.raises(Damaged):  # nor does its number come again
        world.receive(1, irecv(1, 0))


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        {"op": "exec"},
        {"op": "wait", "id": 7},
        {"op": "ask", "key": "p0"},
        {**isend(1, 1), "peer": 2},
        {**isend(1, 1), "peer": -1},
        {**isend(1, 1), "peer": True},
        {**isend(1, 1), "x": None},
        {**isend(1, 1), "tag": 2**40},
        joins(1, "eval"),
        {"op": "isend"},
    ],
)
def test_what_makes_no_sense_is_damage(said):
    with pytest.raises(Damaged):
        relay().receive(0, said)


def test_a_rank_that_waits_or_has_ended_cannot_speak():
    world = relay()
    world.receive(0, irecv(1, 1))
    world.receive(0, wait(1))
    with pytest.raises(Damaged):
        world.receive(0, isend(2, 1))
    world.receive(1, {"op": "returned", "value": 1})
    with pytest.raises(Damaged):
        world.receive(1, {"op": "returned", "value": 2})


def test_reductions_are_from_a_list():
    world = relay()
    world.receive(0, joins(1, op="__class__"))
    with pytest.raises(Damaged):
        world.receive(1, joins(1, op="__class__"))


def test_endless_messages_end():
    world = relay()
    for number in range(MOST_EVENTS):
        world.receive(0, isend(number, 1))
    with pytest.raises(Wrong) as caught:
        world.receive(0, isend(MOST_EVENTS, 1))
    assert caught.value.verdict == "timeout"


def test_calls_are_apart():
    world = relay(calls=2)
    world.receive(0, isend(1, 1))  # never received
    world.receive(0, {"op": "returned", "value": "a"})
    replies = world.receive(1, {"op": "returned", "value": "b"})
    assert replies == [(0, {"go": True}), (1, {"go": True})]
    world.receive(1, irecv(1, 0))
    assert world.receive(1, wait(1)) == []  # the message of the first call is not for the second
    world.receive(0, {"op": "returned", "value": "c"})
    assert world.settled
    assert not world.finished
    assert world.results == [["a", "b"]]


def test_asking_is_noted_and_answered_from_the_job():
    world = relay(answers=[[{"k": 2.0}, {}]])
    assert world.receive(0, {"op": "ask", "key": "k"}) == [(0, {"x": 2.0})]
    assert [(asked.rank, asked.key) for asked in world.asked] == [(0, "k")]
    with pytest.raises(Damaged):
        world.receive(1, {"op": "ask", "key": "k"})
