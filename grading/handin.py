"""Where submitted tests are kept beside the notebook's source: the learner's log, and a file to hand in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grading.answers import AnswersError, Submission, decode, encode
from grading.files import write_atomically
from grading.log import explain, log, record, shelves


def save(submission: Submission, right: Mapping[str, bool] | None) -> str:
    """Keep a submission, whose last attempt is new; returns what stood in the way, "" if nothing did.

    right: question -> whether it was answered right; None where that is not known here.
    """
    line, attempt = encode(submission), submission.attempts[-1]
    where = {"module": submission.module, "attempt": len(submission.attempts) - 1}
    problem = record("submitted", **where, answers=line, right=right, of=len(attempt.answers))
    path = file(submission.module)
    if path is None:
        return problem
    try:
        write_atomically(path, (line + "\n").encode())
    except OSError as error:
        return problem or explain(error, path.parent)
    return problem


def file(module: str) -> Path | None:
    """Where a submission is kept beside the notebook, to be handed in with it."""
    found = shelves()
    return found[0].parent / f"answers-{module}.txt" if found else None


def saved(module: str, edition: str = "") -> Submission | None:
    """The longest submission of this learner that the log or the file beside the notebook holds.

    edition: of the questions; answers to others, such as the public ones beside a course's, do not count.
    """
    lines = [entry.get("answers", "") for entry in log().entries() if _submitted(entry, module)]
    path = file(module)
    if path is not None and path.is_file():
        lines.append(path.read_text(encoding="utf-8", errors="replace"))
    found = []
    for line in lines:
        try:
            found.append(decode(line))
        except AnswersError:
            continue  # damaged: the others still count
    mine = [submission for submission in found if submission.module == module and submission.fits(edition)]
    return max(mine, key=lambda submission: len(submission.attempts), default=None)


def _submitted(entry: Mapping[str, Any], module: str) -> bool:
    return (entry["kind"], entry.get("module")) == ("submitted", module)
