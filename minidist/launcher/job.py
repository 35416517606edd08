"""What travels beside the function: how a world is to be run, and how it ended."""

import json
import numbers
from dataclasses import asdict, dataclass, field
from typing import Any

from minidist.launcher.slots import Snapshot, State

COULD_NOT_START = 97  # the exit code of a rank that failed before its function was called
BACKENDS = ("gloo", "nccl")
_MOST_RANKS = 256
_LONGEST = 1e7  # seconds
_ENDING = b"\0minidist ending\0"  # no JSON and no text holds a zero byte


@dataclass(frozen=True)
class Job:
    """How to run one world. The function, its arguments and the pace travel as a payload beside it."""

    ranks: int
    timeout: float  # seconds from the start of the world
    backend: str = "gloo"
    check: bool = True
    paced: bool = False
    seed: int = 0
    threads: int = 1  # per rank
    cwd: str = "."
    path: list[str] = field(default_factory=list)  # sys.path
    env: dict[str, str] = field(default_factory=dict)  # os.environ
    sources: dict[str, str] = field(default_factory=dict)  # text of files that are not on disk, such as notebook cells
    stall: float = 1.0  # seconds without any movement that mean deadlock
    output_limit: int = 100_000  # bytes of output shown per rank

    def __post_init__(self) -> None:
        if not _is_whole(self.ranks) or not 1 <= self.ranks <= _MOST_RANKS:
            raise _wrong("ranks", self.ranks, f"a whole number from 1 to {_MOST_RANKS}", _is_whole(self.ranks))
        if not _is_number(self.timeout) or not 0 < self.timeout < _LONGEST:
            raise _wrong("timeout", self.timeout, "a number of seconds, from above 0 to 10^7", _is_number(self.timeout))
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, or None for gloo, and is {self.backend!r}")
        if not isinstance(self.check, bool):
            raise _wrong("check", self.check, "True or False", False)
        if not _is_whole(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise _wrong("seed", self.seed, "a whole number of at most 64 bits", _is_whole(self.seed))

    def encode(self) -> bytes:
        return json.dumps(asdict(self), default=lambda number: number.item()).encode()  # a numpy number

    @classmethod
    def decode(cls, body: bytes) -> "Job":
        return cls(**json.loads(body))


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's function.

    ``kind`` and ``message`` as Python prints them, ``place`` the innermost user line, ``text`` the whole traceback with
    library frames left out, ``peer`` whether it only says that another rank went away.
    """

    kind: str
    message: str
    place: str
    text: str
    peer: bool = False


@dataclass(frozen=True)
class Ending:
    """How a world ended, with what is known about each rank."""

    verdict: str  # ok, deadlock, error, timeout, interrupted
    seconds: float
    slots: list[Snapshot]
    failures: dict[int, Failure]  # in the order in which they came
    exits: dict[int, int]  # exit code of ranks that ended before they returned; negative: a signal
    stacks: dict[int, str]  # what faulthandler wrote for a rank
    errors: dict[int, str]  # the last lines of a rank's stderr

    def encode(self) -> bytes:
        return _ENDING + json.dumps(asdict(self)).encode()

    @classmethod
    def find(cls, data: bytes) -> "Ending | None":
        """The ending at the end of these bytes, if it is there whole."""
        try:
            return cls.decode(data[data.rindex(_ENDING) :])
        except ValueError:
            return None

    @classmethod
    def decode(cls, body: bytes) -> "Ending":
        raw: dict[str, Any] = json.loads(body.removeprefix(_ENDING))
        by_rank = lambda name: {int(rank): value for rank, value in raw[name].items()}
        slots = [Snapshot(**{**slot, "state": State(slot["state"])}) for slot in raw["slots"]]
        failures = {rank: Failure(**failure) for rank, failure in by_rank("failures").items()}
        return cls(
            raw["verdict"], raw["seconds"], slots, failures, by_rank("exits"), by_rank("stacks"), by_rank("errors")
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _wrong(name: str, value: Any, wanted: str, right_type: bool) -> Exception:
    return (ValueError if right_type else TypeError)(f"{name} must be {wanted}, and is {value!r}")
