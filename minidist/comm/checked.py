"""Checked mode: before anything is sent, ranks compare what they are about to do, through memory all of them see.

Before its call number k in a group a rank writes down what it calls; then it reads what the others wrote for theirs.
Whoever comes second sees a difference and raises, so that no wrong message ever leaves. It costs no message and no
waiting. An entry that has been overwritten since is not compared: a check may be skipped, never wrong.
"""

import marshal
import struct
import sys
import zlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from minidist.comm import wire

_MEANT = "which has another tensor of that name (if that is meant, give both one name, or launch with check=False)"


class CommMismatch(RuntimeError):
    """Ranks of one group made calls that do not belong together."""


class Entry(NamedTuple):
    """What one rank wrote down about one call.

    key: the group, or the group and the ends of a message. number: which call of this key. ready: when it can begin, in
    a paced run. what: what all must have in common. shown: the call as the error shows it. send, recv: the lengths it
    sends to and expects from each rank, empty where `what` says it all. named, others: names by which the caller knows
    this tensor, and names of its other tensors. site: the place in the program that calls.
    """

    key: int
    number: int
    ready: float
    what: str
    shown: str
    send: tuple[int, ...] = ()
    recv: tuple[int, ...] = ()
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    site: str = ""


class Board:
    """A table of entries for each rank in shared memory: a rank writes into its own and reads all.

    buffer: writable memory of `Board.nbytes(ranks)` zeros that all ranks share. rank: whose table is written.
    """

    SLOTS, SLOT_BYTES = 2048, 1024
    _HEAD = struct.Struct("<IdQQH")  # checksum, ready, key, number, length of the body

    def __init__(self, buffer: Any, rank: int, ranks: int) -> None:
        self._buffer, self._rank, self._ranks = buffer, rank, ranks

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Bytes of shared memory that a world of this size needs; pages nobody writes to cost nothing."""
        return ranks * cls.SLOTS * cls.SLOT_BYTES

    def write(self, entry: Entry) -> bytes:
        """Write an entry over the one SLOTS calls ago, or another group's. Returns its bytes, for `same`."""
        body = self._body(entry)
        # The checksum, not the order of writes, tells that an entry is whole, whatever the machine's memory order.
        data = self._HEAD.pack(0, entry.ready, entry.key, entry.number, len(body))[4:] + body
        at = self._at(self._rank, entry.key, entry.number)
        self._buffer[at : at + 4 + len(data)] = zlib.crc32(data).to_bytes(4, "little") + data
        return data[8:]

    def same(self, rank: int, entry: Entry, written: bytes) -> bool:
        """Whether the entry of `rank` for this call says to the last byte what `write` wrote, `ready` aside."""
        at = self._at(rank, entry.key, entry.number) + 12
        return self._buffer[at : at + len(written)] == written

    def read(self, rank: int, key: int, number: int) -> Entry | None:
        """The entry of `rank` for this call: None where it is not there yet, or no longer."""
        at = self._at(rank, key, number)
        checksum, ready, found, found_number, length = self._HEAD.unpack_from(self._buffer, at)
        if (found, found_number) != (key, number) or not length:
            return None
        data = bytes(self._buffer[at + 4 : at + self._HEAD.size + length])
        if zlib.crc32(data) != checksum:
            return None
        return Entry(key, number, ready, *marshal.loads(data[self._HEAD.size - 4 :]))

    def _at(self, rank: int, key: int, number: int) -> int:
        return (rank * self.SLOTS + (key + number) % self.SLOTS) * self.SLOT_BYTES

    def _body(self, entry: Entry) -> bytes:
        """The entry's bytes. What does not fit is left out, names first, then lengths, and so not compared."""
        room = self.SLOT_BYTES - self._HEAD.size
        body = marshal.dumps(entry[3:])
        if len(body) > room:
            body = marshal.dumps(entry._replace(named=(), others=(), site="")[3:])
        if len(body) > room:
            body = marshal.dumps((entry.what, entry.shown[:40], (), (), (), (), ""))
        return body


def key_of(text: str) -> int:
    """A 64-bit key for a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def short(text: str, room: int = 160) -> str:
    """The text, or where it is longer its beginning and a checksum: equal for equal texts only.

    >>> short("all_reduce float32 [3]"), short("a" * 200, room=20)
    ('all_reduce float32 [3]', 'aaaaaaa... #599af058')
    """
    return text if len(text) <= room else f"{text[: room - 13]}... #{zlib.crc32(text.encode()):08x}"


def describe(call: str, x: Tensor, ragged: bool, inside: str, where: str) -> tuple[str, str]:
    """A call as all ranks must make it, and as an error shows it. ragged: lengths along dim 0 may differ.

    inside: the module of this package that calls, if it is not the user. A bucket of gradients must not be added to a
    metric that happens to have its shape.

    >>> import torch
    >>> describe("all_gather", torch.zeros(3, 2), ragged=True, inside="", where="train.py:7")
    ('all_gather of float32 [*, 2]', 'all_gather of float32 [3, 2] at train.py:7')
    """
    kind, shape = wire.name(x.dtype), list(x.shape)
    common = f"[{', '.join(['*', *map(str, shape[1:])])}]" if ragged else shape
    by = f" in {inside}" if inside else ""
    return f"{call} of {kind} {common}{by}", f"{call} of {kind} {shape}{by} at {where}"


def conflict(mine: Entry, theirs: Entry, my_rank: int, their_rank: int) -> str:
    """Why two entries do not belong together; empty where they do."""
    if mine.what != theirs.what:
        return "the calls differ"
    for a, b, a_rank, b_rank in ((mine, theirs, my_rank, their_rank), (theirs, mine, their_rank, my_rank)):
        if a.send and b.recv and a.send[b_rank] != b.recv[a_rank]:
            return f"rank {a_rank} sends {a.send[b_rank]} to rank {b_rank}, which expects {b.recv[a_rank]}"
    names = crossed(mine, theirs)
    if names and mine.site != theirs.site and not set(mine.named) & set(theirs.named):
        return f"rank {my_rank} passes {names[0]} where rank {their_rank} passes {names[1]}, {_MEANT}"
    return ""


def crossed(mine: Entry, theirs: Entry) -> tuple[str, str] | None:
    """(my name, their name) for the tensors of two calls, if each rank has another tensor of the other's name.

    In `all_reduce(data if rank == 0 else zeros)` that is meant. It is a mistake where the ranks call from different
    places and no name is common to both tensors, or where the next call crosses the same two the other way round.
    """
    my_name = next((name for name in mine.named if name in theirs.others), None)
    their_name = next((name for name in theirs.named if name in mine.others), None)
    return None if my_name is None or their_name is None else (my_name, their_name)


def names_of(x: Tensor, frame: FrameType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of x in a frame, and the names of other tensors there. Keeps no tensor alive.

    >>> import torch
    >>> def caller(a, b):
    ...     return names_of(b, sys._getframe())
    >>> caller(torch.zeros(1), torch.zeros(1))
    (('b',), ('a',))
    """
    variables = frame.f_locals
    items = [item for name, value in variables.items() for item in _tensors(name, value)]
    named = tuple(sorted(name for name, value in items if value is x))
    others = tuple(sorted(name for name, value in items if value is not x))
    # Before Python 3.13 a function's frame caches this dict and with it every tensor in it. Where only the frame and we
    # hold it, it can go; where the caller asked for locals() it is theirs.
    if frame.f_code.co_flags & 1 and sys.version_info < (3, 13) and sys.getrefcount(variables) <= 3:
        variables.clear()
    return named[:8], others[:16]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A variable that is a tensor, or the tensors in one that is a small dict, each with its name.

    Not those of a list: `shards[rank]` is another place on every rank, and right.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict) and len(value) <= 32:
        yield from ((f"{name}[{key!r}]", item) for key, item in list(value.items()) if isinstance(item, Tensor))


class Ledger:
    """The calls of one Comm, numbered, on the board.

    ranks: the group's world ranks. key: the same text on all members and on no other group. check: compare entries;
    otherwise they are only written, for the times of a paced run.
    """

    def __init__(self, board: Board, ranks: Sequence[int], rank: int, name: str, key: str, check: bool) -> None:
        self.board, self.ranks, self.rank, self.name, self.check = board, ranks, rank, name, check
        self._text, self._key, self._number = key, key_of(key), 0
        self._last_named: Entry | None = None
        self._messages: dict[tuple[int, int, int], tuple[int, int]] = {}

    def collective(self, what: str, shown: str = "", ready: float = 0.0, **details: Any) -> "Posted":
        """Write this rank's next call of the group; raises CommMismatch where another's does not belong to it."""
        entry = Entry(self._key, self._number, ready, short(what), short(shown or what), **details)
        self._number += 1
        others = [r for r in range(len(self.ranks)) if r != self.rank]
        title = f"call {entry.number + 1} of {self.name!r}"
        posted = self._post(Posted(entry, others, title))
        self._last_named = entry if entry.named else self._last_named
        return posted

    def message(self, what: str, shown: str, src: int, dst: int, tag: int, ready: float) -> "Posted":
        """Write this rank's side of the next message from src to dst with this tag."""
        key, number = self._messages.get((src, dst, tag)) or (key_of(f"{self._text} {src}>{dst} {tag}"), 0)
        self._messages[src, dst, tag] = key, number + 1
        entry = Entry(key, number, ready, what, short(shown))
        title = f"message {number} from rank {src} to rank {dst} of {self.name!r} with tag {tag}"
        return self._post(Posted(entry, [dst if src == self.rank else src], title))

    def ready(self, posted: "Posted") -> float:
        """When the last of those who take part was ready."""
        found = (self.board.read(self.ranks[r], *posted.call) for r in posted.others)
        return max([posted.entry.ready, *(entry.ready for entry in found if entry is not None)])

    def _post(self, posted: "Posted") -> "Posted":
        entry = posted.entry
        written = self.board.write(entry)
        for r in posted.others if self.check else ():
            if not entry.send and self.board.same(self.ranks[r], entry, written):
                continue  # the usual case, and the quick one
            theirs = self.board.read(self.ranks[r], *posted.call)
            if theirs is None:
                continue  # not there yet: that rank will compare
            if why := conflict(entry, theirs, self.rank, r) or self._turned(entry, r, theirs):
                raise CommMismatch(self._explain(posted, why))
        return posted

    def _turned(self, mine: Entry, r: int, theirs: Entry) -> str:
        """Whether a tensor crosses another here that was on the other side the last time: loops in different orders."""
        names, last = crossed(mine, theirs), self._last_named
        their_last = None if names is None or last is None else self.board.read(self.ranks[r], last.key, last.number)
        if names is None or last is None or their_last is None:
            return ""
        before = crossed(last, their_last)
        if before is None or (before[1] != names[0] and before[0] != names[1]):
            return ""
        meeting = f"rank {self.rank} passes {names[0]} where rank {r} passes {names[1]}"
        return f"{meeting}, {_MEANT}; before, {before[0]} met {before[1]}"

    def _explain(self, posted: "Posted", why: str) -> str:
        rows = []
        for r in sorted([self.rank, *posted.others]):
            world_rank = self.ranks[r]
            entry = posted.entry if r == self.rank else self.board.read(world_rank, *posted.call)
            if entry is None:
                continue  # not there yet
            also = "" if r == world_rank else f" (world rank {world_rank})"
            names = f", called {', '.join(entry.named)}" if entry.named else ""
            rows.append(f"  rank {r}{also}: {entry.shown}{names}")
        return "\n".join([f"{posted.title}: {why}; nothing was sent", *rows])


class Posted(NamedTuple):
    """An entry on the board, the ranks whose entries belong to it, and what an error calls it."""

    entry: Entry
    others: list[int]
    title: str

    @property
    def call(self) -> tuple[int, int]:
        return self.entry.key, self.entry.number


class Caller(NamedTuple):
    """Who called into minidist.comm: the user's frame, else the module of this package; the user's line."""

    frame: FrameType | None
    inside: str
    where: str


def caller() -> Caller:
    """Who called into minidist.comm."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith("minidist.comm"):
        frame = frame.f_back
    inside = "" if frame is None or not _module(frame).startswith("minidist.") else _module(frame)
    direct = None if inside else frame
    while frame is not None and _module(frame).startswith(("minidist.", "torch.")):
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
    return Caller(direct, inside, where)


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
