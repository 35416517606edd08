"""What travels beside the function: how a world is to be run, and how it ended."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from minidist.launcher.slots import Snapshot, State


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

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

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

    verdict: str  # ok, deadlock, error, timeout
    seconds: float
    slots: list[Snapshot]
    failures: dict[int, Failure]  # in the order in which they came
    exits: dict[int, int]  # exit code of ranks that ended before they returned; negative: a signal
    stacks: dict[int, str]  # what faulthandler wrote for a rank
    errors: dict[int, str]  # the last lines of a rank's stderr

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, body: bytes) -> "Ending":
        raw: dict[str, Any] = json.loads(body)
        by_rank = lambda name: {int(rank): value for rank, value in raw[name].items()}
        slots = [Snapshot(**{**slot, "state": State(slot["state"])}) for slot in raw["slots"]]
        failures = {rank: Failure(**failure) for rank, failure in by_rank("failures").items()}
        return cls(
            raw["verdict"], raw["seconds"], slots, failures, by_rank("exits"), by_rank("stacks"), by_rank("errors")
        )
