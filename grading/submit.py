"""Submitting a test: a cell that rewrites itself with the answers, and then explains every one of them."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from grading import shelf, text
from grading.answers import AnswersError, Attempt, Submission, decode, encode
from grading.card import explain, explain_parts
from grading.draw import AnswerError
from grading.handin import save, saved
from grading.log import home, log
from grading.quiz import Test, attempts, open_test
from grading.seal import Withheld
from grading.shelf import Questions


def submit(module: str, answers: str | None = None, blanks: bool = False) -> None:
    """Submit the test of a module and explain every answer; a cell that was filled before shows its results again.

    blanks=True submits although questions are open; they count as wrong.
    """
    try:
        source = shelf.module(module)
        given = _given(source, answers)
    except (AnswersError, shelf.ShelfError) as error:
        print(error)
        return
    kept = saved(module, source.edition)
    if given is not None and _foreign(given, kept):
        submission: Submission | None = given
    else:
        submission = _newest(source, given, kept)
        test = open_test(module)
        if test.open:
            submission = _submit_open(test, submission, blanks)
    if submission is not None:
        _fill_cell(module, encode(submission))
        results(source, submission)


def _given(source: Questions, answers: str | None) -> Submission | None:
    """What the cell holds. Raises AnswersError if it belongs to another test."""
    given, module = decode(answers) if answers else None, source.module
    if given is not None and given.module != module:
        raise AnswersError(
            f"These are the answers of test {given.module}, in the cell of test {module}. Put them back there, and "
            f'write submit("{module}") here. Nothing was changed.'
        )
    if given is not None and not given.fits(source.edition):
        raise AnswersError(
            f"These answers were given to other questions of test {module} than those here: the public ones and those "
            f'of a course differ. Nothing was changed. To answer those here, run quiz("{module}"), then write '
            f'submit("{module}") in this cell and run it.'
        )
    return given


def _foreign(given: Submission, kept: Submission | None) -> bool:
    """Whether the cell holds the answers of another workspace, which is then said; without one nobody can tell."""
    mine = {log().learner()} | ({kept.learner} if kept else set())
    if given.learner in mine:
        return False
    if home() is not None:
        print(
            "These answers come from another workspace than this one. They are shown as they are, and nothing is added "
            f'to them. To submit your own, write submit("{given.module}") and run it.'
        )
    return True


def _newest(source: Questions, given: Submission | None, kept: Submission | None) -> Submission | None:
    """The longer one of what the cell holds and what was kept: a cell may have been reset, a log may be lost."""
    if given is not None and (kept is None or len(given.attempts) > len(kept.attempts)):
        save(given, outcome(source, given.attempts[-1]))
        return given
    return kept


def _submit_open(test: Test, before: Submission | None, blanks: bool) -> Submission | None:
    """Submit the attempt being answered; what was there before if it is not complete."""
    drafts = test.drafts()
    open_ones = [str(place) for place, answer in enumerate(drafts.values(), 1) if answer is None]
    if open_ones and not (blanks and len(open_ones) < len(drafts)):
        given = len(drafts) - len(open_ones)
        print(f"Not submitted: {given} of {len(drafts)} answered{', open: ' + ', '.join(open_ones) if given else ''}.")
        if given:
            print(f'Answer those too and run this cell again, or leave them: submit("{test.module}", blanks=True).')
        return before
    variants = {asked.drawn.id: asked.drawn.variant for asked in test.questions}
    attempt = Attempt(variants, drafts, round(time.time(), 3))
    if before is None:
        submission = Submission(test.module, log().learner(), (attempt,), test.source.edition)
    else:
        submission = replace(before, attempts=(*before.attempts, attempt))
    problem = save(submission, outcome(test.source, attempt))
    if problem:
        print("Your answers are in this cell: save the notebook, and they stay.")
    return submission


def _fill_cell(module: str, line: str) -> None:
    """Rewrite the running cell so that it holds the answers; print them where no cell can be rewritten."""
    shell = text.shell()
    cell = running_cell(shell)
    call = f'submit("{module}", "{line}")'
    pattern = rf"""submit\(\s*["']{module}["'][^)]*\)"""
    filled = re.sub(pattern, lambda _: call, cell, count=1) if re.search(pattern, cell) else call
    if filled == cell:
        return
    if getattr(shell, "kernel", None) is not None:
        shell.set_next_input(filled, replace=True)
    else:
        print(f"Keep this line, it is your submission:\n{call}")


def running_cell(shell: Any) -> str:
    try:
        return shell.history_manager.input_hist_raw[-1]
    except (AttributeError, IndexError):
        return ""


# ---- results ---------------------------------------------------------------------------------------------------------


def outcome(source: Questions, attempt: Attempt) -> dict[str, bool] | None:
    """Question -> whether it was answered right; None where the verdicts are withheld."""
    try:
        return {name: judged.right for name, _, judged in _judged(source, attempt) if judged is not None}
    except Withheld:
        return None


def _judged(source: Questions, attempt: Attempt) -> list[tuple[str, Any, Any]]:
    """Each question of an attempt: its id, what was asked and the verdict, both None if it is gone from the course."""
    rows = []
    for name, variant in attempt.variants.items():
        try:
            asked = shelf.asked(source, name, variant=variant)
            rows.append((name, asked, asked.judge(attempt.answers[name])))
        except Withheld:
            raise
        except (KeyError, IndexError, AnswerError):
            rows.append((name, None, None))
    return rows


def results(source: Questions, submission: Submission) -> None:
    """Show the last attempt's answers, each with its explanation, and the score of every attempt."""
    attempt = submission.attempts[-1]
    count = attempts(len(submission.attempts))
    try:
        rows = _judged(source, attempt)
    except Withheld:
        _tell(
            f"**Submitted: {count}.** The answers are in this cell's source: save the notebook and hand it in. The "
            "explanations come back with the feedback."
        )
        return
    lines = [f"**{_score(rows)} right.** {_scores(source, submission)}The answers are in this cell: save the notebook."]
    for place, (name, asked, judged) in enumerate(rows, 1):
        if asked is None:
            lines.append(f"**{place}.** The question `{name}` is no longer in the course.")
            continue
        answer = attempt.answers[name]
        mine = "left open" if answer is None else text.answer(asked.drawn, answer)
        said = "**Not right.**" if answer is None else explain(asked, judged, answer)
        every = (
            f"<details><summary>Everything explained</summary>\n\n{explain_parts(asked, asked.explain())}\n\n</details>"
        )
        lines.append(f"**{place}.** {asked.drawn.stem}\n\n*Your answer:* {mine}.\n\n{said}\n\n{every}")
    _tell("\n\n---\n\n".join(lines))


def _score(rows: list[tuple[str, Any, Any]]) -> str:
    return f"{sum(judged is not None and judged.right for _, _, judged in rows)} of {len(rows)}"


def _scores(source: Questions, submission: Submission) -> str:
    """All attempts' scores, if there are several."""
    if len(submission.attempts) == 1:
        return ""
    scores = [_score(_judged(source, attempt)) for attempt in submission.attempts]
    return f"Attempts so far: {'; '.join(scores)}. The best counts. "


def _tell(markdown: str) -> None:
    if text.widgets_run():
        from IPython.display import Markdown, display

        display(Markdown(markdown))
    else:
        print(text.plain_lines(markdown))
