"""Judging an answer: the learner's function on real ranks, with inputs drawn anew, one criterion after the other."""

import contextlib
import importlib
import random
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import yaml

from grading.exercise import Case, Criterion, Exercise, Finding
from grading.pack import pack
from grading.ranks.host import NoRanks, RankHost
from grading.ranks.run import Job, Run
from grading.report import Report, Result
from grading.text import in_full, shell

ASSIGNMENTS = ("ps02", "ps03", "ps04", "ps05", "ps06")
HINTS = Path(__file__).parent / "hints"


class CheckFailed(AssertionError):
    """An answer is not right yet. The report above it says what is missing."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message, without the frames of this package."""
        return [f"CheckFailed: {self}"]


@cache
def exercises() -> Mapping[str, Exercise]:
    """All public exercises by id."""
    modules = [importlib.import_module(f"grading.checks.{name}") for name in ASSIGNMENTS]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Exercise)]
    return {exercise.id: exercise for exercise in found}


def find(exercise_id: str) -> Exercise:
    """The exercise with this id, also as "2.3" for "02.3". Raises ValueError that names those there are."""
    known, name = exercises(), in_full(exercise_id)
    if name not in known:
        raise ValueError(f"there is no exercise {exercise_id!r}: they are {', '.join(sorted(known))}")
    return known[name]


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(
    exercise: str | Exercise,
    functions: Mapping[str, bytes],
    host: RankHost,
    seed: int | None = None,
    waiting: Callable[[str], None] | None = None,
) -> Report:
    """Judge an answer. functions: the learner's, by name, pickled (`grading.pack`); they are opened in ranks only.

    seed: of the inputs; None: new ones each time. Earlier functions that this one uses are replaced by right ones, so
    that a mistake costs points once. Where ranks cannot be started every criterion is blocked. waiting: as in
    `RankHost.run`.
    """
    asked = find(exercise) if isinstance(exercise, str) else exercise
    if asked.function not in functions:
        why = f"there is no function {asked.function}: the cell that defines it has not run, or it has another name"
        return _all(asked, "failed", why, "not-written")
    seed = random.Random(seed).getrandbits(60) if seed is None else seed
    try:
        with _one_thread():
            trial = _Trial(asked, functions[asked.function], host, seed, waiting)
            results = trial.results()
    except NoRanks as error:
        return _all(asked, "blocked", f"could not be judged here: {error}", "")
    return Report(asked.id, asked.function, results, trial.printed)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch computes in one thread: on a busy machine several of them take a hundred times as long to agree on
    a few numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _all(exercise: Exercise, state: str, why: str, mistake: str) -> Report:
    """A report in which every criterion has one fate."""
    results = [
        Result(each.name, state, 0, each.points, f"{exercise.id}: {state}.\n  {why}" if i == 0 else "", mistake)
        for i, each in enumerate(exercise.criteria)
    ]
    return Report(exercise.id, exercise.function, tuple(results))


class _Trial:
    """One answer to one exercise, while it is being judged. Criteria that look at the same cases share their runs."""

    def __init__(
        self,
        exercise: Exercise,
        function: bytes,
        host: RankHost,
        seed: int,
        waiting: Callable[[str], None] | None = None,
    ) -> None:
        self.exercise, self.function, self.host, self.seed, self.waiting = exercise, function, host, seed, waiting
        self.cases = exercise.draw(random.Random(seed))
        self.runs: dict[int, Run] = {}
        self.body = _by_value(exercise.body)
        self.given = {name: _by_value(function) for name, function in exercise.given.items()}
        self.printed: tuple[str, ...] = ()

    def results(self) -> tuple[Result, ...]:
        """Every criterion in turn; without the basic one none of the others counts."""
        basic, *others = self.exercise.criteria
        found = [self.result(basic)]
        if found[0].state != "passed":
            waits = [Result(each.name, "failed", 0, each.points) for each in others]
            return (found[0], *waits)
        return (found[0], *(self.result(each) for each in others))

    def result(self, criterion: Criterion) -> Result:
        for case in self.cases[criterion.on]:
            run = self.run(case)
            finding = _look(criterion, case, run)
            if finding is not None:
                self.printed = self.printed or tuple(run.printed)
                text = f"{_head(self.exercise, criterion, finding)}\n{finding.text()}"
                return Result(criterion.name, "failed", 0, criterion.points, text, finding.mistake)
        return Result(criterion.name, "passed", criterion.points, criterion.points)

    def run(self, case: Case) -> Run:
        """How this case went. The others that are still to run come along: starting ranks is what takes time."""
        if id(case) not in self.runs:
            every = [each for on in dict.fromkeys(c.on for c in self.exercise.criteria) for each in self.cases[on]]
            waiting = [case, *(each for each in every if each is not case and id(each) not in self.runs)]
            run = self.host.run(self._job(waiting), self.waiting)
            start = 0
            for each in waiting:
                stop = start + len(each.calls)
                if run.ok or start <= run.call:
                    self.runs[id(each)] = run.part(start, stop)
                start = stop
        return self.runs[id(case)]

    def _job(self, cases: Sequence[Case]) -> Job:
        return Job(
            function=self.function,
            calls=[call for case in cases for call in case.calls],
            allowed=self.exercise.allowed,
            body=self.body,
            given=self.given,
            given_calls={name: frozenset(given.__code__.co_names) for name, given in self.exercise.given.items()},
            answers=[answers for case in cases for answers in case.answers or [({},) * case.ranks] * len(case.calls)],
            limits=self.exercise.limits,
            seed=self.seed % 2**31,
        )


def _head(exercise: Exercise, criterion: Criterion, finding: Finding) -> str:
    where = [finding.label] if finding.label else []
    if finding.rank is not None:
        where.append(f"rank {finding.rank}")
    return f"{exercise.id} {criterion.name}: failed.  {', '.join(where)}".rstrip()


def _look(criterion: Criterion, case: Case, run: Run) -> Finding | None:
    """What a criterion finds. Whatever ranks returned, that is a verdict."""
    try:
        return criterion.judge(case, run) if run.ok else criterion.explain(case, run) or _as_finding(case, run)
    except Exception as error:
        why = f"What your ranks returned is not of the form that is asked for ({type(error).__name__}: {error})."
        return Finding(why, "no-result", case.labels[min(run.call, len(case.labels) - 1)], run.rank)


def _as_finding(case: Case, run: Run) -> Finding:
    """A run that did not end as it should."""
    return Finding(run.why, run.mistake, case.labels[run.call], run.rank)


def _by_value(function: Callable[..., Any]) -> bytes:
    """Our own function for ranks, which may not be able to import its module, nor any other of checks."""
    modules = {sys.modules[function.__module__], sys.modules["grading.checks"]}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


# ---- in a notebook ---------------------------------------------------------------------------------------------------


@cache
def _host() -> RankHost:
    """The warm process of this kernel. It ends when the kernel does."""
    return RankHost()


def check(exercise: str) -> None:
    """Judge the function that this notebook defines for an exercise, print the report, and raise CheckFailed if it has
    not earned all points."""
    asked = find(exercise)
    function = _namespace().get(asked.function)
    if not callable(function):
        raise CheckFailed(f"{asked.id}: run the cell that defines {asked.function} first")
    with _Waiting(asked) as waiting:
        try:
            report = judge(asked, {asked.function: pack(function)}, _host(), waiting=waiting.tell)
        except (TypeError, ValueError) as error:
            raise CheckFailed(f"{asked.id}: {error}") from None
    print(report.text())
    _record("checked", exercise=asked.id, passed=report.passed, points=report.points, lost=report.lost())
    if not report.passed:
        raise CheckFailed(f"{asked.id}: {report.points} of {report.most} points; the report is above")


class _Waiting:
    """A line in the notebook for as long as a check waits for ranks."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise, self.line = exercise, None

    def tell(self, waiting: str) -> None:
        """Show what is waited for, in place of what was shown before."""
        if getattr(shell(), "kernel", None) is None:
            return
        from IPython.display import display

        shown = {"text/plain": f"{self.exercise.id}: {waiting}"}
        if self.line is None:
            self.line = display(shown, raw=True, display_id=True)
        else:
            self.line.update(shown, raw=True)

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        if self.line is not None:
            self.line.update({"text/plain": ""}, raw=True)


def hint(exercise: str) -> None:
    """Print the next hint for an exercise: a question, a picture, the invariant, the first line."""
    asked = find(exercise)
    rungs = _hints(asked.id)
    step = _climbed(asked.id) % len(rungs)
    name, text = list(rungs.items())[step]
    text = text.rstrip() if "\n" in text.rstrip() else textwrap.fill(text, 90)
    print(f"{asked.id}, hint {step + 1} of {len(rungs)}: {name}\n\n{text}")
    _record("hinted", exercise=asked.id, step=step + 1)


def _climbed(exercise: str) -> int:
    """The rung that this learner read last, 0 for none; the log knows it longer than the kernel runs."""
    from grading.log import log

    read = [entry for entry in log().entries() if (entry["kind"], entry.get("exercise")) == ("hinted", exercise)]
    step = read[-1].get("step") if read else 0
    return step if isinstance(step, int) else 0


def _hints(exercise: str) -> dict[str, str]:
    """The ladder of an exercise. Raises ValueError where there is none."""
    base = exercise.split("-")[0]
    path = HINTS / f"{base[:2]}.yaml"
    rungs = yaml.safe_load(path.read_text(encoding="utf-8")).get(base) if path.exists() else None
    if not rungs:
        raise ValueError(f"exercise {exercise} has no hints")
    return rungs


def _namespace() -> dict[str, Any]:
    """Where the notebook's functions are."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell.user_ns if shell is not None else vars(sys.modules["__main__"])


def _record(kind: str, **fields: Any) -> None:
    """Log it, where there is a log; a check or a hint never fails because of that."""
    with contextlib.suppress(Exception):
        from grading.log import record

        record(kind, **fields)
