"""all_gather(out=...): the result lands in memory that is there already, also where x is its own place in it."""

import pytest
import torch

import minidist as md

LENGTHS = (0, 1, 5, 1000, 100_003)  # small ones are packed into one exchange, large ones are not


def gathered(world):
    wrong = []
    for dtype in (torch.float32, torch.bool, torch.bfloat16):
        for length in LENGTHS:
            whole = (torch.arange(2 * length).reshape(length, 2) % 7).to(dtype)
            mine = md.partition(length, world.size)[world.rank]
            for inside in (False, True):
                out = torch.full_like(whole, 1)
                if inside:
                    out[mine] = whole[mine]
                x = out[mine] if inside else whole[mine]
                handle = world.all_gather(x, out=out, async_op=True)
                if handle.wait() is not out or not torch.equal(out, whole):
                    wrong.append((dtype, length, inside))
    out = torch.zeros(sum(range(world.size)), dtype=torch.int64)
    world.all_gather(torch.full((world.rank,), world.rank), sizes=list(range(world.size)), out=out)
    if out.tolist() != [rank for rank in range(world.size) for _ in range(rank)]:
        wrong.append("given sizes")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_result_is_in_the_memory_given(ranks):
    assert md.launch(gathered, ranks=ranks) == [[]] * ranks


def refused(world):
    found = []
    x = torch.zeros(2)
    for out in (torch.zeros(7), torch.zeros(4, dtype=torch.float64), torch.zeros(4, 2)[:, 0], torch.zeros(4, 1)):
        try:
            world.all_gather(x, out=out)
        except ValueError as error:
            found.append(str(error))
    return found


def test_memory_of_another_kind_is_refused():
    for found in md.launch(refused, ranks=2):
        assert "sizes [4, 3] must be 2 lengths" in found[0]
        assert "must be contiguous float32 [4], and is float64 [4]" in found[1]
        assert "not contiguous" in found[2]
        assert "is float32 [4, 1]" in found[3]
