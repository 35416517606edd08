"""Tensors on their way between stages: sends never block, receives are posted ahead, and no shape is agreed before.

What a stage passes on may be a tensor or a tuple, of any types and shapes. The first time that a batch of some shape
comes by, each message goes behind a letter that describes it; from then on its receivers know what to expect, and post
the receive before they need it. Along one pair of ranks messages are received in the order in which they are sent.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.comm.comm import Comm
from minidist.comm.handle import Handle
from minidist.comm.wire import DTYPES
from minidist.schedule.program import Name, Program
from minidist.schedule.simulate import messages

MOST_TENSORS, MOST_DIMS = 16, 8
_LINE = 3 + MOST_DIMS  # of a letter: type, whether it has a gradient, number of dims, dims
AHEAD = 2  # receives that are posted before they are needed, for each rank that sends


class Kind(NamedTuple):
    """What a tensor of a message is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def kinds(tensors: Sequence[Tensor]) -> tuple[Kind, ...]:
    """What these tensors are like."""
    return tuple(Kind(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)


def write_letter(tensors: Sequence[Kind]) -> Tensor:
    """A letter that describes tensors: [1 + MOST_TENSORS (3 + MOST_DIMS)], int64.

    Raises: ValueError for more tensors or dims than there is room for.

    >>> read_letter(write_letter([Kind(torch.float32, (2, 3), True)]))
    (Kind(dtype=torch.float32, shape=(2, 3), trained=True),)
    """
    if unknown := [kind.dtype for kind in tensors if kind.dtype not in DTYPES]:
        raise ValueError(f"a stage cannot pass on {unknown[0]}: take one of {', '.join(map(str, DTYPES))}")
    if len(tensors) > MOST_TENSORS or any(len(kind.shape) > MOST_DIMS for kind in tensors):
        raise ValueError(f"a stage passes on at most {MOST_TENSORS} tensors of at most {MOST_DIMS} dims")
    letter = torch.zeros(1 + MOST_TENSORS * _LINE, dtype=torch.int64)
    letter[0] = len(tensors)
    for kind, line in zip(tensors, letter[1:].split(_LINE), strict=False):
        words = [DTYPES.index(kind.dtype), int(kind.trained), len(kind.shape), *kind.shape]
        line[: len(words)] = torch.tensor(words)
    return letter


def read_letter(letter: Tensor) -> tuple[Kind, ...]:
    """What `write_letter` wrote."""
    count, *words = letter.tolist()
    lines = [words[i * _LINE : (i + 1) * _LINE] for i in range(count)]
    return tuple(Kind(DTYPES[dtype], tuple(dims[:n]), bool(trained)) for dtype, trained, n, *dims in lines)


class Routes:
    """Where a rank's messages of a program go and come from: worked out once, for all its steps."""

    def __init__(self, program: Program, rank: int) -> None:
        mine = [message for message in messages(program) if rank in (message.src, message.dst)]
        self.to = {message.tensor: message.dst for message in mine if message.src == rank}
        self.source = {message.tensor: message.src for message in mine if message.dst == rank}
        self.microbatches = program.microbatches


class Mail:
    """One step's messages of one rank. known: what each message is like, where that is known already."""

    def __init__(self, routes: Routes, comm: Comm, known: dict[Name, tuple[Kind, ...]], letters: bool) -> None:
        self.comm, self.known, self.letters = comm, known, letters
        self.to, self.source, self.microbatches = routes.to, routes.source, routes.microbatches
        self.coming: dict[int, deque[Name]] = {}  # by rank, not posted yet
        for name, src in self.source.items():
            self.coming.setdefault(src, deque()).append(name)
        self.posted: dict[Name, list[Handle]] = {}
        self.sent: dict[Name, list[Handle]] = {}
        for src in self.coming:
            self._post_ahead(src)

    def _tag(self, name: Name, part: int) -> int:
        number = (name.stage * self.microbatches + name.microbatch) * 2 + (name.role == "g")
        return number * (MOST_TENSORS + 1) + part

    def send(self, name: Name, tensors: Sequence[Tensor]) -> None:
        """Begin to send what is called so, if another rank needs it."""
        if name not in self.to:
            return
        dst, parcels = self.to[name], [tensor.detach() for tensor in tensors]
        if self.letters and name.role == "x":
            found = kinds(tensors)
            self.known[name] = found
            self.known[Name("g", name.stage, name.microbatch)] = tuple(kind for kind in found if kind.trained)
            letter = write_letter(found).to(self.comm.device)
            self.sent[name] = [self.comm.isend(letter, dst, self._tag(name, MOST_TENSORS))]
        elif name.role == "x" and kinds(tensors) != self.known[name]:
            raise ValueError(
                f"stage {name.stage - 1} passes on {len(tensors)} tensors {[list(x.shape) for x in tensors]}, and with "
                "an earlier batch like this one others: what it passes on may depend on the shape of the batch alone"
            )
        self.sent.setdefault(name, []).extend(
            self.comm.isend(parcel, dst, self._tag(name, part)) for part, parcel in enumerate(parcels)
        )

    def receive(self, name: Name) -> list[Tensor]:
        """What is called so, from the rank that makes it; waits for it."""
        src = self.source[name]
        while name not in self.posted:
            self._post_next(src)
        tensors = [handle.wait() for handle in self.posted.pop(name)]
        if name.role == "g":  # whoever sends a gradient back has what it was computed from
            self._settle(Name("x", name.stage, name.microbatch))
        else:
            for tensor, kind in zip(tensors, self.known[name], strict=True):
                tensor.requires_grad_(kind.trained)
        self._post_ahead(src)
        return tensors

    def _post_ahead(self, src: int) -> None:
        while not self.letters and self.coming[src] and sum(self.source[n] == src for n in self.posted) < AHEAD:
            self._post_next(src)

    def _post_next(self, src: int) -> None:
        name = self.coming[src].popleft()
        if self.letters and name.role == "x":
            letter = torch.empty(1 + MOST_TENSORS * _LINE, dtype=torch.int64, device=self.comm.device)
            self.known[name] = read_letter(self.comm.irecv(letter, src, self._tag(name, MOST_TENSORS)).wait())
        parts = self.known[name]
        self.posted[name] = [
            self.comm.irecv(kind.empty(self.comm.device), src, self._tag(name, part)) for part, kind in enumerate(parts)
        ]

    def _settle(self, name: Name) -> None:
        for handle in self.sent.pop(name, []):
            handle.wait()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for name in list(self.sent):
            self._settle(name)
