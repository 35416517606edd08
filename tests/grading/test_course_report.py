"""The report: shares of those who answered, and nothing where nobody did."""

from pathlib import Path

from grading.bank import Bank
from grading.course.outcome import Item, Outcome
from grading.course.report import picks, summarise, unpicked
from grading.question import Choice, key

SMALL = Path(__file__).parent / "small_course"


def taken(*right: bool) -> dict[str, Outcome]:
    """A test's outcome: what each question came to, the last one left open."""
    items = [
        Item(f"q{place}", "passed" if each else "failed", float(each), 1.0, ("k",)) for place, each in enumerate(right)
    ]
    return {"test-90": Outcome("test-90", (*items, Item("open", "failed", 0.0, 1.0)), "")}


def not_taken(count: int) -> dict[str, Outcome]:
    names = [*(f"q{place}" for place in range(count)), "open"]
    return {"test-90": Outcome("test-90", tuple(Item(name, "failed", 0.0, 1.0) for name in names), "")}


def test_a_test_that_nobody_took_has_no_shares():
    rows = summarise({"ada": not_taken(2), "kurt": not_taken(2)})
    assert [(row.name, row.right, row.count) for row in rows] == [("q0", None, 0), ("q1", None, 0), ("open", None, 0)]
    assert picks({"ada": not_taken(2)}) == {}


def test_shares_are_of_those_who_took_it_and_what_they_left_open_is_not_right():
    rows = summarise({"ada": taken(True, False), "kurt": not_taken(2), "emmy": taken(True, True)})
    assert [(row.name, row.right, row.count) for row in rows] == [("q0", 1.0, 2), ("q1", 0.5, 2), ("open", 0.0, 2)]


def test_an_exercise_that_nobody_wrote_is_one_that_nobody_got_right():
    outcome = {"check": Outcome("02.1", (Item("basic", "failed", 0.0, 4.0),), "")}
    assert summarise({"ada": outcome})[0].right == 0.0


def test_options_that_nobody_picked_are_those_of_questions_that_somebody_answered():
    bank = Bank.load(SMALL / "questions")
    question = next(each for each in bank.of("90", "test") if isinstance(each.body, Choice))
    first, *others = question.body.options  # type: ignore[union-attr]
    answered = Item(question.id, "failed", 0.0, 1.0, (key(question.id, first.value),))
    results = {"ada": {"test-90": Outcome("test-90", (answered, Item("small-steps", "failed", 0.0, 1.0)), "")}}
    said = list(unpicked(picks(results), bank))
    assert said == [f"{question.id}: {' '.join(option.value.split())}" for option in others]
