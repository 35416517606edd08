"""Comm: one rank's view of a group of ranks, and everything the group can do together.

The names are those of torch.distributed. What differs is that a call cannot go quietly wrong: any view is a legal
tensor, ranks are counted inside the group, every call is recorded, and in checked mode the ranks compare what they are
about to call before anything is sent. Tensors are data here: no call is differentiable, results require no gradient,
and a backward pass that reaches a tensor which a call wrote into raises.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minidist.comm import checked, pace, wire
from minidist.comm.groups import check_division, groups_made, torch_groups
from minidist.comm.handle import Handle, NullWatch, Watch
from minidist.comm.partition import lengths
from minidist.comm.recorder import Call, Recorder
from minidist.comm.transport import Started, transport
from minidist.plan import cost
from minidist.timeline import Span


@dataclass(slots=True)
class _Opened:
    """A call that has been checked: what `_close` needs to issue, record and pace it."""

    op: str
    start: float
    ends: tuple[int, ...]  # the world ranks it is between
    posted: checked.Posted | None = None


class Comm:
    """One rank's view of a group: it is `rank` of `size`, and the group is the world's `ranks`.

    A method that takes `async_op` returns its result, or with async_op=True a `Handle` whose `wait()` returns it. `op`
    is "sum", "mean", "min", "max" or "product". `src` and `dst` count inside this Comm. Tensors are of a type in
    `wire.DTYPES` on `device`, of any shape and strides; "dim 0" of a scalar is one row.

    group: torch's process group, None for the default one, or a `Transport` in its place. ranks: the members' world
    ranks, ascending. rank: my index in them. device: where tensors live. recorder, watch: told of every call, of every
    wait. board: memory shared by all ranks of the host. check: compare calls on the board before making them. pace:
    modelled times, see `minidist.comm.pace`; needs a board. generator: this rank's own random numbers. name: for
    errors. key: the same text on all members and on no other group.

    Raises ValueError where rank or ranks cannot be. Every method raises TypeError or ValueError for an argument that
    cannot work, and in checked mode `CommMismatch` where ranks call different things.
    """

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        rank: int,
        device: torch.device | None = None,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
        board: checked.Board | None = None,
        pace: pace.Pace | None = None,
        generator: torch.Generator | None = None,
        check: bool = True,
        name: str = "world",
        key: str = "world",
    ) -> None:
        ranks = tuple(ranks)
        if not ranks or any(a >= b for a, b in pairwise(ranks)):
            raise ValueError(f"ranks must be ascending and not empty, got {list(ranks)}")
        if not 0 <= rank < len(ranks):
            raise ValueError(f"rank {rank} is no index into the {len(ranks)} ranks {list(ranks)}")
        if pace is not None and board is None:
            raise ValueError("a paced Comm needs a board: the ranks read on it when the others called")
        self.group, self.ranks, self.rank, self.size, self.name = group, ranks, rank, len(ranks), name
        self.device = torch.device("cpu") if device is None else device
        self.recorder = Recorder() if recorder is None else recorder
        self.recorder.paced = pace is not None
        self.watch: Watch = NullWatch() if watch is None else watch
        self.board, self.pace, self.check = board, pace, check
        self.generator = torch.Generator(self.device) if generator is None else generator
        self._key, self._divisions = key, 0
        self._transport = transport(group, rank, self.size)
        self._ledger: checked.Ledger | None = None
        if board is not None and self.size > 1:
            self._ledger = checked.Ledger(board, ranks, rank, name, key, check)

    def __repr__(self) -> str:
        return f"Comm({self.name!r}, rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce x element by element over all ranks, into x on each. x: the same shape on all ranks."""
        wire.check("all_reduce", x, self.device, written=True)
        wire.check_reduction("all_reduce", op, x)
        opened = self._open("all_reduce", x, f"(op={op!r})", names=True)
        data = wire.pack(x)
        started = self._transport.all_reduce(data, wire.packed_reduction(op, x.dtype))
        return self._close(opened, x.nbytes, started, lambda: wire.unpack(self._divided(data, op), x), async_op)

    def reduce(self, x: Tensor, dst: int, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce x element by element over all ranks, into x on rank dst; elsewhere x stays as it is."""
        wire.check("reduce", x, self.device, written=True)
        wire.check_reduction("reduce", op, x)
        wire.check_rank("reduce", "dst", dst, self.size)
        opened = self._open("reduce", x, f"(dst={dst}, op={op!r})", names=True)
        data = wire.pack(x)
        started = self._transport.reduce(data, dst, wire.packed_reduction(op, x.dtype))

        def finish() -> Tensor:
            return wire.unpack(self._divided(data, op), x) if self.rank == dst else x

        return self._close(opened, x.nbytes, started, finish, async_op)

    def broadcast(self, x: Tensor, src: int, *, async_op: bool = False) -> Any:
        """Copy rank src's x into everyone's x. x: the same shape on all ranks."""
        wire.check("broadcast", x, self.device, written=True)
        wire.check_rank("broadcast", "src", src, self.size)
        opened = self._open("broadcast", x, f"(src={src})")
        data = wire.pack(x)
        started = self._transport.broadcast(data, src)
        return self._close(opened, x.nbytes, started, lambda: wire.unpack(data, x), async_op)

    def all_gather(
        self, x: Tensor, sizes: Sequence[int] | None = None, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """Everyone's x, concatenated along dim 0 in the order of the ranks: [n_r, ...] -> [sum of n_r, ...].

        sizes: n_r of every rank, if known. If not, the lengths travel first, with small tensors beside them; the call
        then waits, also with async_op, until every rank has called. out: contiguous memory for the result, of its
        shape; where no sizes are given, x is this rank's `md.partition` slice of it. x may be its place in out.
        """
        wire.check("all_gather", x, self.device)
        x = wire.rows(x)
        if out is not None:
            wire.check("all_gather", out, self.device, written=True)
            sizes = lengths(len(out), self.size) if sizes is None else sizes
        if sizes is not None and (len(sizes) != self.size or sizes[self.rank] != len(x)):
            mine = f"that of rank {self.rank} {len(x)}"
            raise ValueError(f"all_gather: sizes {list(sizes)} must be {self.size} lengths, {mine}")
        if out is not None and sizes is not None:
            wire.check_out("all_gather", out, x, sum(sizes))
        asked = "" if sizes is None else f"(sizes={list(sizes)})"
        opened, data, whole = self._open("all_gather", x, asked, ragged=True, names=True), wire.pack(x), None
        if sizes is None:
            with self.watch.waiting("all_gather"):
                sizes, whole = self._transport.introduce(data)
        started = Started()
        if whole is None:
            whole = data.new_empty(sum(sizes), *x.shape[1:]) if out is None else wire.pack(out)
            started = self._transport.all_gather(whole, data, sizes)
        result = whole.view(x.dtype) if out is None else out
        return self._close(opened, result.nbytes, started, lambda: result, async_op)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, async_op: bool = False) -> Any:
        """This rank's `md.partition` slice, along dim 0, of the reduction of x over all ranks; x stays as it is.

        x: [n, ...] with any n, the same shape on all ranks -> [this rank's share of n, ...], a new tensor.
        """
        wire.check("reduce_scatter", x, self.device)
        wire.check_reduction("reduce_scatter", op, x)
        x = wire.rows(x)
        opened = self._open("reduce_scatter", x, f"(op={op!r})", names=True)
        parts = lengths(len(x), self.size)
        out = x.new_empty(parts[self.rank], *x.shape[1:])
        data, mine = wire.pack(x), wire.pack(out)
        started = self._transport.reduce_scatter(mine, data, wire.packed_reduction(op, x.dtype), parts)
        return self._close(opened, x.nbytes, started, lambda: self._divided(out, op), async_op)

    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Send a piece of x to every rank; return the pieces received. Both along dim 0, in the order of the ranks.

        send_sizes: length of the piece for each rank. recv_sizes: of the piece from each rank; if only send_sizes are
        given the lengths travel first, and the call waits, also with async_op, until every rank has called. With
        neither x has the same shape on all ranks and is cut by `md.partition`.
        """
        wire.check("all_to_all", x, self.device)
        x = wire.rows(x)
        even = send_sizes is None and recv_sizes is None
        send = lengths(len(x), self.size) if send_sizes is None else list(send_sizes)
        recv = [send[self.rank]] * self.size if even else None if recv_sizes is None else list(recv_sizes)
        wire.check_sizes(send, recv, len(x), self.rank, self.size)
        if even:
            opened = self._open("all_to_all", x)
        else:
            given = "(send_sizes)" if recv is None else "(send_sizes, recv_sizes)"
            opened = self._open("all_to_all", x, given, ragged=True, send=tuple(send), recv=tuple(recv or ()))
        if recv is None:
            with self.watch.waiting("all_to_all"):
                recv = self._transport.swap(send, self.device)
        out = x.new_empty(sum(recv), *x.shape[1:])
        started = self._transport.all_to_all(wire.pack(out), wire.pack(x), recv, send)
        sent = (len(x) - send[self.rank]) * (x.nbytes // max(len(x), 1))
        return self._close(opened, x.nbytes, started, lambda: out, async_op, sent)

    def lengths(self, length: int) -> list[int]:
        """Every rank's `length`, in the order of the ranks. Neither recorded nor paced."""
        if self._ledger is not None and self.check:
            self._ledger.collective("lengths", f"lengths at {checked.caller().where}")
        with self.watch.waiting("lengths"):
            return self._transport.introduce(torch.empty(length, 0, device=self.device))[0]

    def barrier(self) -> None:
        """Return once every rank has called."""
        nothing = torch.empty(0, device=self.device)
        opened = self._open("barrier", nothing)
        self._close(opened, 0, self._transport.barrier(), lambda: nothing, async_op=False)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int = 0) -> None:
        """Send x to rank dst, which receives as many elements of this type. Returns when x may be reused.

        It may wait until dst calls recv: two ranks that both send first wait for each other.
        """
        self._send("send", x, dst, tag)

    def recv(self, x: Tensor, src: int, tag: int = 0) -> Tensor:
        """Receive into x what rank src sends with this tag; x is returned."""
        return self._recv("recv", x, src, tag)

    def isend(self, x: Tensor, dst: int, tag: int = 0) -> Handle:
        """Begin to send x to rank dst; leave x alone until the handle's `wait()`."""
        return self._send("isend", x, dst, tag)

    def irecv(self, x: Tensor, src: int, tag: int = 0) -> Handle:
        """Begin to receive into x what rank src sends with this tag; the handle's `wait()` returns x.

        Messages between two ranks with one tag arrive in the order in which both sides called.
        """
        return self._recv("irecv", x, src, tag)

    def _send(self, op: str, x: Tensor, dst: int, tag: int) -> Any:
        wire.check(op, x, self.device)
        wire.check_peer(op, "dst", dst, tag, self.rank, self.size)
        opened = self._open_message(op, x, self.rank, dst, tag)
        started = self._transport.isend(wire.pack(x), dst, tag)
        return self._close(opened, x.nbytes, started, lambda: x, op == "isend", x.nbytes)

    def _recv(self, op: str, x: Tensor, src: int, tag: int) -> Any:
        wire.check(op, x, self.device, written=True)
        wire.check_peer(op, "src", src, tag, self.rank, self.size)
        opened = self._open_message(op, x, src, self.rank, tag)
        data = wire.pack(x)
        started = self._transport.irecv(data, src, tag)
        return self._close(opened, x.nbytes, started, lambda: wire.unpack(data, x), op == "irecv", 0)

    # ---- groups and time ---------------------------------------------------------------------------------------------

    def subgroups(self, members: Sequence[Sequence[int]], name: str = "group") -> "Comm | None":
        """Divide this Comm: every rank of it passes the same lists of its ranks, and gets the Comm it belongs to.

        members: ascending lists, no rank in two. A rank in none of them gets None. name: of the new Comms.
        """
        members = [tuple(group) for group in members]
        check_division(members, self.size)
        members = [tuple(map(int, group)) for group in members]  # a number of numpy is a rank too
        if self._ledger is not None and self.check:
            self._ledger.collective(f"subgroups({[list(group) for group in members]})")
        self._divisions += 1
        division = [tuple(self.ranks[r] for r in group) for group in members]
        me = self.ranks[self.rank]
        if self.size > 1:
            self._check_numbering()
            with self.watch.waiting("subgroups"):
                groups = torch_groups(division, me, self.size)
        else:
            groups = [None] * len(members)
        for i, ranks in enumerate(division):
            if me in ranks:
                key = f"{self._key}/{self._divisions}.{i}"
                return self._child(groups[i], ranks, ranks.index(me), name, key)
        return None

    def _check_numbering(self) -> None:
        """Where only part of the world makes groups, torch needs its members to have made as many so far."""
        if self.size < dist.get_world_size() and len(set(self.lengths(groups_made()))) > 1:
            raise RuntimeError(f"ranks of {self.name!r} are in different numbers of groups: divide the world instead")

    def _child(self, group: Any, ranks: tuple[int, ...], rank: int, name: str, key: str) -> "Comm":
        shared = (self.device, self.recorder, self.watch, self.board, self.pace, self.generator, self.check)
        return Comm(group, ranks, rank, *shared, name, key)

    @contextmanager
    def compute(self, action: Any, flops: float | None = None, seconds: float | None = None) -> Iterator[None]:
        """Record the body as a computation; in a paced run it takes its modelled time, by `flops` or `seconds`.

        action: what the timeline calls it. flops: operations, at the chip's peak. A body that takes longer than its
        modelled time takes as long as it takes.
        """
        start = monotonic()
        yield
        if self.pace is not None:
            pace.sleep_until(start + self.pace.compute_seconds(flops, seconds))
        self.recorder.add_span(Span(self.ranks[self.rank], action, start, monotonic()))

    # ---- inside: a call is opened (checked, written on the board), issued, and closed (recorded, awaited) ------------

    def _open(
        self,
        op: str,
        x: Tensor,
        arguments: str = "",
        *,
        ragged: bool = False,
        names: bool = False,
        send: tuple[int, ...] = (),
        recv: tuple[int, ...] = (),
    ) -> _Opened:
        """Begin a collective. ragged: lengths along dim 0 may differ. names: compare what the caller calls x."""
        opened = _Opened(op, monotonic(), self.ranks)
        if self._ledger is None or not (self.check or self.pace):
            return opened
        written: dict[str, Any] = {"send": send, "recv": recv}
        if self.check:
            frame, inside, where = checked.caller()
            if names and frame is not None:
                written["named"], written["others"] = checked.names_of(x, frame)
                written["site"] = f"{frame.f_code.co_name} {frame.f_code.co_firstlineno} {frame.f_lasti}"
            texts = checked.describe(op + arguments, x, ragged, inside, where)
        else:
            texts = (op, op)
        if self.pace is not None:
            payload = x.nbytes * self.size if op == "all_gather" else x.nbytes
            written["ready"] = self.pace.call(op, payload, self.ranks)
        opened.posted = self._ledger.collective(*texts, **written)
        return opened

    def _open_message(self, op: str, x: Tensor, src: int, dst: int, tag: int) -> _Opened:
        ends = (self.ranks[src], self.ranks[dst])
        opened = _Opened(op, monotonic(), ends)
        if self._ledger is None or not (self.check or self.pace):
            return opened
        what, shown = f"{x.numel()} {wire.name(x.dtype)}", op
        if self.check:
            peer = f"dst={dst}" if src == self.rank else f"src={src}"
            _, inside, where = checked.caller()
            shown = checked.describe(f"{op}({peer}, tag={tag})", x, False, inside, where)[1]
        ready = 0.0 if self.pace is None else self.pace.call(op, x.nbytes, ends)
        opened.posted = self._ledger.message(what, shown, src, dst, tag, ready)
        return opened

    def _close(
        self,
        opened: _Opened,
        nbytes: int,
        started: Started,
        finish: Callable[[], Tensor],
        async_op: bool,
        sent: int | None = None,
    ) -> Any:
        """Record the call, and wait for it or hand out its handle."""
        if sent is None:
            sent = cost.bytes_sent(opened.op, nbytes, self.size)
        call = Call(opened.op, nbytes, sent, self.ranks, opened.start, None, self.ranks[self.rank])
        self.recorder.add(call)
        if async_op and opened.op not in pace.MESSAGES and self.device.type == "cpu":
            started.at_end(lambda: _ended(call))

        def done() -> Tensor:
            result = finish()
            self._time(call, opened)
            return result

        what = (f"{call.op}.wait()" if async_op else call.op) + ("" if self.name == "world" else f" in {self.name!r}")
        handle = Handle(what, started, done, self.watch)
        return handle if async_op else handle.wait()

    def _time(self, call: Call, opened: _Opened) -> None:
        posted, ledger = opened.posted, self._ledger
        if self.pace is not None and posted is not None and ledger is not None:
            call.start, call.end = self.pace.times(call.op, call.nbytes, opened.ends, ledger.ready(posted))
            pace.sleep_until(call.end)
        _ended(call)

    def _divided(self, data: Tensor, op: str) -> Tensor:
        return data.div_(self.size) if op == "mean" else data


def _ended(call: Call) -> None:
    if call.end is None:
        call.end = monotonic()
