"""02.3, the reduce-scatter."""

import torch

import minidist as md
from grading.mutants import mutant


def _step(comm, outgoing, incoming):
    receiving = comm.irecv(incoming, (comm.rank - 1) % comm.size)
    sending = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    receiving.wait()
    sending.wait()
    return incoming


def _around(comm, pieces):
    """The right ring, over pieces that are given."""
    rank, n = comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, pieces[(rank - step) % n], torch.empty_like(own))
    return pieces[rank]


def _cut(comm, x):
    return [x[part] for part in md.partition(len(x), comm.size)]


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("02.3", "basic", "wrong-slot")
def adds_where_it_sends(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step) % n]
        own += _step(comm, own.clone(), torch.empty_like(own))
    return pieces[rank].clone()


@mutant("02.3", "basic", "wait-before-receive")
def waits_for_its_send_first(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        comm.isend(pieces[(rank - step) % n], (rank + 1) % n).wait()
        received = torch.empty_like(pieces[(rank - step - 1) % n])
        comm.irecv(received, (rank - 1) % n).wait()
        pieces[(rank - step - 1) % n] += received
    return pieces[rank].clone()


@mutant("02.3", "basic", "forwards-the-finished")
def forwards_the_slice_it_finishes(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, own.clone(), torch.empty_like(own))
    return pieces[rank].clone()


@mutant("02.3", "basic", "ring-backwards")
def starts_with_its_own_slice(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step) % n]
        own += _step(comm, pieces[(rank - step + 1) % n], torch.empty_like(own))
    return pieces[(rank + 1) % n].clone()


@mutant("02.3", "basic", "one-step-short")
def makes_a_step_too_few(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n - 1):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, pieces[(rank - step) % n], torch.empty_like(own))
    return pieces[rank].clone()


@mutant("02.3", "basic", "passes-own-on")
def sends_slices_of_x(comm, x):
    pieces, mine, rank, n = _cut(comm, x.clone()), _cut(comm, x), comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, mine[(rank - step) % n], torch.empty_like(own))
    return pieces[rank].clone()


@mutant("02.3", "basic", "library-collective")
def calls_the_library(comm, x):
    return comm.reduce_scatter(x)


# ---- any N -----------------------------------------------------------------------------------------------------------


@mutant("02.3", "any N", "tensor-split")
def cuts_with_tensor_split(comm, x):
    return _around(comm, list(torch.tensor_split(x.clone(), comm.size))).clone()


@mutant("02.3", "any N", "drops-the-rest")
def cuts_floor(comm, x):
    size = len(x) // comm.size
    partial = x.clone()
    return _around(comm, [partial[i * size : (i + 1) * size] for i in range(comm.size)]).clone()


@mutant("02.3", "any N", "leaves-padding-in")
def fills_up_and_keeps_it(comm, x):
    full = torch.cat([x, x.new_zeros(-len(x) % comm.size)])
    return _around(comm, list(full.view(comm.size, -1))).clone() if len(x) else x.clone()


@mutant("02.3", "any N", "chunk-gives-fewer")
def cuts_with_chunk(comm, x):
    return _around(comm, list(torch.chunk(x.clone(), comm.size))).clone()


@mutant("02.3", "any N", "rest-to-the-last")
def gives_the_last_one_the_rest(comm, x):
    size, n, partial = len(x) // comm.size, comm.size, x.clone()
    return _around(comm, [partial[i * size : (i + 1) * size if i < n - 1 else None] for i in range(n)]).clone()


# ---- n = 1 and 8 -----------------------------------------------------------------------------------------------------


@mutant("02.3", "n = 1 and 8", "wrong-shape")
def returns_early_in_another_shape(comm, x):
    if comm.size == 1:
        return x.clone().unsqueeze(0)
    return _around(comm, _cut(comm, x.clone())).clone()


@mutant("02.3", "n = 1 and 8", "no-result")
def returns_nothing_alone(comm, x):
    if comm.size > 1:
        return _around(comm, _cut(comm, x.clone())).clone()
    return None


@mutant("02.3", "n = 1 and 8", "alone-is-special")
def adds_after_the_loop(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n - 1):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, pieces[(rank - step) % n], torch.empty_like(own))
    return pieces[rank] + _step(comm, pieces[(rank + 1) % n], torch.empty_like(pieces[rank]))


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("02.3", "messages", "ring-sends-whole")
def sends_whole_tensors_and_slices(comm, x):
    total, passing = x.clone(), x
    for _ in range(1, comm.size):
        passing = _step(comm, passing, torch.empty_like(x))
        total += passing
    return total[md.partition(len(x), comm.size)[comm.rank]].clone()


@mutant("02.3", "messages", "too-many-messages")
def makes_one_step_more(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    result = _around(comm, pieces).clone()
    if n > 1:
        _step(comm, pieces[rank], torch.empty_like(pieces[(rank - 1) % n]))
    return result


@mutant("02.3", "messages", "too-many-messages")
def sends_element_by_element(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        own, leaving = pieces[(rank - step - 1) % n], pieces[(rank - step) % n]
        received = torch.empty_like(own)
        sending = [comm.isend(each, (rank + 1) % n) for each in leaving]
        receiving = [comm.irecv(each, (rank - 1) % n) for each in received]
        for handle in (*receiving, *sending):
            handle.wait()
        own += received
    return pieces[rank].clone()


# ---- x unchanged -----------------------------------------------------------------------------------------------------


@mutant("02.3", "x unchanged", "changes-its-input")
def adds_into_x(comm, x):
    return _around(comm, _cut(comm, x)).clone()


@mutant("02.3", "x unchanged", "changes-its-input")
def receives_into_x(comm, x):
    pieces, mine, rank, n = _cut(comm, x.clone()), _cut(comm, x), comm.rank, comm.size
    for step in range(1, n):
        slot = (rank - step - 1) % n
        pieces[slot] += _step(comm, pieces[(rank - step) % n], mine[slot])
    return pieces[rank].clone()


@mutant("02.3", "x unchanged", "changes-its-input")
def takes_x_apart(comm, x):
    result = _around(comm, _cut(comm, x.clone())).clone()
    x[md.partition(len(x), comm.size)[comm.rank]] = result
    return result


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@mutant("02.3", "dtypes", "loses-the-dtype")
def adds_in_float32(comm, x):
    return _around(comm, _cut(comm, x.to(torch.float32, copy=True))).to(x.dtype)


@mutant("02.3", "dtypes", "loses-the-dtype")
def buffer_of_the_default_type(comm, x):
    pieces, rank, n = _cut(comm, x.clone()), comm.rank, comm.size
    for step in range(1, n):
        own = pieces[(rank - step - 1) % n]
        own += _step(comm, pieces[(rank - step) % n], torch.empty(len(own)))
    return pieces[rank].clone()


@mutant("02.3", "dtypes", "loses-the-dtype")
def result_of_the_default_type(comm, x):
    result = torch.zeros(len(md.partition(len(x), comm.size)) and len(_cut(comm, x)[comm.rank]))
    return result.copy_(_around(comm, _cut(comm, x.clone())))
