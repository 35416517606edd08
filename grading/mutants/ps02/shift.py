"""02.1, one step of a ring."""

import torch

from grading.mutants import mutant


def _received(comm, x, dtype=None):
    """What the left neighbour has as x, or a buffer of another type for it."""
    received = torch.empty_like(x, dtype=dtype)
    receiving = comm.irecv(received, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    return receiving.wait()


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("02.1", "basic", "ring-backwards")
def the_other_way(comm, x):
    received = torch.empty_like(x)
    receiving = comm.irecv(received, (comm.rank + 1) % comm.size)
    comm.isend(x, (comm.rank - 1) % comm.size).wait()
    receiving.wait()
    return received


@mutant("02.1", "basic", "wait-before-receive")
def waits_for_its_send_first(comm, x):
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    received = torch.empty_like(x)
    comm.irecv(received, (comm.rank - 1) % comm.size).wait()
    return received


@mutant("02.1", "basic", "receive-first-is-safe")
def receives_before_it_sends(comm, x):
    received = torch.empty_like(x)
    comm.irecv(received, (comm.rank - 1) % comm.size).wait()
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    return received


@mutant("02.1", "basic", "no-wraparound")
def has_no_ring(comm, x):
    received = torch.empty_like(x)
    receiving = comm.irecv(received, (comm.rank - 1) % comm.size)
    comm.isend(x, comm.rank + 1).wait()
    receiving.wait()
    return received


@mutant("02.1", "basic", "reads-before-wait")
def does_not_wait(comm, x):
    received = torch.zeros_like(x)
    comm.irecv(received, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    return received


@mutant("02.1", "basic", "own-tensor-back")
def returns_what_it_sent(comm, x):
    _received(comm, x)
    return x


@mutant("02.1", "basic", "writes-while-sending")
def receives_into_what_it_sends(comm, x):
    buffer = x.clone()
    sending = comm.isend(buffer, (comm.rank + 1) % comm.size)
    comm.irecv(buffer, (comm.rank - 1) % comm.size).wait()
    sending.wait()
    return buffer


# ---- x unchanged -----------------------------------------------------------------------------------------------------


@mutant("02.1", "x unchanged", "changes-its-input")
def receives_into_x(comm, x):
    sending = comm.isend(x.clone(), (comm.rank + 1) % comm.size)
    comm.irecv(x, (comm.rank - 1) % comm.size).wait()
    sending.wait()
    return x


@mutant("02.1", "x unchanged", "changes-its-input")
def hands_x_over(comm, x):
    received = _received(comm, x)
    x.zero_()
    return received


@mutant("02.1", "x unchanged", "changes-its-input")
def swaps_the_memory(comm, x):
    x.data = _received(comm, x)
    return x.clone()


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@mutant("02.1", "dtypes", "loses-the-dtype")
def buffer_of_the_default_type(comm, x):
    received = torch.empty(len(x))
    receiving = comm.irecv(received, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    receiving.wait()
    return received


@mutant("02.1", "dtypes", "loses-the-dtype")
def sends_float32(comm, x):
    return _received(comm, x.float()).to(x.dtype)


@mutant("02.1", "dtypes", "loses-the-dtype")
def returns_float32(comm, x):
    return _received(comm, x).float()
