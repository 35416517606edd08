"""The collectives, built from `isend` and `irecv`.

Each function equals the Comm method it is named after, sums, and works for any number of ranks and any length; what
differs is how many messages a rank sends one after the other and how much they hold together. n is the number of ranks,
N the number of elements, and a "piece" is one rank's `md.partition` slice: ceil(N / n) elements, the last ones fewer.

Sources:
  [T] R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
  [P] P. Patarasuk, X. Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from minidist.comm import wire
from minidist.comm.partition import lengths, partition


class Messenger(Protocol):
    """What an algorithm needs of a Comm: who it is, and messages."""

    rank: int
    size: int
    device: torch.device

    def isend(self, x: Tensor, dst: int) -> Any: ...
    def irecv(self, x: Tensor, src: int) -> Any: ...
    def lengths(self, length: int) -> list[int]: ...


def exchange(comm: Messenger, outgoing: Tensor, dst: int, incoming: Tensor, src: int) -> Tensor:
    """Send to one rank while receiving from another, into `incoming`.

    Both are under way before either is waited for: if all ranks sent first and received then, each would wait for its
    neighbour for ever.
    """
    receiving = comm.irecv(incoming, src)
    sending = comm.isend(outgoing, dst)
    receiving.wait()
    sending.wait()
    return incoming


# ---- ring: every rank talks to its two neighbours, and all links are busy all the time [P] ---------------------------


def reduce_around(pieces: Sequence[Tensor], comm: Messenger) -> None:
    """Send a partial sum of each piece once round the ring; piece `rank` ends here, finished.

    It sets out at the right neighbour of the rank that will own it, and every rank it passes adds
    its own part to it: the last to add is the owner. n = 4, what rank 0 does:

                  sends to 1       adds from 3
        step 1    piece 3          piece 2 of 3
        step 2    piece 2 of 3 0   piece 1 of 2 3
        step 3    piece 1 of 2 3 0 piece 0 of 1 2 3
    """
    rank, n = comm.rank, comm.size
    for step in range(1, n):
        outgoing, own = pieces[(rank - step) % n], pieces[(rank - step - 1) % n]
        own += exchange(comm, outgoing, (rank + 1) % n, torch.empty_like(own), (rank - 1) % n)


def gather_around(pieces: Sequence[Tensor], comm: Messenger) -> None:
    """Send each piece once round the ring, from its own rank: a rank passes on what it got last.

    n = 4, what rank 0 does:

                  sends to 1   gets from 3
        step 1    piece 0      piece 3
        step 2    piece 3      piece 2
        step 3    piece 2      piece 1
    """
    rank, n = comm.rank, comm.size
    for step in range(1, n):
        outgoing, incoming = pieces[(rank - step + 1) % n], pieces[(rank - step) % n]
        exchange(comm, outgoing, (rank + 1) % n, incoming, (rank - 1) % n)


def ring_reduce_scatter(x: Tensor, comm: Messenger) -> Tensor:
    """This rank's piece of the sum of x over the ranks, cut along dim 0; x stays as it is.

    n - 1 messages; every piece but its own, at most (n-1) ceil(N/n) elements [P].
    """
    wire.check("ring_reduce_scatter", x, comm.device)
    partial = wire.rows(x.detach()).clone(memory_format=torch.contiguous_format)
    pieces = [partial[part] for part in partition(len(partial), comm.size)]
    reduce_around(pieces, comm)
    return pieces[comm.rank].clone()


def ring_all_gather(x: Tensor, comm: Messenger, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's x, concatenated along dim 0. sizes: every rank's length, asked for first where it isn't given.

    n - 1 messages; every piece but its right neighbour's, at most (n-1) ceil(N/n) elements for N in all [P].
    """
    wire.check("ring_all_gather", x, comm.device)
    x = wire.rows(x)
    sizes = comm.lengths(len(x)) if sizes is None else sizes
    whole = x.new_empty(sum(sizes), *x.shape[1:])
    pieces = whole.split(list(sizes))
    pieces[comm.rank].copy_(x.detach())
    gather_around(pieces, comm)
    return whole


def ring_all_reduce(x: Tensor, comm: Messenger) -> Tensor:
    """The sum of x over the ranks, into x: a reduce-scatter, then an all-gather of the sums.

    2(n-1) messages; at most 2(n-1) ceil(N/n) elements. That is nearly 2N however many ranks there
    are, and no algorithm sends less [P].
    """
    wire.check("ring_all_reduce", x, comm.device, written=True)
    flat = _flat(x)
    pieces = [flat[part] for part in partition(len(flat), comm.size)]
    reduce_around(pieces, comm)
    gather_around(pieces, comm)
    return _write_back(flat, x)


# ---- tree: few messages, each of the whole tensor; for small tensors, where latency is what counts [T] ---------------


def tree_broadcast(x: Tensor, comm: Messenger, src: int = 0) -> Tensor:
    """Rank src's x, into everyone's x.

    Every round doubles the ranks that have it. Counted from src, with n = 6:

        round 1    0 -> 1
        round 2    0 -> 2   1 -> 3
        round 3    0 -> 4   1 -> 5

    ceil(log2 n) rounds; src sends in each of them, N elements a message [T].
    """
    wire.check("tree_broadcast", x, comm.device, written=True)
    wire.check_rank("tree_broadcast", "src", src, comm.size)
    flat, n, me = _flat(x), comm.size, (comm.rank - src) % comm.size
    for have in _doublings(n):
        if me < have and me + have < n:
            comm.isend(flat, (comm.rank + have) % n).wait()
        elif have <= me < 2 * have:
            comm.irecv(flat, (comm.rank - have) % n).wait()
    return _write_back(flat, x)


def tree_reduce(x: Tensor, comm: Messenger, dst: int = 0) -> Tensor:
    """The sum of x over the ranks, into x on rank dst; elsewhere x stays as it is.

    The broadcast run backwards: every round halves the ranks that hold a partial sum. Counted from dst, with n = 6:

        round 1    4 -> 0   5 -> 1
        round 2    2 -> 0   3 -> 1
        round 3    1 -> 0

    ceil(log2 n) rounds; a rank other than dst sends once, N elements [T].
    """
    wire.check("tree_reduce", x, comm.device, written=True)
    wire.check_rank("tree_reduce", "dst", dst, comm.size)
    n, me = comm.size, (comm.rank - dst) % comm.size
    partial = _flat(x) if me == 0 else _flat(x).clone()
    for left in reversed(_doublings(n)):
        if me < left and me + left < n:
            partial += comm.irecv(torch.empty_like(partial), (comm.rank + left) % n).wait()
        elif left <= me < 2 * left:
            comm.isend(partial, (comm.rank - left) % n).wait()
    return _write_back(partial, x) if me == 0 else x


def tree_all_reduce(x: Tensor, comm: Messenger) -> Tensor:
    """The sum of x over the ranks, into x: to rank 0 and back. 2 ceil(log2 n) rounds of N elements [T]."""
    return tree_broadcast(tree_reduce(x, comm), comm)


# ---- recursive halving and doubling: a ring's bytes in a tree's number of steps [T] ----------------------------------


def halving_doubling_all_reduce(x: Tensor, comm: Messenger) -> Tensor:
    """The sum of x over the ranks, into x.

    Halving: exchange half of what you have with the rank n/2 away, and add; then a quarter with the one n/4 away, until
    one piece is left, summed over all. Doubling: the same way back, without adding. For rank 0 with n = 4:

        sends to 2    pieces 2 3      then holds    pieces 0 1 of 0, 2
        sends to 1    piece 1                       piece 0 of all
        sends to 1    piece 0                       pieces 0 1 of all
        sends to 2    pieces 0 1                    x

    For n a power of two: 2 log2 n messages, at most 2(n-1) ceil(N/n) elements: 2(n-1)/n N where n divides N [T].
    For other n let m be the largest power of two below it. A rank from m on first hands its tensor to the rank m places
    before it, and in the end gets the sum from there; the first m ranks do the rest. m takes the place of n, and such a
    partner sends one more message of N elements.
    """
    wire.check("halving_doubling_all_reduce", x, comm.device, written=True)
    flat, core = _flat(x), 1 << (comm.size.bit_length() - 1)
    if comm.rank >= core:
        comm.isend(flat, comm.rank - core).wait()
        comm.irecv(flat, comm.rank - core).wait()
        return _write_back(flat, x)
    partner = comm.rank + core if comm.rank + core < comm.size else None
    if partner is not None:
        flat += comm.irecv(torch.empty_like(flat), partner).wait()
    _halve_and_double(flat, comm, core)
    if partner is not None:
        comm.isend(flat, partner).wait()
    return _write_back(flat, x)


def _halve_and_double(flat: Tensor, comm: Messenger, n: int) -> None:
    """Sum flat over the first n = 2**k ranks, into flat."""
    starts = [part.start for part in partition(len(flat), n)] + [len(flat)]
    first, steps = 0, []  # I am responsible for `distance` pieces from `first`
    for distance in reversed(_doublings(n)):
        lower = flat[starts[first] : starts[first + distance]]
        upper = flat[starts[first + distance] : starts[first + 2 * distance]]
        keep, give = (upper, lower) if comm.rank & distance else (lower, upper)
        first += distance if comm.rank & distance else 0
        keep += exchange(comm, give, comm.rank ^ distance, torch.empty_like(keep), comm.rank ^ distance)
        steps.append((keep, give, comm.rank ^ distance))
    for kept, given, other in reversed(steps):
        exchange(comm, kept, other, given, other)


def bruck_all_gather(x: Tensor, comm: Messenger, sizes: Sequence[int] | None = None) -> Tensor:
    """Every rank's x, concatenated along dim 0. sizes: every rank's length, asked for first where it isn't given.

    Every round doubles the pieces a rank has: it gets those of the rank as many places on as it has pieces.

        n = 6, rank 0 has    piece 0    gets from 1    piece 1
                             0 1        gets from 2    2 3
                             0 1 2 3    gets from 4    4 5

    ceil(log2 n) messages for any n; n - 1 pieces, for equal pieces (n-1)/n N elements [T].
    """
    wire.check("bruck_all_gather", x, comm.device)
    x, rank, n = wire.rows(x), comm.rank, comm.size
    sizes = comm.lengths(len(x)) if sizes is None else sizes
    turned = [sizes[(rank + i) % n] for i in range(n)]  # pieces in the order in which I get them, my own first
    starts = [sum(turned[:i]) for i in range(n + 1)]
    found = x.new_empty(starts[n], *x.shape[1:])
    found[: len(x)] = x.detach()
    for have in _doublings(n):
        more = min(have, n - have)
        incoming = found[starts[have] : starts[have + more]]
        exchange(comm, found[: starts[more]], (rank - have) % n, incoming, (rank + have) % n)
    pieces = found.split(turned)
    return torch.cat([pieces[(i - rank) % n] for i in range(n)])


# ---- where links differ, and where every rank has something else for every other -------------------------------------


class Part:
    """Some ranks of a Comm, numbered from 0: enough of one to send messages among them, without making a group."""

    def __init__(self, comm: Messenger, ranks: Sequence[int]) -> None:
        self.comm, self.ranks = comm, list(ranks)
        self.rank, self.size, self.device = self.ranks.index(comm.rank), len(self.ranks), comm.device

    def isend(self, x: Tensor, dst: int) -> Any:
        return self.comm.isend(x, self.ranks[dst])

    def irecv(self, x: Tensor, src: int) -> Any:
        return self.comm.irecv(x, self.ranks[src])

    def lengths(self, length: int) -> list[int]:
        raise NotImplementedError("give the lengths: only all ranks of a Comm can ask for them")


def hierarchical_all_reduce(x: Tensor, comm: Messenger, inside: int) -> Tensor:
    """The sum of x over the ranks, into x, where links inside a machine are faster than those between machines.

    inside: ranks of a machine, k; ranks fill machine by machine, m machines in all.

        reduce-scatter in the machine     chip i of it holds piece i, summed over the machine
        all-reduce between machines       chip i with chip i of the others: k rings side by side, N/k elements each
        all-gather in the machine         all pieces, summed over all

    Of the at most 2(k-1) ceil(N/k) + 2(m-1) ceil(ceil(N/k) / m) elements a rank sends, only the second part, nearly
    2N/k, leaves its machine; in a flat ring the ranks at the machine's edge send nearly 2N over the slow link.
    Raises ValueError where k does not divide the number of ranks.
    """
    wire.check("hierarchical_all_reduce", x, comm.device, written=True)
    if inside < 1 or comm.size % inside:
        raise ValueError(f"hierarchical_all_reduce: inside={inside} must divide the {comm.size} ranks")
    machine, chip = divmod(comm.rank, inside)
    near = Part(comm, range(machine * inside, (machine + 1) * inside))
    far = Part(comm, range(chip, comm.size, inside))
    flat = _flat(x)
    pieces = [flat[part] for part in partition(len(flat), inside)]
    reduce_around(pieces, near)
    ring_all_reduce(pieces[chip], far)
    gather_around(pieces, near)
    return _write_back(flat, x)


def pairwise_all_to_all(
    x: Tensor, comm: Messenger, send_sizes: Sequence[int] | None = None, recv_sizes: Sequence[int] | None = None
) -> Tensor:
    """The pieces of x that all ranks have for this one, concatenated along dim 0. Sizes: both or neither, as in Comm.

    In step s every rank sends to the rank s places on and receives from the one s places back, so that each is the
    target of exactly one other and no link is shared. n - 1 messages; what belongs to the others, (n-1)/n N elements
    where the pieces are equal [T].
    """
    wire.check("pairwise_all_to_all", x, comm.device)
    x, rank, n = wire.rows(x), comm.rank, comm.size
    if (send_sizes is None) != (recv_sizes is None):
        raise ValueError("pairwise_all_to_all: give both send_sizes and recv_sizes, or neither")
    send = lengths(len(x), n) if send_sizes is None else list(send_sizes)
    recv = [send[rank]] * n if recv_sizes is None else list(recv_sizes)
    wire.check_sizes(send, recv, len(x), rank, n)
    whole = x.new_empty(sum(recv), *x.shape[1:])
    outgoing, incoming = x.detach().split(send), whole.split(recv)
    incoming[rank].copy_(outgoing[rank])
    for step in range(1, n):
        dst, src = (rank + step) % n, (rank - step) % n
        exchange(comm, outgoing[dst], dst, incoming[src], src)
    return whole


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _doublings(n: int) -> list[int]:
    """1, 2, 4, ... below n: ceil(log2 n) of them.

    >>> _doublings(6), _doublings(1)
    ([1, 2, 4], [])
    """
    return [1 << k for k in range((n - 1).bit_length())]


def _flat(x: Tensor) -> Tensor:
    """x's values in one dimension: x's own memory where x is contiguous, else a copy."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _write_back(flat: Tensor, x: Tensor) -> Tensor:
    return wire.unpack(flat.view(x.shape), x)


__all__ = [
    "bruck_all_gather",
    "halving_doubling_all_reduce",
    "hierarchical_all_reduce",
    "pairwise_all_to_all",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_all_reduce",
    "tree_broadcast",
    "tree_reduce",
]
