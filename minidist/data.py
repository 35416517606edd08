"""Real text without a download, as batches that are a pure function of (seed, step).

All samples, shuffled anew for every epoch, follow one another in one endless sequence, and step k of a batch of size b
takes numbers k*b to (k+1)*b of it. So a restarted run continues where it was, every sample comes up once per epoch, and
the global batch of a step is the same however many ranks share it. Rank r of n gets its numbers r, r+n, r+2n, ...
"""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor


def epoch_order(samples: int, seed: int | None, epoch: int) -> Tensor:
    """The order in which epoch visits samples 0 .. samples-1: [samples]. seed None: as they are, in every epoch.

    >>> epoch_order(4, None, epoch=0).tolist()
    [0, 1, 2, 3]
    """
    if seed is None:
        return torch.arange(samples, device="cpu")
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {epoch}".encode()))
    return torch.randperm(samples, generator=generator, device="cpu")


def sample_indices(
    step: int, batch: int, samples: int, seed: int | None = 0, rank: int = 0, ranks: int = 1
) -> list[int]:
    """Which samples `rank` of `ranks` sees at `step`: every ranks-th of the global batch, from its rank-th on.

    Ranks that work on the same samples (those that split the model, not the data) pass the same `rank`: their
    coordinate on the data axis. Where `ranks` doesn't divide `batch`, the first ranks get one more; where there are
    more ranks than samples in a batch, the last get none. A batch that reaches the end of an epoch goes on in the next.

    >>> [sample_indices(0, 8, 8, None, rank=r, ranks=2) for r in range(2)]
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    >>> [sample_indices(0, 5, 8, None, rank=r, ranks=2) for r in range(2)]
    [[0, 2, 4], [1, 3]]
    >>> sample_indices(1, 5, 8, None)  # epoch 0 ends after sample 7
    [5, 6, 7, 0, 1]
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks}: ranks count from 0 to {ranks - 1}")
    if step < 0 or batch < 1 or samples < 1:
        raise ValueError(f"step={step} must be at least 0, and batch={batch} and samples={samples} at least 1")
    numbers = range(step * batch, (step + 1) * batch)[rank::ranks]
    orders = {epoch: epoch_order(samples, seed, epoch) for epoch in {number // samples for number in numbers}}
    return [int(orders[number // samples][number % samples]) for number in numbers]


class TextBatches:
    """Batches of byte-level text, see `stdlib_tokens`.

    text: [N] uint8. seq: S, tokens per sample. batch_size: samples per step over all ranks. samples: how many there
    are; sample i is bytes i*S to (i+1)*S, and its targets are the same one byte later.
    """

    def __init__(self, text: Tensor, seed: int | None = 0, seq: int = 128, batch: int = 16) -> None:
        if seq < 1 or batch < 1:
            raise ValueError(f"seq={seq} and batch={batch} must be at least 1")
        if len(text) <= seq:
            raise ValueError(
                f"a text of {len(text)} bytes has no sample of {seq} tokens and a target for each: use a "
                f"longer text, or seq={max(len(text) - 1, 1)} or less"
            )
        self.text, self.seed, self.seq, self.batch_size = text, seed, seq, batch
        self._windows = text.unfold(0, seq + 1, seq)  # [samples, S+1], a view

    def __repr__(self) -> str:
        return (
            f"TextBatches({len(self.text):,} bytes, {self.samples:,} samples of {self.seq}, {self.batch_size} a step)"
        )

    @property
    def samples(self) -> int:
        return len(self._windows)

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Tensor, Tensor]:
        """Tokens and targets of this rank's part of the global batch, both [B/ranks, S], int64, 0 to 255.

        `sample_indices` says which samples these are. Raises ValueError for a rank that isn't one of ranks.
        """
        mine = sample_indices(step, self.batch_size, self.samples, self.seed, rank, ranks)
        windows = self._windows[mine].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def stdlib_source(limit: int = 4_000_000) -> bytes:
    """The Python standard library's top-level modules, one after the other by name; no more than `limit` bytes.

    It changes with the version of Python, so no expected number may depend on it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    source = bytearray()
    for path in sorted(root.glob("*.py")):
        source += path.read_bytes()
        if len(source) >= limit:
            break
    if not source:
        raise FileNotFoundError(f"{root} has no .py files: this Python comes without its source, so pass path= a text")
    return bytes(source[:limit])


def stdlib_tokens(seed: int | None = 0, path: str | Path | None = None, seq: int = 128, batch: int = 16) -> TextBatches:
    """Batches of the Python standard library's source code, or of the file at `path`; a token is a byte.

    seed: of the order; None leaves samples in theirs. seq: tokens per sample. batch: samples per step, over all ranks.
    Raises FileNotFoundError for a path that isn't a file, ValueError for a text too short for one sample.
    """
    if path is not None and not Path(path).is_file():
        raise FileNotFoundError(f"path={str(path)!r} is not a file (the current folder is {Path.cwd()})")
    text = stdlib_source() if path is None else Path(path).read_bytes()
    return TextBatches(
        torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0), seed, seq, batch
    )
