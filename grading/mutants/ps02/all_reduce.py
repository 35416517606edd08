"""02.4, the all-reduce. The two halves are put in their place by the check, as for any answer."""

import torch

from grading.mutants import mutant


def reduce_scatter(comm, x):
    raise NotImplementedError


def all_gather(comm, x):
    raise NotImplementedError


def _full(comm, x):
    return torch.cat([x, x.new_zeros(-len(x) % comm.size)])


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("02.4", "basic", "half-a-ring")
def stops_after_the_first_half(comm, x):
    return reduce_scatter(comm, _full(comm, x))


@mutant("02.4", "basic", "no-reduction")
def only_gathers(comm, x):
    return all_gather(comm, x)


@mutant("02.4", "basic", "halves-swapped")
def gathers_first(comm, x):
    return reduce_scatter(comm, all_gather(comm, x))


@mutant("02.4", "basic", "own-slice-only")
def gathers_slices_of_x(comm, x):
    reduce_scatter(comm, _full(comm, x))
    size = -(-len(x) // comm.size)
    return all_gather(comm, x[comm.rank * size : (comm.rank + 1) * size])


@mutant("02.4", "basic", "library-collective")
def calls_the_library(comm, x):
    return comm.all_reduce(x.clone())


# ---- any N -----------------------------------------------------------------------------------------------------------


@mutant("02.4", "any N", "unequal-pieces")
def does_not_fill_up(comm, x):
    return all_gather(comm, reduce_scatter(comm, x))


@mutant("02.4", "any N", "leaves-padding-in")
def keeps_what_it_filled_up(comm, x):
    return all_gather(comm, reduce_scatter(comm, _full(comm, x)))


@mutant("02.4", "any N", "drops-the-rest")
def cuts_down(comm, x):
    return all_gather(comm, reduce_scatter(comm, x[: len(x) // comm.size * comm.size]))


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("02.4", "traffic", "everyone-to-everyone")
def gathers_all_and_adds(comm, x):
    return all_gather(comm, x).view(comm.size, -1).sum(0, dtype=x.dtype) if len(x) else x.clone()


@mutant("02.4", "traffic", "everyone-to-everyone")
def sends_to_everyone(comm, x):
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    received = [torch.empty_like(x) for _ in others]
    handles = [comm.irecv(each, rank) for each, rank in zip(received, others, strict=True)]
    handles += [comm.isend(x, rank) for rank in others]
    for handle in handles:
        handle.wait()
    total = x.clone()
    for each in received:
        total += each
    return total


@mutant("02.4", "traffic", "ring-sends-whole")
def adds_along_a_chain_and_back(comm, x):
    rank, last, total = comm.rank, comm.size - 1, x.clone()
    if rank > 0:
        total += comm.irecv(torch.empty_like(x), rank - 1).wait()
    if rank < last:
        comm.isend(total, rank + 1).wait()
        comm.irecv(total, rank + 1).wait()
    if rank > 0:
        comm.isend(total, rank - 1).wait()
    return total


# ---- x unchanged -----------------------------------------------------------------------------------------------------


@mutant("02.4", "x unchanged", "changes-its-input")
def writes_the_sum_into_x(comm, x):
    return x.copy_(all_gather(comm, reduce_scatter(comm, _full(comm, x)))[: len(x)])


@mutant("02.4", "x unchanged", "changes-its-input")
def rebinds_the_memory_of_x(comm, x):
    length = len(x)
    x.data = _full(comm, x)
    x.data = all_gather(comm, reduce_scatter(comm, x))
    return x[:length]


@mutant("02.4", "x unchanged", "changes-its-input")
def clears_x(comm, x):
    partial = reduce_scatter(comm, _full(comm, x))
    x.zero_()
    return all_gather(comm, partial)[: len(x)]


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@mutant("02.4", "dtypes", "loses-the-dtype")
def fills_up_with_float32(comm, x):
    full = torch.cat([x, torch.zeros(-len(x) % comm.size)])
    return all_gather(comm, reduce_scatter(comm, full))[: len(x)]


@mutant("02.4", "dtypes", "loses-the-dtype")
def adds_in_float32(comm, x):
    return all_gather(comm, reduce_scatter(comm, _full(comm, x.float())))[: len(x)].to(x.dtype)


@mutant("02.4", "dtypes", "loses-the-dtype")
def result_of_the_default_type(comm, x):
    result = torch.empty(len(x))
    result[:] = all_gather(comm, reduce_scatter(comm, _full(comm, x)))[: len(x)]
    return result
