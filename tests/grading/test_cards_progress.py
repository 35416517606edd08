"""Progress, counted from the log per module and concept and never lost by an update; and review, which builds on it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course.build import notebook_bytes
from course.workspace import fill
from grading import card, log, progress, review, shelf, text
from grading.__main__ import main as command
from grading.log import record
from grading.progress import _line, as_markdown, follow, main, summary
from grading.review import CARDS, missed, to_review


def letter(asked: shelf.Asked, right: bool) -> str:
    """What to type for a right or a wrong option of a choice."""
    judged = [asked.judge(option.key).right for option in asked.drawn.options]
    return "abc"[judged.index(right)]


@pytest.fixture(autouse=True)
def _as_text(desk: Any) -> None:
    desk.widgets(False)


def only(desk: Any) -> Any:
    (module,) = summary(log.log().entries())
    return module


def test_an_empty_log_counts_nothing_of_all_there_is(desk: Any):
    module = only(desk)
    assert (module.number, module.title, module.minutes, module.scores, module.exercises) == ("77", "Sample", 0, (), ())
    assert [concept.name for concept in module.concepts] == list(shelf.module("77").concepts)
    totals = [module.total(field) for field in ("ran", "cells", "predicted", "predictions", "right", "questions")]
    assert totals == [0, 4, 0, 1, 0, 11]  # two concepts are shown in one cell and one in both; eleven cards and tests


def test_what_was_done_is_counted_where_it_belongs(desk: Any):
    record("ran", module="77", cell="show-ring")
    record("ran", module="77", cell="elsewhere")
    record("predicted", module="77", question="sample-number", variant=0, answer=1.0)
    record("answered", module="77", question="sample-several", variant=0, answer=[], right=False)
    record("answered", module="77", question="sample-several", variant=0, answer=[], right=True)
    record("answered", module="77", question="sample-choice", variant=0, answer="x", right=True)
    record("answered", module="77", question="sample-choice", variant=0, answer="y", right=False)
    record("submitted", module="77", attempt=0, right={"sample-t1": True, "sample-t2": False}, answers="", of=8)
    record("submitted", module="77", attempt=1, right={"sample-t1": True, "sample-t2": True}, answers="", of=8)
    record("checked", exercise="77.1", passed=False)
    record("checked", exercise="77.2", passed=True)
    record("checked", exercise="77.2", passed=False)  # tried something else afterwards
    record("checked", exercise="03.1", passed=True)
    module = only(desk)
    slices, sums, ring = module.concepts
    assert (slices.ran, slices.right, slices.questions) == (0, 0, 1)  # the latest answer counts
    assert (sums.ran, sums.cells, sums.predicted, sums.predictions) == (1, 2, 1, 1)
    assert (sums.right, sums.questions) == (3, 8)
    assert (ring.ran, ring.cells) == (1, 1)
    assert module.scores == (1, 2)
    assert module.exercises == ("77.2",)


def test_minutes_leave_breaks_out(desk: Any, monkeypatch: pytest.MonkeyPatch):
    for at in (0, 300, 500, 9000, 9060):
        monkeypatch.setattr(log.time, "time", lambda at=at: 1e9 + at)
        record("ran", module="77", cell=str(at))
    assert only(desk).minutes == round((500 + 60) / 60)


def test_the_panel_and_the_command_show_the_same(desk: Any, capsys: pytest.CaptureFixture[str]):
    record("submitted", module="77", attempt=0, right={"sample-t1": True}, answers="", of=8)
    record("submitted", module="77", attempt=1, right={"sample-t1": True, "sample-t2": True}, answers="", of=8)
    progress()
    panel = capsys.readouterr().out
    assert "77 Sample: 0 min, test 2 of 8 (first attempt 1)" in panel
    assert re.search(r"^  sums +0 of 2 +0 of 1 +2 of 8$", panel, re.M)
    assert main([str(desk.root)]) == 0
    assert capsys.readouterr().out == panel
    assert command(["progress", str(desk.root)]) == 0
    assert capsys.readouterr().out == panel
    desk.patch.chdir(desk.root.parent)
    assert main([str(desk.root)]) == 0  # from anywhere
    assert capsys.readouterr().out == panel


def test_the_panel_in_a_notebook_is_a_table_with_folded_concepts(desk: Any):
    record("checked", exercise="77.2", passed=True)
    panel = as_markdown(summary(log.log().entries()))
    assert "|77 Sample|0|0 of 4|0 of 1|0 of 11|not submitted|77.2|" in panel
    assert "<details><summary>77 Sample, by concept</summary>\n\n|" in panel  # the blank line makes it a table


def test_a_withheld_test_is_submitted_and_not_scored(desk: Any):
    record("submitted", module="77", attempt=0, right=None, answers="", of=8)
    assert "submitted (1), explained with the feedback" in as_markdown(summary(log.log().entries()))


def test_the_command_without_a_workspace(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path_factory.mktemp("empty"))]) == 1
    assert "Run `make course`" in capsys.readouterr().out


def test_updating_the_course_touches_no_progress(desk: Any, tmp_path: Path):
    card("sample-choice", "a")
    (desk.root / "answers-77.txt").write_text("kept")
    before = {path: path.read_bytes() for path in desk.root.rglob("*") if path.is_file()}
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    (notebooks / "77_sample.ipynb").write_bytes(notebook_bytes("# %%\n1\n"))
    lines = fill(notebooks, desk.root, {"77": b"newer", "78": b"new"})
    assert ".minidist/questions/77.json: the questions of module 77" in lines
    for path, content in before.items():
        assert path.read_bytes() == (b"newer" if path.name == "77.json" else content)
    assert [line for line in fill(notebooks, desk.root, {"77": b"newer", "78": b"new"}) if "questions" in line] == []


# ---- review ----------------------------------------------------------------------------------------------------------


def test_nothing_missed_nothing_to_review(desk: Any, capsys: pytest.CaptureFixture[str]):
    review("77")
    assert "Nothing to review" in capsys.readouterr().out
    assert [entry["module"] for entry in desk.entries("opened")] == ["77"]


def test_what_was_missed_comes_back_with_other_numbers_until_it_is_right(desk: Any, capsys: pytest.CaptureFixture[str]):
    card("sample-choice", letter(shelf.ask("sample-choice"), right=False))
    (asked,) = to_review("77")
    assert asked.drawn.id == "sample-choice"
    assert asked.drawn.variant != shelf.ask("sample-choice").drawn.variant
    capsys.readouterr()
    review("77", [letter(asked, right=True)])
    assert "Right. Every element belongs to exactly one rank" in capsys.readouterr().out
    assert to_review("77") == []


def test_a_missed_test_question_brings_a_card_on_its_concept(desk: Any):
    record("submitted", module="77", attempt=0, right={"sample-t1": False, "sample-trace": False}, answers="", of=8)
    assert [asked.drawn.id for asked in to_review("77")] == ["sample-order", "sample-several"]  # the last miss first


def test_later_modules_are_not_reviewed_and_three_are_enough(desk: Any):
    for question, concept in (("sample-choice", ""), ("sample-several", ""), ("sample-order", "")):
        record("answered", module="77", question=question, variant=0, answer=concept, right=False)
    assert len(to_review("77")) == CARDS == 3
    assert to_review("76") == []
    assert missed(log.log().entries(), shelf.modules()) == [
        "a ring of ranks that send, one after the other",
        "sums",
        "slices",
    ]


@pytest.mark.parametrize("shipped", [True, False])
def test_without_a_card_a_test_question_is_reviewed_unless_it_is_withheld(desk: Any, shipped: bool):
    desk.hand_out(tests=shipped)
    path = desk.root / ".minidist" / "questions" / "77.json"
    content = json.loads(path.read_text())
    del content["questions"]["sample-several"]  # the one card on sums
    path.write_text(json.dumps(content))
    record("submitted", module="77", attempt=0, right={"sample-t2": False}, answers="", of=8)
    assert [asked.drawn.id for asked in to_review("77")] == (["sample-t1"] if shipped else [])


# ---- which cells were run --------------------------------------------------------------------------------------------


def test_cells_are_logged_once_each_and_only_those_a_person_ran(desk: Any, monkeypatch: pytest.MonkeyPatch):
    from IPython.core.events import EventManager
    from IPython.core.interactiveshell import ExecutionInfo

    shell = SimpleNamespace(kernel=object(), events=EventManager(None, {"pre_run_cell": lambda info: None}))
    monkeypatch.setattr(text, "shell", lambda: shell)
    follow("76")
    follow("77")  # a second lesson in one kernel takes over
    for cell, counts in (("show-ring", True), ("show-ring", True), ("show-slices", False), (None, True)):
        info = ExecutionInfo("1", counts, False, False, cell)
        shell.events.trigger("pre_run_cell", info)
    assert [(entry["module"], entry["cell"]) for entry in desk.entries("ran")] == [("77", "show-ring")]


def test_a_concept_with_a_long_name_is_named_whole():
    whole = "averaging gradients equals one big batch (and when not: unequal token counts)"
    assert whole in " ".join(_line(whole, "1 of 2", "", "").split())
    assert max(map(len, _line(whole, "1 of 2", "", "").splitlines())) < 100
