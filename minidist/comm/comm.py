"""Comm: one rank's view of a group of ranks, and everything the group can do together.

The names are those of torch.distributed; what differs is that a call cannot go quietly wrong: any view is a legal
tensor, ranks are counted inside the group, every call is recorded, and in checked mode the ranks compare what they call
before anything is sent. Tensors are data here: no call is differentiable, and one that requires a gradient is read and
written as `x.detach()` is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm import wire
from minidist.comm.handle import Handle, NullWatch, Watch
from minidist.comm.partition import lengths
from minidist.comm.recorder import Call, Recorder
from minidist.plan import cost
from minidist.timeline import Span


class Comm:
    """One rank's view of a group: `rank` of `size`, which are the world's `ranks`.

    Every method that takes `async_op` returns the result, or a `Handle` whose `wait()` returns it. `op` is one of "sum",
    "mean", "min", "max", "product". `src` and `dst` count inside this Comm.

    group: torch's process group (None: the default one). ranks: the members' world ranks. rank: my index in them.
    device: where the tensors live. recorder, watch: told of every call, and of every wait. board: shared memory for
    checked mode, see `minidist.comm.checked`. pace: a modelled cluster, see `minidist.comm.pace`. generator: this
    rank's own random numbers.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        board: Any = None,
        pace: Any = None,
        generator: torch.Generator | None = None,
        name: str = "world",
    ) -> None:
        self.group, self.ranks, self.rank, self.name = group, tuple(ranks), rank, name
        self.device = torch.device("cpu") if device is None else device
        self.recorder = Recorder() if recorder is None else recorder
        self.watch = NullWatch() if watch is None else watch
        self.board, self.pace = board, pace
        self.generator = torch.Generator() if generator is None else generator

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Comm({self.name!r}, rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce x element by element over all ranks, into x on every rank. x: any shape, the same everywhere."""
        wire.check("all_reduce", x, self.device, written=True)
        wire.check_reduction("all_reduce", op, x)
        call, data, works = self._begin("all_reduce", x.nbytes), wire.pack(x), []
        if self.size > 1:
            works = [dist.all_reduce(data, wire.reduce_op(op, x.dtype), group=self.group, async_op=True)]
        return self._end(call, works, lambda: wire.unpack(self._mean(data, op), x), async_op)

    def reduce(self, x: Tensor, dst: int, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce x element by element over all ranks, into x on rank dst; elsewhere x stays as it is."""
        wire.check("reduce", x, self.device, written=True)
        wire.check_reduction("reduce", op, x)
        self._peer("reduce", "dst", dst)
        call, data, works = self._begin("reduce", x.nbytes), wire.pack(x), []
        mine = self.rank == dst
        if not mine and data.data_ptr() == x.data_ptr():
            data = data.clone()  # gloo leaves partial sums in it
        if self.size > 1:
            reduction = wire.reduce_op(op, x.dtype)
            works = [dist.reduce(data, op=reduction, group=self.group, async_op=True, group_dst=dst)]
        return self._end(call, works, lambda: wire.unpack(self._mean(data, op), x) if mine else x, async_op)

    def broadcast(self, x: Tensor, src: int, *, async_op: bool = False) -> Any:
        """Copy rank src's x into everyone's x. x: any shape, the same everywhere."""
        wire.check("broadcast", x, self.device, written=True)
        self._peer("broadcast", "src", src)
        call, data, works = self._begin("broadcast", x.nbytes), wire.pack(x), []
        if self.size > 1:
            works = [dist.broadcast(data, group=self.group, async_op=True, group_src=src)]
        return self._end(call, works, lambda: wire.unpack(data, x), async_op)

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None, *, async_op: bool = False) -> Any:
        """Everyone's x, concatenated along dim 0 in the order of the ranks. x: [n_r, ...] -> [sum of n_r, ...].

        sizes: every rank's n_r, where it is known; otherwise the ranks exchange it first.
        """
        wire.check("all_gather", x, self.device)
        x = x.reshape(1) if x.dim() == 0 else x
        sizes = self._gather_sizes(len(x)) if sizes is None else list(sizes)
        out = x.new_empty(sum(sizes), *x.shape[1:])
        call, data, result, works = self._begin("all_gather", out.nbytes), wire.pack(x), wire.pack(out), []
        if self.size == 1:
            result.copy_(data)
        elif min(sizes) == max(sizes):
            works = [wire.all_gather_single(result, data, group=self.group, async_op=True)]
        else:
            pieces = result.split(sizes)
            pieces[self.rank].copy_(data)
            works = [
                dist.broadcast(pieces[r], group=self.group, async_op=True, group_src=r)
                for r in range(self.size)
                if sizes[r]
            ]
        return self._end(call, works, lambda: out, async_op)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """This rank's `md.partition` slice, along dim 0, of the reduction of x over all ranks; x stays as it is.

        x: [n, ...], the same shape everywhere, n any length -> [this rank's share of n, ...].
        """
        wire.check("reduce_scatter", x, self.device)
        wire.check_reduction("reduce_scatter", op, x)
        x = x.reshape(1) if x.dim() == 0 else x
        call, data, works = self._begin("reduce_scatter", x.nbytes), wire.pack(x), []
        parts = lengths(len(x), self.size)
        pieces = data.new_empty(self.size, parts[self.rank], *x.shape[1:])
        if self.size == 1:
            pieces.copy_(data)
        else:
            flat = pieces.flatten(0, 1)
            same = [parts[self.rank]] * self.size
            works = [dist.all_to_all_single(flat, data, same, parts, group=self.group, async_op=True)]
        return self._end(call, works, lambda: self._mean(_reduce_rows(pieces, op), op).view(x.dtype), async_op)

    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Send a piece of x to every rank and concatenate the pieces received, along dim 0, in the order of the ranks.

        send_sizes: length of the piece for each rank (default: `md.partition` of len(x), which must then be the same on
        all ranks). recv_sizes: lengths that arrive, exchanged first where only send_sizes are given.
        """
        wire.check("all_to_all", x, self.device)
        x = x.reshape(1) if x.dim() == 0 else x
        if send_sizes is None:
            send_sizes = lengths(len(x), self.size)
            recv_sizes = [send_sizes[self.rank]] * self.size if recv_sizes is None else recv_sizes
        send_sizes = list(send_sizes)
        if len(send_sizes) != self.size or sum(send_sizes) != len(x):
            raise ValueError(f"all_to_all: send_sizes {send_sizes} must be {self.size} lengths with sum {len(x)}")
        recv_sizes = self._swap_sizes(send_sizes) if recv_sizes is None else list(recv_sizes)
        out = x.new_empty(sum(recv_sizes), *x.shape[1:])
        call, data, result, works = self._begin("all_to_all", x.nbytes), wire.pack(x), wire.pack(out), []
        if self.size == 1:
            result.copy_(data)
        else:
            works = [dist.all_to_all_single(result, data, recv_sizes, send_sizes, group=self.group, async_op=True)]
        return self._end(call, works, lambda: out, async_op)

    def barrier(self) -> None:
        """Return once every rank has called."""
        self.all_reduce(torch.zeros(1, device=self.device))

    # ---- messages ----------------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Send x to rank dst, which calls `recv` with a tensor of this size and type. Returns when x may be reused."""
        self._send("send", x, dst, tag).wait()

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Tensor:
        """Receive what rank src sends, into x."""
        return self._recv("recv", x, src, tag).wait()

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Handle:
        """Begin to send x; leave x alone until the handle's `wait()`."""
        return self._send("isend", x, dst, tag)

    def irecv(self, x: Tensor, src: int, tag: int = 0) -> Handle:
        """Begin to receive into x; the handle's `wait()` returns it."""
        return self._recv("irecv", x, src, tag)

    def _send(self, op: str, x: Tensor, dst: int, tag: int) -> Handle:
        wire.check(op, x, self.device)
        self._peer(op, "dst", dst, other=True)
        call, data = self._begin(op, x.nbytes, x.nbytes), wire.pack(x)
        work = dist.isend(data, group=self.group, group_dst=dst, tag=tag)
        return self._end(call, [work], lambda: x, async_op=True)

    def _recv(self, op: str, x: Tensor, src: int, tag: int) -> Handle:
        wire.check(op, x, self.device, written=True)
        self._peer(op, "src", src, other=True)
        call, data = self._begin(op, x.nbytes, 0), wire.pack(x)
        work = dist.irecv(data, group=self.group, group_src=src, tag=tag)
        return self._end(call, [work], lambda: wire.unpack(data, x), async_op=True)

    # ---- groups ------------------------------------------------------------------------------------------------------

    def subgroups(self, members: Sequence[Sequence[int]], name: str = "group") -> "Comm | None":
        """Divide this Comm: every rank passes the same lists of this Comm's ranks and gets the Comm it belongs to."""
        mine = None
        for group in members:
            ranks = [self.ranks[r] for r in group]
            torch_group = dist.new_group(ranks) if self.size > 1 else None
            if self.rank in group:
                mine = Comm(
                    torch_group,
                    ranks,
                    list(group).index(self.rank),
                    self.device,
                    self.recorder,
                    self.watch,
                    self.board,
                    self.pace,
                    self.generator,
                    name,
                )
        return mine

    @contextmanager
    def compute(self, action: str, flops: float | None = None, seconds: float | None = None) -> Iterator[None]:
        """Record the body as a computation; in a paced run it takes its modelled time, by flops or as given."""
        start = monotonic()
        yield
        self.recorder.spans.append(Span(self.ranks[self.rank], action, start, monotonic()))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _peer(self, op: str, what: str, rank: int, *, other: bool = False) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"{op}: {what}={rank!r} is no rank of this Comm: they are 0 to {self.size - 1}")
        if other and rank == self.rank:
            raise ValueError(f"{op}: {what}={rank} is this rank itself: a message needs two ranks")

    def _begin(self, op: str, nbytes: int, sent: int | None = None) -> Call:
        if sent is None:
            sent = cost.bytes_sent(op, nbytes, self.size)
        call = Call(op, nbytes, sent, self.ranks, monotonic(), None, self.ranks[self.rank])
        self.recorder.calls.append(call)
        return call

    def _end(self, call: Call, works: list[Any], finish: Callable[[], Tensor], async_op: bool) -> Any:
        def done() -> Tensor:
            result = finish()
            call.end = monotonic()
            return result

        handle = Handle(f"{call.op}.wait()" if async_op else call.op, works, done, self.watch)
        return handle if async_op else handle.wait()

    def _mean(self, data: Tensor, op: str) -> Tensor:
        return data.div_(self.size) if op == "mean" else data

    def _gather_sizes(self, length: int) -> list[int]:
        if self.size == 1:
            return [length]
        sizes = torch.zeros(self.size, dtype=torch.int64)
        with self.watch.waiting("all_gather"):
            wire.all_gather_single(sizes, torch.tensor([length]), group=self.group)
        return sizes.tolist()

    def _swap_sizes(self, send_sizes: list[int]) -> list[int]:
        if self.size == 1:
            return send_sizes
        sizes = torch.zeros(self.size, dtype=torch.int64)
        with self.watch.waiting("all_to_all"):
            dist.all_to_all_single(sizes, torch.tensor(send_sizes), group=self.group)
        return sizes.tolist()


def _reduce_rows(pieces: Tensor, op: str) -> Tensor:
    """Reduce dim 0 in the order of the rows, so that the result does not depend on who came first."""
    total = pieces[0].clone()
    for piece in pieces[1:]:
        if op == "max" or (pieces.dtype is torch.bool and op == "sum"):
            torch.maximum(total, piece, out=total)
        elif op == "min":
            torch.minimum(total, piece, out=total)
        elif op == "product":
            total.mul_(piece)
        else:
            total.add_(piece)
    return total
