"""Every Comm method against the same thing computed on one rank: all types, many lengths, worlds of 1 to 8."""

import pytest
import torch
import torch.distributed as dist

import minidist as md

ALL_TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
REDUCTIONS = ("sum", "mean", "min", "max", "product")


def part_of(rank, length, dtype):
    """[length, 2] small whole numbers, different on every rank, so that a sum is exact in every type."""
    values = (torch.arange(2 * length) * (rank + 2) + 3 * rank) % 5
    return (values % 2 if dtype is torch.bool else values).to(dtype).reshape(length, 2)


def reduced(parts, op):
    """The reduction computed here, by the definition of `op` on the element type."""
    total = parts[0].clone()
    for part in parts[1:]:
        if op in ("min", "max"):
            total = torch.minimum(total, part) if op == "min" else torch.maximum(total, part)
        else:
            total = total * part if op == "product" else total + part
    return total / len(parts) if op == "mean" else total


def defined(op, dtype):
    if dtype.is_complex:
        return op in ("sum", "mean")
    return op != "mean" or dtype.is_floating_point


def same(a, b):
    """Equal to the last byte. (To torch.equal a bool of byte 2 is True.)"""
    if a.dtype is torch.bool and b.dtype is torch.bool:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return a.dtype is b.dtype and torch.equal(a, b)


def check_reductions(world, lengths, dtypes):
    """Names of the reductions that come out different from the definition, or touch what they should not."""
    wrong, rank, size = [], world.rank, world.size
    for dtype in dtypes:
        for length in lengths:
            parts = [part_of(r, length, dtype) for r in range(size)]
            for op in (op for op in REDUCTIONS if defined(op, dtype)):
                expected = reduced(parts, op)
                # 16-bit means are rounded once, after the sum: by torch from the same sum, so that they are equal too.
                x = parts[rank].clone()
                if world.all_reduce(x, op) is not x or not same(x, expected):
                    wrong.append(f"all_reduce {op} {dtype} {length}: {x} for {expected}")
                x, root = parts[rank].clone(), length % size
                world.reduce(x, root, op)
                if not same(x, expected if rank == root else parts[rank]):
                    wrong.append(f"reduce {op} {dtype} {length}")
                x = parts[rank].clone()
                piece = world.reduce_scatter(x, op)
                if not same(piece, expected[md.partition(length, size)[rank]]) or not same(x, parts[rank]):
                    wrong.append(f"reduce_scatter {op} {dtype} {length}: {piece}")
    return wrong


def check_moves(world, lengths, dtypes):
    """Names of the calls that move tensors and deliver something else."""
    wrong, rank, size = [], world.rank, world.size
    for dtype in dtypes:
        for length in lengths:
            parts = [part_of(r, length, dtype) for r in range(size)]
            for root in {0, size - 1}:
                x = parts[rank].clone()
                if world.broadcast(x, root) is not x or not same(x, parts[root]):
                    wrong.append(f"broadcast {dtype} {length}")
            if not same(world.all_gather(parts[rank]), torch.cat(parts)):
                wrong.append(f"all_gather {dtype} {length}")
            ragged = [part_of(r, length + r % 3, dtype) for r in range(size)]
            for sizes in (None, [len(part) for part in ragged]):
                if not same(world.all_gather(ragged[rank], sizes), torch.cat(ragged)):
                    wrong.append(f"all_gather of lengths {[len(part) for part in ragged]} {dtype}")
            cuts = md.partition(length, size)
            if not same(world.all_to_all(parts[rank]), torch.cat([part[cuts[rank]] for part in parts])):
                wrong.append(f"all_to_all {dtype} {length}")
            # Rank r has (r + s) % 3 rows for rank s.
            send = [[(r + s) % 3 for s in range(size)] for r in range(size)]
            rows = [part_of(r, sum(send[r]), dtype) for r in range(size)]
            expected = torch.cat([rows[r].split(send[r])[rank] for r in range(size)])
            for recv in (None, [send[r][rank] for r in range(size)]):
                if not same(world.all_to_all(rows[rank], send[rank], recv), expected):
                    wrong.append(f"all_to_all of sizes {dtype}")
            if size > 1:
                wrong += check_message(world, parts)
    return wrong


def check_message(world, parts):
    """Round the ring, blocking: odd ranks receive first."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got = torch.empty_like(parts[0])
    if world.rank % 2 == 0 and world.rank < world.size - 1:
        world.send(parts[world.rank], right, tag=3)
        world.recv(got, left, tag=3)
    else:
        receiving = world.irecv(got, left, tag=3)
        world.isend(parts[world.rank], right, tag=3).wait()
        receiving.wait()
    return [] if torch.equal(got, parts[left]) else [f"message {parts[0].dtype} {len(parts[0])}"]


def check_everything(world, lengths, dtypes):
    world.barrier()
    return check_reductions(world, lengths, dtypes) + check_moves(world, lengths, dtypes)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_type(ranks):
    assert md.launch(check_everything, ranks, ((0, 1, 5), ALL_TYPES)) == [[]] * ranks


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_every_length(ranks):
    assert md.launch(check_everything, ranks, ((1, 7, 16), (torch.float64, torch.bool))) == [[]] * ranks


def check_large(world):
    """Beyond the sizes that gloo gets as one small exchange; equal and ragged."""
    wrong, size, rank = [], world.size, world.rank
    length = 3 * 2**17 + 5
    parts = [torch.arange(length) * (r + 1) for r in range(size)]
    total = sum(range(1, size + 1)) * torch.arange(length)
    if not torch.equal(world.all_reduce(parts[rank].clone()), total):
        wrong.append("all_reduce")
    if not torch.equal(world.reduce_scatter(parts[rank]), total[md.partition(length, size)[rank]]):
        wrong.append("reduce_scatter")
    for cut in (0, 1):
        pieces = [part[: length - cut * r] for r, part in enumerate(parts)]
        if not torch.equal(world.all_gather(pieces[rank]), torch.cat(pieces)):
            wrong.append(f"all_gather, each rank {cut} shorter")
    return wrong


def test_large_tensors():
    assert md.launch(check_large, 3) == [[]] * 3


# What torch itself does. Each of these is why a line of Comm exists.


def naive(world):
    """reduce_scatter by torch's tensor_split; a bool sum by gloo; what gloo's reduce leaves elsewhere."""
    faults = {}
    x = torch.arange(7.0) * (world.rank + 1)
    whole = world.all_reduce(x.clone())
    faults["tensor_split"] = not torch.equal(whole.tensor_split(3)[world.rank], world.reduce_scatter(x))
    flags = torch.tensor([True, world.rank == 0])
    dist.all_reduce(flags)
    faults["bool bytes"] = flags.view(torch.uint8).tolist() != [1, 1]
    y = torch.ones(4)
    dist.reduce(y, 0)
    faults["reduce elsewhere"] = y.tolist() != [1.0] * 4
    return faults


def test_what_torch_does_otherwise():
    faults = md.launch(naive, 3, check=False)
    assert faults[1]["tensor_split"], "a cut by tensor_split is not noticed"
    assert faults[1]["bool bytes"], "gloo now sums bool to bool: wire.packed_reduction can go"
    assert any(fault["reduce elsewhere"] for fault in faults[1:]), (
        "gloo's reduce leaves the others alone: drop the copy"
    )


def average(world):
    x = torch.arange(4.0) + 10 * world.rank
    return world.reduce_scatter(x, "mean").tolist(), world.all_reduce(x, "mean").tolist()


def test_mean_is_the_sum_divided():
    """C12: reduce_scatter of [0 1 2 3] and [10 11 12 13] is [5 6] and [7 8]."""
    assert md.launch(average, 2) == [([5.0, 6.0], [5.0, 6.0, 7.0, 8.0]), ([7.0, 8.0], [5.0, 6.0, 7.0, 8.0])]


def same_bits(world):
    torch.manual_seed(world.rank)
    x = torch.randn(1000) * 10.0 ** torch.randint(-6, 6, (1000,))
    ours, theirs = world.all_reduce(x.clone()), x.clone()
    dist.all_reduce(theirs)
    again, pieces = world.all_reduce(x.clone()), world.all_gather(world.reduce_scatter(x))
    return ours, torch.equal(ours, theirs), torch.equal(ours, again), torch.equal(ours, pieces)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_have_the_same_bits_everywhere(ranks):
    """On every rank, every time, by reduce-scatter as by all-reduce; on two ranks also those of gloo."""
    results = md.launch(same_bits, ranks)
    assert all(torch.equal(ours, results[0][0]) for ours, *_ in results)
    assert all(again and pieces for _, _, again, pieces in results)
    if ranks == 2:
        assert all(theirs for _, theirs, _, _ in results)
