"""The text form: what learners type, what they read, and where widgets give way to it."""

import doctest
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from grading import text
from grading.draw import AnswerError, Drawn, Shown

LETTERS = tuple(Shown(key, f"`{key}` **text**") for key in ("k1", "k2", "k3"))


def drawn(kind: str, unit: str = "", rows: tuple[Shown, ...] = ()) -> Drawn:
    return Drawn("q", "77", "card", kind, "c", "cell", 0, "Stem?", unit, () if kind == "number" else LETTERS, rows)


TRACE = drawn("trace", rows=(Shown("r1", "rank 0"), Shown("r2", "rank 1")))


@pytest.mark.parametrize("name", ["text", "card", "log", "answers", "files"])
def test_doctests(name: str):
    assert doctest.testmod(importlib.import_module(f"grading.{name}")).failed == 0


@pytest.mark.parametrize(
    ("typed", "unit", "value"),
    [
        ("590592", "bytes", 590592),
        (" 590,592 bytes ", "bytes", 590592),
        ("1.5GiB", "bytes", 1.5 * 2**30),
        ("2_000", "bytes", 2000),
        ("+3.5e-2", "", 0.035),
        ("25 GB/s", "bytes/s", 25e9),
        ("25000 MB/s", "GB/s", 25),
        ("0.5", "GB", 0.5),
        ("250 us", "ms", 0.25),
        ("7 x parameters", "x parameters", 7),
    ],
)
def test_numbers_as_people_write_them(typed: str, unit: str, value: float):
    assert text.number(typed, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("typed", "unit", "said"),
    [
        ("many", "bytes", "'many' is not a number: type a number in bytes, 0 or more, such as 590592 or 590.6 kB"),
        ("", "", "is not a number"),
        ("0,5", "s", "use a point for decimals"),
        ("12 apples", "bytes", "'apples' is not a unit of this answer"),
        ("3 ms", "bytes", "'ms' is not a unit"),
        ("1.2.3", "", "is not a number"),
        ("4 %", "ranks", "'%' is not a unit of this answer (ranks)"),
        ("-5", "bytes", "-5 cannot be the answer: type a number in bytes, 0 or more, such as 590592"),
        ("-1 ms", "s", "-1 ms cannot be the answer: type a number in s, 0 or more"),
        ("1e999", "GB", "1e999 cannot be the answer"),
        ("2.5", "steps", "2.5 cannot be the answer: type a whole number of steps, 0 or more, such as 3"),
        ("nan", "s", "'nan' is not a number"),
    ],
)
def test_what_is_no_number_is_told_how_to_write_one(typed: str, unit: str, said: str):
    with pytest.raises(AnswerError) as caught:
        text.number(typed, unit)
    assert said in str(caught.value)


@pytest.mark.parametrize("typed", [-5, -0.1, float("nan"), float("inf"), True])
def test_a_number_in_python_has_to_be_possible_too(typed: float):
    with pytest.raises(AnswerError, match="a number in bytes, 0 or more"):
        text.parse(drawn("number", "bytes"), typed)
    assert text.parse(drawn("number", "bytes"), 0) == 0


@pytest.mark.parametrize(
    ("question", "typed", "stored"),
    [
        (drawn("choice"), "b", "k2"),
        (drawn("choice"), " B) ", "k2"),
        (drawn("several"), "c, a", ["k1", "k3"]),
        (drawn("several"), ["c", "a"], ["k1", "k3"]),
        (drawn("order"), "c a b", ["k3", "k1", "k2"]),
        (TRACE, "a, a", {"r1": "k1", "r2": "k1"}),
        (drawn("number", "s"), "250 ms", 0.25),
        (drawn("number"), 3, 3.0),
    ],
)
def test_answers_as_typed(question: Drawn, typed: Any, stored: Any):
    assert text.parse(question, typed) == stored
    assert question.checked(stored) == stored  # and it is an answer


@pytest.mark.parametrize(
    ("question", "typed", "said"),
    [
        (drawn("choice"), "d", "'d' is none of the options a to c: give one letter of a, b, c"),
        (drawn("choice"), "a b", "give one letter"),
        (drawn("choice"), "", "is none of the options"),
        (drawn("several"), "a a", "does not answer it"),
        (drawn("order"), "a b", "give all of a, b, c in order"),
        (TRACE, "a", "a letter of a, b, c for each of the 2 rows"),
    ],
)
def test_a_wrong_form_of_answer_is_told_the_right_one(question: Drawn, typed: Any, said: str):
    with pytest.raises(AnswerError) as caught:
        text.parse(question, typed)
    assert said in str(caught.value)


def test_a_question_shows_all_that_is_needed_to_answer_it():
    shown = text.question(TRACE, 3)
    assert shown.startswith("3. Stem?")
    for part in ("a) k1 text", "c) k3 text", "rank 0", "rank 1", "To answer: give a letter"):
        assert part in shown


def test_a_stored_answer_reads_as_words_also_when_an_option_is_gone():
    assert text.answer(drawn("order"), ["k2", "k1", "gone"]) == "k2 text; then k1 text; then gone"
    assert text.answer(drawn("several"), []) == "none of them"
    assert text.answer(drawn("number", "bytes"), 590592.0) == "590,592 bytes (591 kB)"
    assert text.answer(TRACE, {"r1": "k1", "old": "k2"}) == "rank 0: k1 text; old: k2 text"


def test_markdown_becomes_lines():
    markdown = "**Right.** See [cell `a`](x.ipynb#cell-id=a).\n\n<details><summary>More</summary>\n\n- one\n- two"
    assert text.plain_lines(f"{markdown}\n\n</details>") == "Right. See cell a.\nMore\n- one\n- two"


def test_widgets_need_a_kernel_and_one_variable_turns_them_off(monkeypatch: pytest.MonkeyPatch):
    assert not text.widgets_run()  # no IPython session here
    monkeypatch.setattr(text, "shell", lambda: SimpleNamespace(kernel=object()))
    assert text.widgets_run()
    monkeypatch.setenv("MINIDIST_TEXT", "1")
    assert not text.widgets_run()
