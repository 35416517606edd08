"""The end of a world in words: which rank, which line, and what to do about it."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from minidist.launcher.frames import Library
from minidist.launcher.job import Ending, Failure
from minidist.launcher.slots import Snapshot, State

LineOf = Callable[[str, int], str]  # the text of a line of a file
NameOf = Callable[[str], str]  # a file as the user knows it: a cell has a number, not a path


def explain(ending: Ending, timeout: float, line_of: LineOf, name_of: NameOf, library: Library) -> str:
    """What the user reads when a world did not end well."""
    place = lambda file, line, func: _place(file, line, func, line_of, name_of)
    if ending.verdict == "deadlock":
        return _deadlock(ending, place)
    if ending.verdict == "timeout":
        return _timeout(ending, timeout, place, library)
    return _error(ending, place, library)


def _deadlock(ending: Ending, place: Callable[[str, int, str], str]) -> str:
    lines = [f"deadlock after {ending.seconds:.1f} s: every rank waits, and none can go on."]
    lines += [f"  rank {rank}: {_doing(slot, place)}" for rank, slot in enumerate(ending.slots)]
    odd = odd_ones(ending.slots)
    if odd:
        verb = "is" if len(odd) == 1 else "are"
        lines.append(f"{_ranks(odd).capitalize()} {verb} not where the others are.")
    lines.append("Every rank must make the same collective calls in the same order, and every send needs its receive.")
    return "\n".join(lines)


def _doing(slot: Snapshot, place: Callable[[str, int, str], str]) -> str:
    calls = f"{slot.calls} communication call" + "s" * (slot.calls != 1)
    if slot.state == State.DONE:
        return f"returned after {calls}"
    if slot.state == State.WAITING:
        return f"waits in {slot.op}, its call number {slot.calls}{place(slot.file, slot.line, slot.func)}"
    if slot.state == State.FAILED:
        return "raised an exception"
    return "runs its own code" if slot.state == State.RUNNING else "is starting"


def odd_ones(slots: Sequence[Snapshot]) -> list[int]:
    """The ranks that are not where most are: returned, in another call, on another line, or after fewer calls.

    >>> wait = lambda op, calls, line=7: Snapshot(State.WAITING, calls, op, "f.py", line)
    >>> odd_ones([wait("all_reduce", 2), wait("all_reduce", 2), wait("broadcast", 2), Snapshot(State.DONE, 1)])
    [2, 3]
    >>> odd_ones([wait("recv", 1), wait("recv", 1)])
    []
    """
    views: list[Callable[[Snapshot], object]] = [
        lambda slot: slot.state,
        lambda slot: slot.op,
        lambda slot: (slot.file, slot.line),
        lambda slot: slot.calls,
    ]
    waiting = [slot for slot in slots if slot.state == State.WAITING]
    done = [rank for rank, slot in enumerate(slots) if slot.state == State.DONE]
    if not waiting:
        return []
    for view in views[1:]:
        (common, count), *others = Counter(map(view, waiting)).most_common()
        if others and count > others[0][1]:
            return [rank for rank, slot in enumerate(slots) if rank in done or view(slot) != common]
        if others:
            break
    return done


def _timeout(ending: Ending, timeout: float, place: Callable[[str, int, str], str], library: Library) -> str:
    lines = [f"no result after {timeout:g} s (timeout={timeout:g}); all ranks were stopped."]
    for rank, slot in enumerate(ending.slots):
        where = ""
        if slot.state == State.RUNNING:
            where = next((place(*frame) for frame in stack_frames(ending.stacks.get(rank, ""), library)), "")
        lines.append(f"  rank {rank}: {_doing(slot, place)}{where}")
    return "\n".join(lines)


def stack_frames(stack: str, library: Library) -> list[tuple[str, int, str]]:
    """The user's frames in what faulthandler wrote, innermost first: (file, line, function).

    >>> library = Library(("/x/torch/",), "/usr/lib/python3/", ())
    >>> stack_frames('File "/x/torch/a.py", line 3 in f\\n  File "mine.py", line 4 in g', library)
    [('mine.py', 4, 'g')]
    """
    frames = re.findall(r'File "(.*?)", line (\d+) in (.*)', stack)
    return [(file, int(line), func) for file, line, func in frames if not library.holds(file)]


def _error(ending: Ending, place: Callable[[str, int, str], str], library: Library) -> str:
    parts = [_exit(rank, code, ending, place, library) for rank, code in ending.exits.items()]
    causes = {rank: failure for rank, failure in ending.failures.items() if not failure.peer}
    if not causes and not parts:
        causes = ending.failures
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in causes.items():
        groups.setdefault((failure.kind, failure.place), []).append(rank)
    for number, ranks in enumerate(groups.values()):
        parts.append(_raised(ranks, causes[ranks[0]], whole=number < 2))
    return "\n\n".join(parts)


def _raised(ranks: list[int], failure: Failure, whole: bool) -> str:
    head = f"{_ranks(sorted(ranks))} raised {failure.message}"
    return f"{head}\n\n{failure.text.rstrip()}" if whole else head


def _exit(rank: int, code: int, ending: Ending, place: Callable[[str, int, str], str], library: Library) -> str:
    if code == -9:
        how = "was killed by the system (signal 9); the usual reason is that memory ran out"
    elif code < 0:
        how = f"crashed: {_SIGNALS.get(-code, f'signal {-code}')}"
    else:
        how = f"ended with exit code {code} before it returned (os._exit, or a library that exits)"
    where = next((place(*frame) for frame in stack_frames(ending.stacks.get(rank, ""), library)), "")
    errors = ending.errors.get(rank, "").strip().splitlines()[-6:]
    return "\n".join([f"rank {rank} {how}{where}", *(f"  {line}" for line in errors)])


_SIGNALS = {
    4: "illegal instruction (SIGILL)",
    6: "native code gave up (SIGABRT)",
    7: "bus error (SIGBUS)",
    8: "arithmetic error (SIGFPE)",
    11: "segmentation fault (SIGSEGV)",
    15: "it was asked to end (SIGTERM)",
}


def _place(file: str, line: int, func: str, line_of: LineOf, name_of: NameOf) -> str:
    if not line:
        return ""
    text = line_of(file, line).strip()
    inside = "" if func == "<module>" else f" in {func}"
    return f"\n      {name_of(file)}, line {line}{inside}" + (f":  {text}" if text else "")


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words.

    >>> _ranks([2]), _ranks([0, 1]), _ranks([0, 1, 2, 5])
    ('rank 2', 'ranks 0 and 1', 'ranks 0-2 and 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [name for run in runs for name in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(names) == 1 and len(ranks) == 1:
        return f"rank {names[0]}"
    return "ranks " + (" and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0])
