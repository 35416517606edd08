"""02.2, the all-gather."""

import torch

from grading.mutants import mutant


def _step(comm, outgoing, incoming):
    receiving = comm.irecv(incoming, (comm.rank - 1) % comm.size)
    sending = comm.isend(outgoing, (comm.rank + 1) % comm.size)
    receiving.wait()
    sending.wait()


def _pieces(comm, x):
    pieces = [torch.zeros_like(x) for _ in range(comm.size)]
    pieces[comm.rank].copy_(x)
    return pieces


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("02.2", "basic", "passes-own-on")
def sends_x_each_time(comm, x):
    pieces = _pieces(comm, x)
    for step in range(1, comm.size):
        _step(comm, x, pieces[(comm.rank - step) % comm.size])
    return torch.cat(pieces)


@mutant("02.2", "basic", "order-of-arrival")
def appends_what_comes(comm, x):
    pieces = [x]
    for _ in range(1, comm.size):
        received = torch.empty_like(x)
        _step(comm, pieces[-1], received)
        pieces.append(received)
    return torch.cat(pieces)


@mutant("02.2", "basic", "one-step-short")
def makes_a_step_too_few(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n - 1):
        _step(comm, pieces[(rank - step + 1) % n], pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "basic", "wrong-slot")
def stores_where_it_sends(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        received = torch.empty_like(x)
        _step(comm, pieces[(rank - step + 1) % n], received)
        pieces[(rank - step + 1) % n] = received
    return torch.cat(pieces)


@mutant("02.2", "basic", "wait-before-receive")
def waits_for_each_handle(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        comm.isend(pieces[(rank - step + 1) % n], (rank + 1) % n).wait()
        comm.irecv(pieces[(rank - step) % n], (rank - 1) % n).wait()
    return torch.cat(pieces)


@mutant("02.2", "basic", "stacked")
def stacks_rows(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        _step(comm, pieces[(rank - step + 1) % n], pieces[(rank - step) % n])
    return torch.stack(pieces)


@mutant("02.2", "basic", "library-collective")
def calls_the_library(comm, x):
    return comm.all_gather(x)


# ---- n = 1 and 8 -----------------------------------------------------------------------------------------------------


def _right(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        _step(comm, pieces[(rank - step + 1) % n], pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "n = 1 and 8", "no-result")
def returns_nothing_alone(comm, x):
    if comm.size == 1:
        return None
    return _right(comm, x)


@mutant("02.2", "n = 1 and 8", "alone-is-special")
def sends_the_first_message_always(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    _step(comm, x, pieces[(rank - 1) % n])
    for step in range(2, n):
        _step(comm, pieces[(rank - step + 1) % n], pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "n = 1 and 8", "wrong-shape")
def returns_a_row_alone(comm, x):
    if comm.size == 1:
        return x.clone().unsqueeze(0)
    return _right(comm, x)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("02.2", "messages", "ring-sends-whole")
def sends_all_it_has(comm, x):
    whole, rank, n = torch.cat(_pieces(comm, x)), comm.rank, comm.size
    for _ in range(1, n):
        received = torch.empty_like(whole)
        _step(comm, whole, received)
        for piece in range(n):
            if piece != rank:
                part = slice(piece * len(x), (piece + 1) * len(x))
                whole[part] = torch.where(whole[part] == 0, received[part], whole[part])
    return whole


@mutant("02.2", "messages", "too-many-messages")
def makes_n_steps(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n + 1 if n > 1 else 1):
        _step(comm, pieces[(rank - step + 1) % n].clone(), pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "messages", "too-many-messages")
def sends_element_by_element(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        for i in range(len(x)):
            _step(comm, pieces[(rank - step + 1) % n][i : i + 1], pieces[(rank - step) % n][i : i + 1])
    return torch.cat(pieces)


# ---- x unchanged -----------------------------------------------------------------------------------------------------


@mutant("02.2", "x unchanged", "changes-its-input")
def passes_on_in_x(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        _step(comm, x, pieces[(rank - step) % n])
        x.copy_(pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "x unchanged", "changes-its-input")
def frees_x(comm, x):
    result = _right(comm, x)
    x.zero_()
    return result


@mutant("02.2", "x unchanged", "changes-its-input")
def stores_a_neighbour_in_x(comm, x):
    pieces, rank, n = _pieces(comm, x), comm.rank, comm.size
    for step in range(1, n):
        outgoing = pieces[(rank - step + 1) % n].clone()
        _step(comm, outgoing, x)
        pieces[(rank - step) % n] = x.clone()
    return torch.cat(pieces)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@mutant("02.2", "dtypes", "loses-the-dtype")
def result_of_the_default_type(comm, x):
    n = comm.size
    result = torch.zeros(n * len(x))
    result.view(n, -1)[:] = _right(comm, x).view(n, -1)
    return result


@mutant("02.2", "dtypes", "loses-the-dtype")
def buffers_of_the_default_type(comm, x):
    rank, n = comm.rank, comm.size
    pieces = [torch.zeros(len(x)) for _ in range(n)]
    pieces[rank] = x
    for step in range(1, n):
        _step(comm, pieces[(rank - step + 1) % n], pieces[(rank - step) % n])
    return torch.cat(pieces)


@mutant("02.2", "dtypes", "loses-the-dtype")
def gathers_in_float32(comm, x):
    return _right(comm, x.float()).to(x.dtype)
