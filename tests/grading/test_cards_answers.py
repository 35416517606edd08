"""The answers in a cell's source: what goes in comes out, and damage is found and told."""

import base64
import hashlib
import json
import zlib
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading.answers import LARGEST_NBYTES, MARK, AnswersError, Attempt, Submission, decode, encode

KEYS = st.text("0123456789abcdef", min_size=6, max_size=6)
ANSWERS = st.one_of(
    st.none(),
    KEYS,
    st.lists(KEYS),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(KEYS, KEYS),
)


def attempt(rows: dict[str, tuple[int, Any]], time: float) -> Attempt:
    return Attempt({name: row[0] for name, row in rows.items()}, {name: row[1] for name, row in rows.items()}, time)


ATTEMPTS = st.builds(
    attempt,
    st.dictionaries(st.text(min_size=1, max_size=20), st.tuples(st.integers(0, 7), ANSWERS), max_size=12),
    st.floats(0, 2e9),
)
SOME = Submission("03", "8014bf19", (attempt({"dp-traffic": (1, "a1b2c3"), "dp-order": (0, ["a", "b"])}, 1.5e9),))


@given(st.lists(ATTEMPTS, min_size=1, max_size=3))
def test_what_goes_in_comes_out(attempts: list[Attempt]):
    submission = Submission("03", "8014bf19", tuple(attempts))
    line = encode(submission)
    assert decode(line) == submission
    assert list(decode(line).attempts[0].answers) == list(attempts[0].answers)  # in the test's order
    assert not set(line) & set("\"'\\\n ")  # it can stand in quotes


def test_the_edition_goes_along_and_older_answers_have_none():
    other = replace(SOME, edition="5a3c01d2")
    assert decode(encode(other)) == other
    old = packed(json.dumps({key: value for key, value in asdict(SOME).items() if key != "edition"}).encode())
    assert decode(old) == SOME
    assert [other.fits(edition) for edition in ("5a3c01d2", "", "other")] == [True, True, False]
    assert SOME.fits("other")


def test_spaces_and_line_breaks_do_no_harm():
    line = encode(SOME)
    assert decode(f"  {line[:20]}\n   {line[20:]} ") == SOME


def test_every_changed_or_lost_character_is_found():
    line = encode(SOME)
    for i in range(len(line)):
        other = "A" if line[i] != "A" else "B"
        for damaged in (line[:i] + other + line[i + 1 :], line[:i] + line[i + 1 :], line[:i]):
            assert told_or_same(damaged)


def told_or_same(damaged: str) -> bool:
    """Whether damage is told, with what to do, or is none: base64 may have spare bits at its end."""
    try:
        return decode(damaged) == SOME
    except AnswersError as error:
        return 'Write submit("NN") again' in str(error)


def packed(content: bytes) -> str:
    raw = zlib.compress(content)
    return MARK + base64.urlsafe_b64encode(hashlib.sha256(raw).digest()[:6] + raw).decode()


def with_change(**change: Any) -> str:
    one = {"variants": {"q": 0}, "answers": {"q": "a"}, "time": 1.0} | change
    return packed(json.dumps({"module": "03", "learner": "x", "attempts": [one]}).encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "answers",
        MARK,
        MARK + "%%%",
        MARK + "AAAA",
        packed(b"no json"),
        packed(b"[]"),
        packed(b"[" * 100_000),
        packed(b"0" * (LARGEST_NBYTES + 1)),
        packed(json.dumps({"module": "03", "learner": "x", "attempts": []}).encode()),
        packed(json.dumps({"module": "3", "learner": "x", "attempts": [1]}).encode()),
        packed(json.dumps({"module": "03", "learner": 5, "attempts": [{}]}).encode()),
        with_change(variants={"q": -1}),
        with_change(variants={"q": True}),
        with_change(variants={"r": 0}),
        with_change(variants=[0]),
        with_change(answers={"q": float("nan")}),
        with_change(answers={"q": [1]}),
        with_change(answers={"q": True}),
        with_change(time="now"),
    ],
)
def test_no_text_brings_anything_but_a_clear_error(text: str):
    with pytest.raises(AnswersError, match="answers"):
        decode(text)


def test_a_small_text_that_unpacks_to_a_large_one_is_not_unpacked():
    with pytest.raises(AnswersError, match="longer than any test's"):
        decode(packed(b"0" * (LARGEST_NBYTES + 1)))


def test_a_valid_one_of_the_same_make_is_read():
    assert decode(with_change()).attempts[0].answers == {"q": "a"}
