"""The end of a world in words: which rank, which line, and what to do about it."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from minidist.launcher.frames import Library
from minidist.launcher.job import COULD_NOT_START, Ending, Failure
from minidist.launcher.slots import Snapshot, State

_RULE = "Every rank must make the same collective calls in the same order, and every send needs its receive."
_SIGNALS = MappingProxyType(
    {
        4: "illegal instruction (SIGILL)",
        6: "native code gave up (SIGABRT)",
        7: "bus error (SIGBUS)",
        8: "arithmetic error (SIGFPE)",
        11: "segmentation fault (SIGSEGV)",
        15: "something asked it to end (SIGTERM)",
    }
)


@dataclass(frozen=True)
class Look:
    """How code is shown: the text of a line, a file as the user knows it, and which files are not the user's."""

    line: Callable[[str, int], str]
    name: Callable[[str], str]
    library: Library = field(default_factory=Library.here)

    def place(self, file: str, line: int, func: str) -> str:
        """A place in the user's code, on a line of its own; nothing if it is not known."""
        if not line:
            return ""
        text = self.line(file, line).strip()
        inside = "" if func == "<module>" else f" in {func}"
        return f"\n      {self.name(file)}, line {line}{inside}" + (f":  {text}" if text else "")

    def innermost(self, stack: str) -> str:
        """The innermost place of the user's in what faulthandler wrote."""
        frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', stack)
        return next((self.place(f, int(n), func) for f, n, func in frames if not self.library.holds(f)), "")

    def renamed(self, traceback: str) -> str:
        """A traceback in which cells have their numbers."""
        name = lambda found: f"{known}, line" if (known := self.name(found[1])).startswith("Cell ") else found[0]
        return re.sub(r'File "(.*?)", line', name, traceback)


def explain(ending: Ending, timeout: float, look: Look) -> str:
    """What the user reads when a world did not end well."""
    if ending.verdict == "deadlock":
        return _deadlock(ending, look)
    if ending.verdict == "timeout":
        head = f"no result after {timeout:g} s, the timeout of this launch; all ranks were stopped."
        return "\n".join([head, *_rows(ending, look)])
    return _error(ending, look)


def interrupted(ending: Ending | None, look: Look) -> str:
    """What the user reads after stopping a launch."""
    return "\n".join(["the launch was stopped, and so were its ranks.", *(_rows(ending, look) if ending else [])])


def _deadlock(ending: Ending, look: Look) -> str:
    head = f"deadlock after {ending.seconds:.1f} s: every rank waits, and none can go on."
    return "\n".join([head, *_rows(ending, look), odd_one_out(ending.slots), _RULE])


def _rows(ending: Ending, look: Look) -> list[str]:
    """A line or two for each rank: what it is doing, and where."""
    rows = []
    for rank, slot in enumerate(ending.slots):
        where = ""
        if slot.state == State.WAITING:
            where = look.place(slot.file, slot.line, slot.func)
        elif slot.state == State.RUNNING:
            where = look.innermost(ending.stacks.get(rank, ""))
        rows.append(f"  rank {rank}: {_doing(slot)}{where}")
    return rows


def _doing(slot: Snapshot) -> str:
    return {
        State.STARTING: "is starting",
        State.RUNNING: "runs its own code",
        State.WAITING: f"waits in {slot.op}, its communication call number {slot.calls}",
        State.DONE: f"returned, after {_count(slot.calls, 'communication call')}",
        State.FAILED: "raised an exception",
    }[slot.state]


def odd_one_out(slots: Sequence[Snapshot]) -> str:
    """Which ranks are not where most are, and how they differ.

    >>> wait = lambda op, calls, line=7: Snapshot(State.WAITING, calls, op, "f.py", line)
    >>> odd_one_out([wait("all_reduce", 2), wait("all_reduce", 2), wait("broadcast", 2)])
    'Look at rank 2: it is in broadcast, the others are in all_reduce.'
    >>> odd_one_out([wait("all_reduce", 2), Snapshot(State.DONE, 1)])
    'Look at rank 1: it returned, and rank 0 still waits.'
    >>> odd_one_out([wait("recv", 1), wait("recv", 1)])
    'All of them wait in recv: each for a message that none has sent.'
    """
    done = [rank for rank, slot in enumerate(slots) if slot.state == State.DONE]
    waiting = {rank: slot for rank, slot in enumerate(slots) if slot.state == State.WAITING}
    if done and waiting:
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"Look at {ranks_in_words(done)}: {_it(done)} returned, and {ranks_in_words([*waiting])} still {verb}."
    views: list[tuple[Callable[[Snapshot], object], Callable[[Snapshot], str]]] = [
        (lambda slot: slot.op, lambda slot: f"in {slot.op}"),
        (lambda slot: slot.calls, lambda slot: f"at call number {slot.calls}"),
        (lambda slot: (slot.file, slot.line), lambda slot: f"on line {slot.line}"),
    ]
    for key, words in views:
        counts = Counter(key(slot) for slot in waiting.values()).most_common()
        if len(counts) == 1:
            continue
        if counts[0][1] == counts[1][1]:
            sides = [[rank for rank, slot in waiting.items() if key(slot) == value] for value, _ in counts]
            return (
                "The ranks disagree: "
                + ", ".join(f"{ranks_in_words(side)} {_is(side)} {words(waiting[side[0]])}" for side in sides)
                + "."
            )
        odd = [rank for rank, slot in waiting.items() if key(slot) != counts[0][0]]
        usual = next(slot for slot in waiting.values() if key(slot) == counts[0][0])
        where = " and ".join(sorted({words(waiting[rank]) for rank in odd}))
        return f"Look at {ranks_in_words(odd)}: {_it(odd)} {_is(odd)} {where}, the others are {words(usual)}."
    return f"All of them wait in {slots[0].op}: {_everyone(slots[0].op)}."


def _everyone(op: str) -> str:
    op = op.split()[0]
    if "recv" in op:
        return "each for a message that none has sent"
    if "send" in op:
        return "a send ends when its receive has begun. Post irecv first, or let every other rank receive first"
    return "the calls do not belong together. Do all ranks use the same group?"


def _error(ending: Ending, look: Look) -> str:
    parts = [_exit(rank, code, ending, look) for rank, code in ending.exits.items()]
    causes = {rank: failure for rank, failure in ending.failures.items() if not failure.peer}
    if not causes and not parts:
        causes = ending.failures
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in causes.items():
        groups.setdefault((failure.kind, failure.place), []).append(rank)
    for number, ranks in enumerate(groups.values()):
        parts.append(_raised(sorted(ranks), causes[ranks[0]], look, whole=number < 2))
    return "\n\n".join(parts)


def _raised(ranks: list[int], failure: Failure, look: Look, whole: bool) -> str:
    head = f"{ranks_in_words(ranks)} raised {failure.message}"
    return f"{head}\n\n{look.renamed(failure.text)}".rstrip() if whole else head


def _exit(rank: int, code: int, ending: Ending, look: Look) -> str:
    if code == -9:
        how = "was killed from outside (SIGKILL); the usual reason is that the machine ran out of memory"
    elif code < 0:
        how = f"crashed: {_SIGNALS.get(-code, f'signal {-code}')}"
    elif code == COULD_NOT_START:
        how = "could not be started"
    else:
        how = f"ended itself with exit code {code} before its function returned: os._exit, or a library that exits"
    errors = [line for line in ending.errors.get(rank, "").splitlines() if line.strip()][-6:]
    if any("Received data size doesn't match expected size" in line for line in errors):
        errors = ["A message came that was larger than the tensor for it: the ranks passed different shapes or dtypes."]
    return "\n".join([f"rank {rank} {how}{look.innermost(ending.stacks.get(rank, ''))}", *(f"  {e}" for e in errors)])


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> ranks_in_words([2]), ranks_in_words([0, 1]), ranks_in_words([0, 1, 2, 5])
    ('rank 2', 'ranks 0 and 1', 'ranks 0-2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [name for run in runs for name in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    return "ranks " + (" and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0])


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + "s" * (number != 1)


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "they"


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
