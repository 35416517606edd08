"""The graded test at the end of a module: answered as a whole, submitted by running a cell, then explained.

`quiz("03")` shows the questions, and keeps every answer as it is given. `submit("03")` submits them and rewrites itself
to `submit("03", "...")`, so that the answers are the notebook's source and survive any upload; what the text holds is
described in grading/answers.py, and read by `decode`. A filled cell that runs again shows the results again.
`quiz("03", again=True)` starts a retake with new draws, which the same cell then submits too. A question is right or
wrong as a whole; the best attempt counts, and the first stays readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grading import shelf, text
from grading.answers import AnswersError as AnswersError
from grading.answers import decode as decode
from grading.card import guarded
from grading.draw import AnswerError
from grading.form import form
from grading.handin import saved
from grading.log import Entry, log, record
from grading.style import Pane, frame, marked, show

if TYPE_CHECKING:
    from grading.shelf import Asked, Questions


# ---- the questions ---------------------------------------------------------------------------------------------------


def quiz(module: str, answers: Mapping[int, Any] | None = None, again: bool = False) -> None:
    """Show the test of a module; again=True starts a retake with new draws once an attempt was submitted.

    answers: in the text form, question number -> answer as typed, such as {1: "b", 2: 1.5e6}.
    """
    try:
        test = open_test(text.in_full(module), again)
    except shelf.ShelfError as error:
        print(error)
        return
    if test.submitted and not test.open:
        print(
            f'Submitted: {attempts(test.submitted)}. For a retake with new numbers: quiz("{test.module}", again=True).'
        )
        return
    if answers is not None:
        _answer_in_text(test, answers)
    elif text.widgets_run():
        show(_widget(test), _as_text(test))
    else:
        print(_as_text(test))


@dataclass(frozen=True)
class Test:
    """A module's test as it stands: the attempts submitted, and the one being answered."""

    source: Questions
    questions: tuple[Asked, ...]  # drawn for the attempt being answered, or to come
    submitted: int
    open: bool

    @property
    def module(self) -> str:
        return self.source.module

    def drafts(self) -> dict[str, Any]:
        """Question -> the answer given last in this attempt, None if it is open."""
        given: dict[str, Any] = {asked.drawn.id: None for asked in self.questions}
        for entry in log().entries():
            if _is_of(entry, "drafted", self.source, self.submitted):
                given |= self._fitting(entry)
        return given

    def _fitting(self, entry: Entry) -> dict[str, Any]:
        """What a kept answer says now: nothing if it was to another draw or no longer fits."""
        answer = entry.get("answer")
        return {
            asked.drawn.id: answer
            for asked in self.questions
            if (asked.drawn.id, asked.drawn.variant) == (entry.get("question"), entry.get("variant"))
            and (answer is None or asked.fits(answer))
        }

    def draft(self, asked: Asked, answer: Any) -> str:
        """Keep an answer; returns what stood in the way of saving it."""
        drawn = asked.drawn
        where = {"module": self.module, "edition": self.source.edition, "attempt": self.submitted}
        return record("drafted", **where, question=drawn.id, variant=drawn.variant, answer=answer)


def open_test(module: str, again: bool = False) -> Test:
    source = shelf.module(module)
    submitted = attempts_made(source)
    started = any(_is_of(entry, "retake", source, submitted) for entry in log().entries())
    if again and submitted and not started:
        record("retake", module=module, edition=source.edition, attempt=submitted)
        started = True
    ids = source.ids("test")
    if not ids:
        raise shelf.ShelfError(f"Module {module} has no test.")
    questions = tuple(shelf.asked(source, name, submitted) for name in ids)
    return Test(source, questions, submitted, open=started or not submitted)


def attempts_made(source: Questions) -> int:
    """How many attempts at a test this learner has submitted."""
    before = saved(source.module, source.edition)
    return len(before.attempts) if before else 0


def _is_of(entry: Entry, kind: str, source: Questions, attempt: int) -> bool:
    """Whether an entry of the log belongs to this attempt; older ones do not say to which edition."""
    same = (entry["kind"], entry.get("module"), entry.get("attempt")) == (kind, source.module, attempt)
    return same and entry.get("edition", source.edition) == source.edition


def _widget(test: Test) -> Any:
    drafts, count, blocks = test.drafts(), Pane(), []

    def tally() -> None:
        given = sum(answer is not None for answer in test.drafts().values())
        count.write(f'{given} of {len(test.questions)} answered. To submit, run the cell `submit("{test.module}")`.')

    for place, asked in enumerate(test.questions, 1):
        status, controls = Pane(), form(asked.drawn, drafts[asked.drawn.id])

        def keep(_change: Any, asked: Any = asked, controls: Any = controls, status: Pane = status) -> None:
            if attempts_made(test.source) > test.submitted:
                status.write("This attempt is submitted; what you change here no longer counts.", mark="quiet")
                return
            try:
                answer = controls.read()
            except AnswerError:
                test.draft(asked, None)  # what was there before is no longer the answer
                tally()
                raise
            status.write(test.draft(asked, answer), mark="quiet")
            tally()

        controls.on_change(guarded(status, keep))
        stem = marked(Pane(f"**{place}.** {shelf.linked(asked.drawn)}").widget, "stem", "next")
        blocks += [stem, controls.box, status.widget]
    tally()
    return frame(Pane(_head(test)).widget, *blocks, count.widget)


def _head(test: Test) -> str:
    retake = f" Attempt {test.submitted + 1}, with new numbers." if test.submitted else ""
    return (
        f"**Test {test.module}: {test.source.title}.**{retake} {len(test.questions)} questions, one point each, all or "
        "nothing. Your answers are kept as you give them."
    )


def _as_text(test: Test) -> str:
    questions = [text.question(asked.drawn, place) for place, asked in enumerate(test.questions, 1)]
    how = f'Answer with quiz("{test.module}", {{1: "b", 2: 1.5e6}}), as many at a time as you like; then submit.'
    return "\n\n".join([text.plain(_head(test)), *questions, how])


def _answer_in_text(test: Test, answers: Mapping[int, Any]) -> None:
    for place, typed in answers.items():
        if not isinstance(place, int) or not 1 <= place <= len(test.questions):
            print(f"{place!r}: there is no such question; they are 1 to {len(test.questions)}.")
            continue
        asked = test.questions[place - 1]
        try:
            answer = text.parse(asked.drawn, typed)
        except AnswerError as error:
            print(f"{place}. {error}")
            continue
        test.draft(asked, answer)
        print(f"{place}. {text.answer(asked.drawn, answer)}")
    given = sum(answer is not None for answer in test.drafts().values())
    print(f'{given} of {len(test.questions)} answered. To submit: submit("{test.module}").')


def attempts(count: int) -> str:
    return "1 attempt" if count == 1 else f"{count} attempts"
