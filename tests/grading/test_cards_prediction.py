"""Predictions: committed to once, and the run's result is kept back until then, without stopping anything."""

from typing import Any

import pytest

from grading import prediction, shelf
from grading.formulas import quantity
from grading.log import record
from grading.prediction import _widget, compare, predict, reveal


@pytest.fixture
def cells(desk: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the cells displayed: boxes and panes, and of a comparison what was said and its figure."""
    seen: list[Any] = []
    monkeypatch.setattr(prediction, "show", lambda box, _text: seen.append(box))
    monkeypatch.setattr(prediction, "_display", lambda said, figure: seen.append((said, figure)))
    prediction._waiting.clear()
    desk.widgets(True)
    return seen


def fill_and_commit(box: Any, typed: str) -> None:
    field = next(each for each in box.children[2].children if each._view_name == "TextView")
    field.value = typed
    next(each for each in box.children if each._view_name == "ButtonView").click()


def bundles(pane: Any) -> list[set[str]]:
    return [set(output["data"]) for output in pane.outputs]


def test_run_all_spoils_nothing_and_the_comparison_then_appears_by_itself(desk: Any, cells: list[Any]):
    predict("sample-number")
    compare("sample-number", 123456.0)
    form, pane = cells
    kept_back = pane.outputs[0]["data"]["text/markdown"]
    assert "kept back** until you commit" in kept_back
    expected = shelf.ask("sample-number").judge(1.0).expected
    for number in ("123456", "123,456", "123.5", f"{expected:g}", f"{expected:,.0f}"):
        assert number not in kept_back
    fill_and_commit(form, f"{2 * (expected or 0)}")
    said = pane.outputs[0]["data"]["text/markdown"]
    assert "That counts what it receives as well" in said  # the known mistake explains itself
    assert bundles(pane)[1] == {"image/png", "text/plain"}
    assert len(cells) == 2  # nothing ran again


def test_the_comparison_shows_prediction_formula_and_measurement(desk: Any, cells: list[Any]):
    predict("sample-number", "20 kB")
    compare("sample-number", 14000, title="Bytes sent", axis="sent")
    said, figure = cells[-1]
    texts = [each.get_text() for each in figure.axes[0].texts]
    expected = shelf.ask("sample-number").judge(1.0).expected
    assert texts[0] == "20 kB"
    assert texts[1] == f"{(expected or 0) / 1000:g} kB"
    assert texts[2] == "14 kB"
    assert said.startswith("**Not right.**")
    assert "Your prediction: **20,000 bytes (20 kB)**; by the formula: **" in said
    assert "measured: **14,000 bytes (14 kB)**." in said
    assert desk.entries("measured")[0]["value"] == 14000


@pytest.mark.parametrize("answer", ["1 kB", "right"])
def test_whatever_was_predicted_the_comparison_says_how_the_number_comes_about(
    desk: Any, cells: list[Any], answer: str
):
    asked = shelf.ask("sample-number")
    expected = asked.judge(1.0).expected or 0
    predict("sample-number", expected if answer == "right" else answer)
    compare("sample-number", expected)
    said, _ = cells[-1]
    assert said.count(f" kB = {quantity(expected, 'bytes')}.") == 1
    assert ("**How the number comes about.**" in said) == (answer != "right")


@pytest.mark.parametrize("typed", ["-5", "-5 bytes", "3 ms", "nan", "1e999"])
def test_an_impossible_prediction_is_refused_before_it_is_final(desk: Any, cells: list[Any], typed: str):
    box = _widget(shelf.ask("sample-number"))
    fill_and_commit(box, typed)
    assert "type a number in bytes, 0 or more" in box.children[-1].outputs[0]["data"]["text/markdown"]
    assert desk.entries("predicted") == []
    fill_and_commit(box, "0")
    assert [entry["answer"] for entry in desk.entries("predicted")] == [0]


def test_a_prediction_stays_as_it_was_made_also_after_a_restart(
    desk: Any, cells: list[Any], capsys: pytest.CaptureFixture[str]
):
    predict("sample-number", 100)
    desk.restart()
    predict("sample-number", 200)
    assert "Committed before: 100 bytes. It stays." in capsys.readouterr().out
    assert [entry["answer"] for entry in desk.entries("predicted")] == [100]
    predict("sample-number")
    form = cells[-1]
    assert "Committed:" in form.children[-1].outputs[0]["data"]["text/markdown"]
    field = next(each for each in form.children[2].children if each._view_name == "TextView")
    assert (field.value, field.disabled) == ("100", True)


def test_of_two_notebooks_the_first_to_commit_counts(desk: Any, cells: list[Any]):
    first, second = _widget(shelf.ask("sample-number")), _widget(shelf.ask("sample-number"))
    fill_and_commit(first, "100")
    fill_and_commit(second, "200")
    assert [entry["answer"] for entry in desk.entries("predicted")] == [100]
    assert "Committed:** 100 bytes" in second.children[-1].outputs[0]["data"]["text/markdown"]


@pytest.mark.parametrize("change", [{"variant": 99}, {"answer": "words"}, {"variant": None}, {"answer": None}])
def test_a_prediction_that_no_longer_fits_its_question_is_asked_for_again(
    desk: Any, cells: list[Any], change: dict[str, Any]
):
    record("predicted", **{"module": "77", "question": "sample-number", "variant": 0, "answer": 5.0} | change)
    predict("sample-number")
    compare("sample-number", 5)
    assert "kept back" in cells[1].outputs[0]["data"]["text/markdown"]
    fill_and_commit(cells[0], "100")
    assert len(cells[1].outputs) == 2


def test_an_open_or_unreadable_number_commits_to_nothing(desk: Any, cells: list[Any]):
    box = _widget(shelf.ask("sample-number"))
    fill_and_commit(box, "")
    assert "Still open: type a number in bytes" in box.children[-1].outputs[0]["data"]["text/markdown"]
    fill_and_commit(box, "lots")
    assert "'lots' is not a number" in box.children[-1].outputs[0]["data"]["text/markdown"]
    assert desk.entries("predicted") == []


def test_every_figure_of_the_run_is_kept_back(desk: Any, cells: list[Any]):
    from minidist import viz

    reveal("sample-number", viz.curves([1, 2], {"a": [1.0, 2.0]}, title="Time"))
    reveal("sample-number", "3 messages")
    compare("sample-number", 5)
    assert [bundles(pane) for pane in cells] == [[{"text/markdown", "text/plain"}]] * 3
    predict("sample-number", 5)
    assert bundles(cells[0]) == [{"image/png", "text/plain"}]
    assert "3 messages" in cells[1].outputs[0]["data"]["text/markdown"]
    assert len(cells[2].outputs) == 2


def test_other_kinds_compare_in_words(desk: Any, cells: list[Any]):
    predict("sample-choice", "a")
    compare("sample-choice", 4)
    said, figure = cells[-1]
    assert figure is None
    assert "| your prediction | measured |" in said


def test_the_text_form_says_when_to_run_again(desk: Any, cells: list[Any], capsys: pytest.CaptureFixture[str]):
    desk.widgets(False)
    predict("sample-number")
    compare("sample-number", 123456)
    printed = capsys.readouterr().out
    assert "To answer: give a number in bytes" in printed
    assert "Then run this cell again." in printed
    assert "123" not in printed
    predict("sample-number", "15000")
    compare("sample-number", 123456)
    assert "Committed: 15,000 bytes" in capsys.readouterr().out
    assert len(cells) == 1


def test_a_measurement_of_any_type_can_be_logged(desk: Any, cells: list[Any]):
    torch = pytest.importorskip("torch")
    for measured in (torch.tensor(3.0), {"a": 1}, [1, 2], "text", 2):
        compare("sample-choice", measured)
    assert [entry["value"] for entry in desk.entries("measured")] == [3.0, "{'a': 1}", "[1, 2]", "text", 2]
