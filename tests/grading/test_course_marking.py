"""Marking tests: source before file, differences told, only the attempts that count, and only what is the learner's."""

import json
from datetime import UTC, datetime
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode

from grading.answers import Attempt, Submission, encode
from grading.bank import Bank
from grading.course.marking import OTHERS, Rules, calls, find_answers, mark
from grading.course.outcome import Outcome
from grading.draw import variant_for
from grading.fill import variants
from grading.question import Choice, key

SMALL = Path(__file__).parent / "small_course"
LEARNER = "abcd1234"


@pytest.fixture(scope="module")
def bank() -> Bank:
    return Bank.load(SMALL / "questions")


def attempt(bank: Bank, right: int, number: int = 0, time: float = 1_800_000_000.0, learner: str = LEARNER) -> Attempt:
    """An attempt whose first so many answers are right."""
    drawn, given = {}, {}
    for place, question in enumerate(bank.of("90", "test")):
        drawn[question.id] = variant_for(question.id, learner, number, len(variants(question)))
        if isinstance(question.body, Choice):
            option = next(each for each in question.body.options if each.right == (place < right))
            given[question.id] = key(question.id, option.value)
        else:
            given[question.id] = 4.0 * variants(question)[drawn[question.id]]["count"] if place < right else None
    return Attempt(drawn, given, time)


def notebook(*sources: str) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def submitted(*attempts: Attempt, learner: str = LEARNER, edition: str = "") -> Submission:
    return Submission("90", learner, attempts, edition)


def test_calls_are_found_as_code_and_in_cells_that_are_none():
    sources = ["submit('90')", "# submit('91', 'no')", "%time submit('90', \"t1.x\")", "g.submit('90', answers='t1.y')"]
    assert calls(sources, "submit") == [("90",), ("90", "t1.x"), ("90", "t1.y")]


def test_the_source_comes_before_the_file_and_a_difference_is_told(bank: Bank, tmp_path: Path):
    one, other = submitted(attempt(bank, 1)), submitted(attempt(bank, 1), attempt(bank, 3, 1))
    source = notebook("x = 1", f'submit("90", "{encode(one)}")')
    assert find_answers(source, tmp_path, "90") == (one, [])
    (tmp_path / "answers-90.txt").write_text(encode(one) + "\n")
    assert find_answers(source, tmp_path, "90") == (one, [])
    (tmp_path / "answers-90.txt").write_text(encode(other))
    found, notes = find_answers(source, tmp_path, "90")
    assert found == one
    assert notes == ["answers-90.txt differs from the answers in the notebook (1 and 2 attempts)"]
    found, notes = find_answers(notebook('submit("90")'), tmp_path, "90")
    assert found == other
    assert notes == ["the answers were taken from answers-90.txt, since the notebook holds none"]


def test_damaged_and_misplaced_answers_are_told_and_the_file_stands_in(bank: Bank, tmp_path: Path):
    right = submitted(attempt(bank, 3))
    (tmp_path / "answers-90.txt").write_text(encode(right))
    found, notes = find_answers(notebook(f'submit("90", "{encode(right)[:-9]}")'), tmp_path, "90")
    assert found == right
    assert "cannot be read" in notes[0]
    wrong = Submission("91", LEARNER, right.attempts)
    found, notes = find_answers(notebook(f'submit("90", "{encode(wrong)}")'), tmp_path, "90")
    assert found == right
    assert "has answers of test 91 in the place of test 90" in notes[0]


def test_one_point_a_question_and_every_answer_explained(bank: Bank):
    outcome = mark(bank, "90", submitted(attempt(bank, 2)), Rules(3))
    assert (outcome.points, outcome.possible) == (2, 3)
    assert [item.state for item in outcome.items] == ["passed", "passed", "failed"]
    assert outcome.items[1].mistakes == ()
    assert "The ring closes" in outcome.text
    assert "Your answer: left open" in outcome.text
    assert "A line ends there" not in outcome.text  # an option that was not picked
    assert outcome.notes == ()


def test_a_wrong_answer_names_its_mistake_and_what_was_picked(bank: Bank):
    outcome = mark(bank, "90", submitted(attempt(bank, 0)), Rules(3))
    assert outcome.points == 0
    assert outcome.items[1].mistakes == ("no-wraparound",)
    assert outcome.items[1].chosen == (key("small-left", "nobody"),)
    assert "After" not in outcome.text


def test_the_best_attempt_counts_and_all_are_noted(bank: Bank):
    outcome = mark(bank, "90", submitted(attempt(bank, 1), attempt(bank, 3, 1), attempt(bank, 2, 2)), Rules(3))
    assert outcome.points == 3
    assert "Your attempts: 1, 3, 2. The best counts." in outcome.text
    assert "attempts: 1, 3, 2" in outcome.notes


def test_attempts_beyond_the_allowed_and_after_the_deadline_do_not_count(bank: Bank):
    many = submitted(attempt(bank, 1), attempt(bank, 2, 1), attempt(bank, 3, 2))
    outcome = mark(bank, "90", many, Rules(2))
    assert outcome.points == 2
    assert "1 attempt beyond the 2 allowed did not count" in outcome.notes
    closes = datetime.fromtimestamp(1_800_000_000, UTC)
    late = submitted(attempt(bank, 1), attempt(bank, 3, 1, time=1_800_000_001))
    outcome = mark(bank, "90", late, Rules(3, closes))
    assert outcome.points == 1
    assert "1 attempt made after 2027-01-15 08:00 UTC did not count" in outcome.text
    outcome = mark(bank, "90", submitted(attempt(bank, 3, 0, time=1_800_000_001)), Rules(3, closes))
    assert outcome.points == 0
    assert "did not count" in outcome.text


def test_other_draws_than_the_learners_are_noted(bank: Bank):
    outcome = mark(bank, "90", submitted(attempt(bank, 3, 1)), Rules(3))
    assert "attempt 1: the draw of small-steps is not the one this learner was shown" in outcome.notes


def test_answers_to_other_questions_are_noted_and_wait_for_a_person(bank: Bank, tmp_path: Path):
    own = Bank.load(SMALL / "questions", seed="of a course")
    assert own.edition != bank.edition
    for edition, held in {bank.edition: OTHERS, own.edition: "", "": ""}.items():  # older answers do not say
        outcome = mark(own, "90", submitted(attempt(own, 3), edition=edition), Rules(3))
        assert outcome.held == held
        assert (OTHERS in outcome.notes, OTHERS in outcome.text) == (bool(held), bool(held))
        assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
    late = submitted(attempt(own, 3), edition=bank.edition)
    assert mark(own, "90", late, Rules(3, datetime.fromtimestamp(1, UTC))).held == OTHERS
    old = mark(own, "90", late, Rules(3)).to_json()
    del old["held"]
    assert Outcome.from_json(old).held == ""  # graded before this was kept
    one, other = submitted(attempt(bank, 1), edition="a"), submitted(attempt(bank, 1), edition="b")
    (tmp_path / "answers-90.txt").write_text(encode(other))
    _, notes = find_answers(notebook(f'submit("90", "{encode(one)}")'), tmp_path, "90")
    assert notes == ["answers-90.txt differs from the answers in the notebook (to other questions)"]


@pytest.mark.parametrize("answer", ["nonsense", ["a"], {"a": "b"}, 7.0])
def test_what_cannot_be_an_answer_is_wrong_and_noted(bank: Bank, answer: object):
    good = attempt(bank, 3)
    odd = Attempt({**good.variants, "small-left": 99}, {**good.answers, "small-steps": answer}, good.time)
    outcome = mark(bank, "90", submitted(odd), Rules(3))
    assert [item.state for item in outcome.items] == ["failed", "failed", "passed"]
    assert any("cannot be an answer" in note for note in outcome.notes)


def test_no_answers_are_no_points_with_what_to_do(bank: Bank):
    outcome = mark(bank, "90", None, Rules(3))
    assert (outcome.points, outcome.possible) == (0, 3)
    assert 'run the cell submit("90")' in outcome.text
