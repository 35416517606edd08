"""What is asked of ranks, and what the grader saw them do: plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

VERDICTS = ("ok", "error", "shortcut", "deadlock", "timeout", "lost")


@dataclass(frozen=True)
class Limits:
    """What one rank may use. Beyond it the run ends and says so."""

    seconds: float = 12.0  # until all ranks must be done
    cpu_seconds: int = 5  # of the processor: a loop that does not end is told by this, however busy the machine
    memory_bytes: int = 1 << 30  # more than it starts with
    file_bytes: int = 0  # written to files: what ranks know of one another comes in messages
    printed_bytes: int = 4_000  # kept of what it prints, the rest is counted

    def __post_init__(self) -> None:
        if min(self.seconds, self.cpu_seconds, self.memory_bytes) <= 0 or min(self.file_bytes, self.printed_bytes) < 0:
            raise ValueError(f"limits must be above 0: {self}")


@dataclass(frozen=True)
class Job:
    """One world of ranks, and what each of them calls.

    function: a learner's function, pickled where that learner works; only ranks open it. calls: for each call and
    rank the named inputs; a call may leave the last ranks out. body: pickled `body(function, comm, ask, **inputs)`,
    which makes the call and returns plain data; empty: `function(comm, **inputs)`. given: pickled functions by name,
    which take the place of the learner's earlier ones; given_calls: the calls of comm that each of them may make.
    allowed: names of Comm's calls the learner may make (isend covers send). answers: what `ask(key)` gives, for each
    call, rank and key; asking is noted like a message.
    """

    function: bytes
    calls: Sequence[Sequence[Mapping[str, Any]]]
    allowed: frozenset[str]
    body: bytes = b""
    given: Mapping[str, bytes] = field(default_factory=dict)
    given_calls: Mapping[str, frozenset[str]] = field(default_factory=dict)
    answers: Sequence[Sequence[Mapping[str, Any]]] = ()
    limits: Limits = field(default_factory=Limits)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.calls or not all(self.calls):
            raise ValueError("every call needs inputs for at least one rank")
        if self.answers and [len(call) for call in self.answers] != [len(call) for call in self.calls]:
            raise ValueError("answers must be as many as calls and ranks")

    @property
    def ranks(self) -> int:
        """Those of the largest call."""
        return max(map(len, self.calls))


@dataclass(slots=True)
class Message:
    """One message between two ranks. sent, posted, taken: when, counted in events, it was sent, the receive was posted,
    and the receiver went on with it; None: not yet. changed: the sender wrote into it before it was gone."""

    call: int
    src: int
    dst: int
    tag: int
    elements: int
    dtype: str
    sent: int | None = None
    posted: int | None = None
    taken: int | None = None
    changed: bool = False
    given: str = ""


@dataclass(slots=True)
class Collective:
    """One rank's part in a collective. begun, waited: when, counted in events; None: not yet. given: the name of the
    earlier function it was made for, if that was replaced by a right one."""

    call: int
    rank: int
    name: str
    elements: int
    nbytes: int
    dtype: str
    begun: int
    waited: int | None = None
    given: str = ""


@dataclass(slots=True)
class Asked:
    """One rank asked the grader for the answer to `key`."""

    call: int
    rank: int
    key: str
    when: int


@dataclass(frozen=True)
class Run:
    """How a job ended.

    results: what each rank returned, for every call that all ranks ended. call: the index of the call in which it went
    wrong. rank: who is to be named, where one is. why: in words, for whoever wrote the function. mistake: its id in the
    catalogue, where it is a known one.
    """

    verdict: str
    results: Sequence[Sequence[Any]] = ()
    messages: Sequence[Message] = ()
    collectives: Sequence[Collective] = ()
    asked: Sequence[Asked] = ()
    printed: Sequence[str] = ()
    call: int = 0
    rank: int | None = None
    why: str = ""
    mistake: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is none of {', '.join(VERDICTS)}")

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"

    def part(self, start: int, stop: int) -> "Run":
        """These of its calls, as if nothing else had been run. Later ones than that which went wrong were not."""

        def mine(notes: Sequence[Any]) -> list[Any]:
            return [replace(note, call=note.call - start) for note in notes if start <= note.call < stop]

        over = self.ok or self.call >= stop
        fate = (
            {"verdict": "ok", "call": 0, "rank": None, "why": "", "mistake": ""}
            if over
            else {"call": self.call - start}
        )
        notes = {name: mine(getattr(self, name)) for name in ("messages", "collectives", "asked")}
        return replace(self, results=self.results[start:stop], **notes, **fate)

    def messages_of(self, call: int) -> list[Message]:
        """What was sent in one call; what was only waited for does not count."""
        return [m for m in self.messages if m.call == call and m.sent is not None]

    def collectives_of(self, call: int, rank: int) -> list[Collective]:
        """The collectives of one rank in one call, in its order."""
        return [c for c in self.collectives if (c.call, c.rank) == (call, rank)]
