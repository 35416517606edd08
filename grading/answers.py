"""The answers of a graded test as one line of text, the second argument of `submit("03", "...")`.

The text is `t1.` and then, in URL-safe base64, six bytes of checksum (the beginning of SHA-256 of the rest) and
zlib-compressed JSON:

    {"module": "03", "learner": "8014bf19", "edition": "5a3c01d2", "attempts": [
        {"variants": {"dp-traffic": 1, ...}, "answers": {"dp-traffic": "a1b2c3", ...}, "time": 1796024626.4}, ...]}

A variant is the draw that the learner saw; an answer is a key (choice), a list of keys (several, in alphabetical order;
order, in the learner's), a number, or row -> key (trace); `null` is an answer left open. time: seconds since 1970, UTC.
edition: whose draws were answered, the public ones or a course's (grading/bank.py); older texts have none. Attempts are
in order, so the first is the first. The checksum finds accidents, such as a line cut in two; nothing here keeps a
learner from writing other answers, which is no different from giving other answers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MARK = "t1."
LARGEST_NBYTES = 1_000_000  # unpacked; a test's answers are a few thousand
CHECK_NBYTES = 6


class AnswersError(ValueError):
    """A text of answers cannot be read, or belongs to something else; the message says what to do."""


@dataclass(frozen=True)
class Attempt:
    """One submission of a test: for each question the draw that was seen and the answer given (None: left open)."""

    variants: Mapping[str, int]
    answers: Mapping[str, Any]
    time: float

    def __post_init__(self) -> None:
        _wanted(isinstance(self.variants, Mapping) and isinstance(self.answers, Mapping), "questions by name")
        _wanted(self.variants.keys() == self.answers.keys(), "a draw for each answer")
        _wanted(all(type(variant) is int and variant >= 0 for variant in self.variants.values()), "draws from 0 up")
        _wanted(all(map(_is_answer, self.answers.values())), "answers of a known kind")
        _wanted(type(self.time) in (int, float) and 0 <= self.time < 1e12, "a time")


@dataclass(frozen=True)
class Submission:
    """All attempts of one learner at the test of one module, in order."""

    module: str
    learner: str
    attempts: tuple[Attempt, ...]
    edition: str = ""

    def __post_init__(self) -> None:
        _wanted(isinstance(self.module, str) and re.fullmatch(r"\d\d", self.module) is not None, "a module's number")
        _wanted(isinstance(self.learner, str) and 0 < len(self.learner) <= 64, "a learner")
        _wanted(0 < len(self.attempts) <= 1000, "at least one attempt")
        _wanted(isinstance(self.edition, str) and len(self.edition) <= 64, "an edition of the questions")

    def fits(self, edition: str) -> bool:
        """Whether these can be answers to the questions of an edition; where one of both is not known, they can."""
        return self.edition == edition or "" in (self.edition, edition)


def encode(submission: Submission) -> str:
    """The text of a submission."""
    packed = zlib.compress(json.dumps(asdict(submission), separators=(",", ":")).encode(), 9)
    return MARK + base64.urlsafe_b64encode(_check(packed) + packed).decode().rstrip("=")


def decode(text: str) -> Submission:
    """The submission that a text holds; spaces and line breaks in it do no harm.

    Raises AnswersError where the text is damaged, incomplete, or no text of answers at all.
    """
    body = "".join(text.split())
    if not body.startswith(MARK):
        raise AnswersError(f"These are no answers of a test: they would begin with {MARK}. {_RESTORE}")
    try:
        raw = base64.b64decode(body[len(MARK) :] + "=" * (-len(body[len(MARK) :]) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raise AnswersError(f"The answers hold a character that cannot be there, or miss some. {_RESTORE}") from None
    check, packed = raw[:CHECK_NBYTES], raw[CHECK_NBYTES:]
    if check != _check(packed):
        raise AnswersError(f"The answers are not whole: their checksum differs. {_RESTORE}")
    return _read(_unpack(packed))


_RESTORE = 'Write submit("NN") again, with the number of the test alone: what was submitted here is saved beside.'


def _unpack(packed: bytes) -> Any:
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(packed, LARGEST_NBYTES)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise AnswersError(f"The answers are longer than any test's. {_RESTORE}")
        return json.loads(content)
    except (ValueError, zlib.error, RecursionError) as error:
        if isinstance(error, AnswersError):
            raise
        raise AnswersError(f"The answers cannot be unpacked ({error}). {_RESTORE}") from None


def _read(data: Any) -> Submission:
    try:
        attempts = tuple(
            Attempt(attempt["variants"], attempt["answers"], attempt["time"]) for attempt in data["attempts"]
        )
        return Submission(data["module"], data["learner"], attempts, data.get("edition", ""))
    except (KeyError, TypeError, IndexError) as error:
        raise AnswersError(f"The answers lack a part ({error}). {_RESTORE}") from None


def _is_answer(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    if isinstance(value, dict):
        return all(isinstance(item, str) for item in value.values())
    return value is None or isinstance(value, str) or (type(value) in (int, float) and abs(value) <= sys.float_info.max)


def _wanted(there: bool, what: str) -> None:
    if not there:
        raise AnswersError(f"The answers lack {what}. {_RESTORE}")


def _check(packed: bytes) -> bytes:
    return hashlib.sha256(packed).digest()[:CHECK_NBYTES]
