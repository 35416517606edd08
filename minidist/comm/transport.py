"""How packed tensors travel. Here: the calls into torch.distributed, the one place that knows its names and what each
backend lacks. Whoever brings a `Transport` of their own gives it to Comm in place of the group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm.wire import LARGEST_TAG

# Newer torch calls these two *_single and deprecates the older names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_HEAD = 16  # bytes in front of a tensor: room for its length, and a start at which any element type may lie
_INSIDE_TAG = LARGEST_TAG + 1  # of messages that are part of a collective


def _nothing() -> None:
    pass


class Started(NamedTuple):
    """A communication under way: wait for the works, then call `finish`."""

    works: Sequence[Any] = ()
    finish: Callable[[], Any] = _nothing

    def at_end(self, note: Callable[[], None]) -> None:
        """Call `note` in another thread as soon as the communication is over, if it is a single work that can tell."""
        if len(self.works) == 1 and hasattr(self.works[0], "get_future"):
            self.works[0].get_future().add_done_callback(lambda _: note())


def combine(op: str, rows: Tensor | Sequence[Tensor], out: Tensor) -> None:
    """Reduce the rows into out, row after row: the result does not depend on who came first."""
    out.copy_(rows[0])
    for row in rows[1:]:
        if op == "max":
            torch.maximum(out, row, out=out)
        elif op == "min":
            torch.minimum(out, row, out=out)
        elif op == "product":
            out.mul_(row)
        else:
            out.add_(row)


class Transport:
    """What moves a Comm's tensors: contiguous, on its device, and checked before they come here.

    Every method starts a communication and returns `Started`; only `introduce` and `swap` wait for all ranks. Ranks
    count inside the group, `op` is sum, min, max or product, and lengths are along dim 0.
    """

    def all_reduce(self, data: Tensor, op: str) -> Started:
        """Reduce data over all ranks, into data."""
        raise NotImplementedError

    def reduce(self, data: Tensor, dst: int, op: str) -> Started:
        """Reduce data over all ranks, into rank dst's data."""
        raise NotImplementedError

    def broadcast(self, data: Tensor, src: int) -> Started:
        """Copy rank src's data into everyone's."""
        raise NotImplementedError

    def introduce(self, data: Tensor) -> tuple[list[int], Tensor | None]:
        """Every rank's len(data); and all data in one tensor, where they came along. Waits for all ranks."""
        raise NotImplementedError

    def swap(self, counts: list[int], device: torch.device) -> list[int]:
        """counts[r] is for rank r: what the others have for this rank. Waits for all ranks."""
        raise NotImplementedError

    def all_gather(self, out: Tensor, data: Tensor, sizes: Sequence[int]) -> Started:
        """Everyone's data, sizes[r] long, one after the other into out."""
        raise NotImplementedError

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str, parts: Sequence[int]) -> Started:
        """Reduce data over all ranks; this rank's part, of the lengths `parts`, into out."""
        raise NotImplementedError

    def all_to_all(self, out: Tensor, data: Tensor, recv: Sequence[int], send: Sequence[int]) -> Started:
        """Send a piece of data, send[r] long, to every rank; the pieces for this one, recv[r] long, into out."""
        raise NotImplementedError

    def barrier(self) -> Started:
        """Over when every rank has called."""
        raise NotImplementedError

    def isend(self, data: Tensor, dst: int, tag: int) -> Started:
        """Send data to rank dst."""
        raise NotImplementedError

    def irecv(self, data: Tensor, src: int, tag: int) -> Started:
        """Receive into data what rank src sends with this tag."""
        raise NotImplementedError


class Alone(Transport):
    """A group of one rank: nothing is sent."""

    def all_reduce(self, data: Tensor, op: str) -> Started:
        return Started()

    def reduce(self, data: Tensor, dst: int, op: str) -> Started:
        return Started()

    def broadcast(self, data: Tensor, src: int) -> Started:
        return Started()

    def introduce(self, data: Tensor) -> tuple[list[int], Tensor | None]:
        return [len(data)], None

    def swap(self, counts: list[int], device: torch.device) -> list[int]:
        return counts

    def all_gather(self, out: Tensor, data: Tensor, sizes: Sequence[int]) -> Started:
        out.copy_(data)
        return Started()

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str, parts: Sequence[int]) -> Started:
        out.copy_(data)
        return Started()

    def all_to_all(self, out: Tensor, data: Tensor, recv: Sequence[int], send: Sequence[int]) -> Started:
        out.copy_(data)
        return Started()

    def barrier(self) -> Started:
        return Started()

    def isend(self, data: Tensor, dst: int, tag: int) -> Started:
        raise AssertionError("a group of one has no peer")

    def irecv(self, data: Tensor, src: int, tag: int) -> Started:
        raise AssertionError("a group of one has no peer")


class Torch(Transport):
    """A group as torch.distributed runs it on any backend: its own collectives."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    @staticmethod
    def _op(op: str) -> Any:
        ops = dist.ReduceOp
        return {"sum": ops.SUM, "min": ops.MIN, "max": ops.MAX, "product": ops.PRODUCT}[op]

    def all_reduce(self, data: Tensor, op: str) -> Started:
        return Started([dist.all_reduce(data, self._op(op), group=self.group, async_op=True)])

    def reduce(self, data: Tensor, dst: int, op: str) -> Started:
        return Started([dist.reduce(data, op=self._op(op), group=self.group, async_op=True, group_dst=dst)])

    def broadcast(self, data: Tensor, src: int) -> Started:
        return Started([dist.broadcast(data, group=self.group, async_op=True, group_src=src)])

    def introduce(self, data: Tensor) -> tuple[list[int], Tensor | None]:
        sizes = torch.empty(self.size, dtype=torch.int64, device=data.device)
        _all_gather_single(sizes, sizes.new_tensor([len(data)]), group=self.group)
        return sizes.tolist(), None

    def swap(self, counts: list[int], device: torch.device) -> list[int]:
        mine = torch.tensor(counts, device=device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.tolist()

    def all_gather(self, out: Tensor, data: Tensor, sizes: Sequence[int]) -> Started:
        if min(sizes) == max(sizes):
            return Started([_all_gather_single(out, data, group=self.group, async_op=True)])
        return Started([dist.all_gather(list(out.split(list(sizes))), data, group=self.group, async_op=True)])

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str, parts: Sequence[int]) -> Started:
        share = parts[0]  # the largest
        if share * self.size == len(data):
            return Started([_reduce_scatter_single(out, data, self._op(op), group=self.group, async_op=True)])
        padded = data.new_zeros(share * self.size, *data.shape[1:])
        padded[: len(data)] = data
        mine = padded.new_empty(share, *data.shape[1:])
        work = _reduce_scatter_single(mine, padded, self._op(op), group=self.group, async_op=True)
        return Started([work], lambda: out.copy_(mine[: len(out)]))

    def all_to_all(self, out: Tensor, data: Tensor, recv: Sequence[int], send: Sequence[int]) -> Started:
        return Started([dist.all_to_all_single(out, data, list(recv), list(send), group=self.group, async_op=True)])

    def barrier(self) -> Started:
        return Started([dist.barrier(group=self.group, async_op=True)])

    def isend(self, data: Tensor, dst: int, tag: int) -> Started:
        return Started([dist.isend(data, group=self.group, group_dst=dst, tag=tag)])

    def irecv(self, data: Tensor, src: int, tag: int) -> Started:
        return Started([dist.irecv(data, group=self.group, group_src=src, tag=tag)])


class Gloo(Torch):
    """Gloo, and what it does slowly done from the parts of it that are fast.

    Everything here is one exchange in which each rank sends straight to every other, instead of n-1 rounds of a ring.
    Gloo's reduce-scatter moves an all-reduce's bytes, twice what is needed; its ring all-gather and all-reduce of small
    tensors wait for n-1 and 2(n-1) messages one after the other. Its all-reduce of large tensors is as fast as any
    combination of these and stays.
    """

    SMALL_NBYTES = 1024 * 1024  # an all-reduce is latency, not bandwidth, if the tensors of all ranks are up to this
    COPY_NBYTES = 256 * 1024  # an all-gather or reduce-scatter up to this is best packed into one all-to-all
    LEAST_ROOM = 1024

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(group, rank, size)
        self._room = self.LEAST_ROOM  # the same on all ranks
        self._direct: Any = dist.group.WORLD if group is None else group

    # As dist.isend and dist.irecv, without the checks that Comm has made: an exchange has many messages.

    def isend(self, data: Tensor, dst: int, tag: int) -> Started:
        return Started([self._direct.send([data], dst, tag)])

    def irecv(self, data: Tensor, src: int, tag: int) -> Started:
        return Started([self._direct.recv([data], src, tag)])

    def all_reduce(self, data: Tensor, op: str) -> Started:
        if self.size * data.nbytes > self.SMALL_NBYTES:
            return super().all_reduce(data, op)
        rows = data.new_empty(self.size, *data.shape)
        copies = data.expand(self.size, *data.shape).contiguous()
        work = dist.all_to_all_single(rows, copies, group=self.group, async_op=True)
        return Started([work], lambda: combine(op, rows, data))

    def reduce(self, data: Tensor, dst: int, op: str) -> Started:
        # Gloo leaves partial sums in the others' tensors.
        return super().reduce(data if self.rank == dst else data.clone(), dst, op)

    def introduce(self, data: Tensor) -> tuple[list[int], Tensor | None]:
        """As Torch's, but every rank sends its length together with the tensor, as far as there is room.

        There is room for what was longest the last time, which all ranks know, so that small tensors whose size does
        not change need a single exchange.
        """
        raw, room = data.as_strided((data.numel(),), (1,)).view(torch.uint8), self._room
        block = torch.empty(_HEAD + room, dtype=torch.uint8)
        block.view(torch.int64)[0] = len(data)
        block[_HEAD : _HEAD + len(raw)] = raw[:room]
        blocks = block.new_empty(self.size, _HEAD + room)
        for work in self.all_gather(blocks.view(-1), block, [len(block)] * self.size).works:
            work.wait()
        sizes = blocks.view(torch.int64)[:, 0].tolist()
        row_nbytes = math.prod(data.shape[1:]) * data.itemsize
        longest = max(sizes) * row_nbytes
        small = longest * self.size <= self.COPY_NBYTES
        self._room = max(-(-longest // _HEAD) * _HEAD, self.LEAST_ROOM) if small else self.LEAST_ROOM
        if longest > room:
            return sizes, None
        pieces = [blocks[r, _HEAD : _HEAD + n * row_nbytes] for r, n in enumerate(sizes)]
        whole = blocks[:, _HEAD : _HEAD + longest].reshape(-1) if min(sizes) == max(sizes) else torch.cat(pieces)
        return sizes, whole.view(data.dtype).view(sum(sizes), *data.shape[1:])

    def all_gather(self, out: Tensor, data: Tensor, sizes: Sequence[int]) -> Started:
        if self.size == 2 and sizes[0] == sizes[1] and out.nbytes <= self.COPY_NBYTES:
            return super().all_gather(out, data, sizes)
        if out.nbytes <= self.COPY_NBYTES:
            copies = data.repeat(self.size, *[1] * (data.dim() - 1))
            return self.all_to_all(out, copies, sizes, [len(data)] * self.size)
        pieces = out.split(list(sizes))
        works = self._exchange([data] * self.size, pieces)
        pieces[self.rank].copy_(data)
        return Started(works)

    def reduce_scatter(self, out: Tensor, data: Tensor, op: str, parts: Sequence[int]) -> Started:
        if data.nbytes <= self.COPY_NBYTES:
            rows = data.new_empty(self.size, *out.shape)
            exchange = self.all_to_all(rows.flatten(0, 1), data, [len(out)] * self.size, parts)
            return Started(exchange.works, lambda: combine(op, rows, out))
        pieces = data.split(list(parts))
        terms = [piece if r == self.rank else torch.empty_like(out) for r, piece in enumerate(pieces)]
        return Started(self._exchange(pieces, terms), lambda: combine(op, terms, out))

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
        """Send outgoing[r] to every other rank r, and receive incoming[r] from it. What is empty is not sent."""
        works: list[Any] = []
        for distance in range(1, self.size):
            src, dst = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            works += self.irecv(incoming[src], src, _INSIDE_TAG).works if incoming[src].numel() else []
            works += self.isend(outgoing[dst], dst, _INSIDE_TAG).works if outgoing[dst].numel() else []
        return works


def transport(group: Any, rank: int, size: int) -> Transport:
    """The transport for a group: by its size and its backend, unless it is one itself."""
    if isinstance(group, Transport):
        return group
    if size == 1:
        return Alone()
    return (Gloo if dist.get_backend(group) == "gloo" else Torch)(group, rank, size)
