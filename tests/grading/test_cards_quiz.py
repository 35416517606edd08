"""The graded test: kept while it is answered, submitted by a cell that then holds the answers, never lost."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grading import log, quiz, shelf, submit, text
from grading.answers import Attempt, Submission, decode, encode
from grading.bank import Bank
from grading.handin import saved
from grading.log import record
from grading.quiz import _widget, open_test
from grading.seal import seal

TESTS = 8
SAMPLE = Path(__file__).parent / "sample" / "questions"


class Cell:
    """The cell that submits: its source, as the notebook holds it, and what it showed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.source, self.capsys = 'submit("77")  # my answers', capsys
        self.kernel, self.history_manager = object(), SimpleNamespace(input_hist_raw=[])

    def set_next_input(self, source: str, replace: bool) -> None:
        assert replace
        self.source = source

    def run(self) -> str:
        """Run it, as a learner does, and return what it shows."""
        self.history_manager.input_hist_raw.append(self.source)
        self.capsys.readouterr()
        exec(self.source, {"submit": submit})
        return self.capsys.readouterr().out

    @property
    def held(self) -> Submission:
        return decode(self.source.split('"')[3])


@pytest.fixture
def cell(desk: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cell:
    desk.widgets(False)
    made = Cell(capsys)
    monkeypatch.setattr(text, "shell", lambda: made)
    return made


def right_answers(again: bool = False) -> dict[int, Any]:
    """What to type to have everything right; ids of the sample's numbers say what they add."""
    typed: dict[int, Any] = {}
    for place, asked in enumerate(open_test("77", again).questions, 1):
        drawn = asked.drawn
        if drawn.kind == "number":
            typed[place] = asked.judge(0.0).expected
        else:
            parts = asked.explain()
            texts = [option.text for option in drawn.options]
            typed[place] = " ".join("abc"[texts.index(part.text.split(": ")[1])] for part in parts)
    return typed


def test_a_test_is_not_submitted_before_it_is_complete(desk: Any, cell: Cell):
    assert f"Not submitted: 0 of {TESTS} answered." in cell.run()
    quiz("77", {1: "a b c", 2: 5})
    said = cell.run()
    assert f"Not submitted: 2 of {TESTS} answered, open: 3, 4" in said
    assert "blanks=True" in said
    assert cell.source == 'submit("77")  # my answers'
    assert desk.entries("submitted") == []


def test_submitting_writes_the_answers_into_the_cell_and_explains_every_one(desk: Any, cell: Cell):
    answers = right_answers()
    answers[TESTS] = 77  # one wrong
    quiz("77", answers)
    said = " ".join(cell.run().split())
    assert f"{TESTS - 1} of {TESTS} right." in said
    assert cell.source.endswith(")  # my answers")  # what else was in the cell stays
    held = cell.held
    assert (held.module, held.learner, len(held.attempts)) == ("77", log.log().learner(), 1)
    questions = [shelf.asked(shelf.module("77"), name, variant=v) for name, v in held.attempts[0].variants.items()]
    assert [asked.drawn.id for asked in questions] == list(shelf.module("77").ids("test"))
    for asked in questions:
        for part in asked.explain():
            assert " ".join(part.why.split()) in said  # submitting opens every explanation
    assert (desk.root / "answers-77.txt").read_text().strip() == encode(held)
    (entry,) = desk.entries("submitted")
    assert sum(entry["right"].values()) == TESTS - 1


def test_a_filled_cell_runs_again_without_a_new_attempt_also_after_a_restart(desk: Any, cell: Cell):
    quiz("77", right_answers())
    first, source = cell.run(), cell.source
    desk.restart()
    assert cell.run() == first
    assert cell.source == source
    assert len(desk.entries("submitted")) == 1


def test_answers_are_kept_over_a_restart_before_submitting(desk: Any, cell: Cell, capsys: pytest.CaptureFixture[str]):
    quiz("77", {2: 5, 3: 6})
    quiz("77", {3: 7})
    desk.restart()
    assert "2 of 8 answered" in cell.run()
    assert list(open_test("77").drafts().values())[1:3] == [5.0, 7.0]


def test_a_retake_has_other_numbers_and_the_best_counts(desk: Any, cell: Cell, capsys: pytest.CaptureFixture[str]):
    quiz("77", {**right_answers(), 2: 0, 3: 0})
    assert "6 of 8 right" in cell.run()
    quiz("77")
    assert 'quiz("77", again=True)' in capsys.readouterr().out
    quiz("77", again=True)
    assert "Attempt 2, with new numbers." in capsys.readouterr().out
    assert "6 of 8 right" in cell.run()  # a retake that was only looked at changes nothing
    assert len(cell.held.attempts) == 1
    quiz("77", right_answers(again=True), again=True)
    said = cell.run()
    assert "8 of 8 right." in said
    assert "Attempts so far: 6 of 8; 8 of 8. The best counts." in said
    first, second = cell.held.attempts
    drawn = [name for name in first.variants if shelf.module("77").variants(name) > 1]
    assert drawn
    assert all(first.variants[name] != second.variants[name] for name in drawn)


def test_blanks_can_be_left(desk: Any, cell: Cell):
    quiz("77", {2: 5})
    cell.source = 'submit("77", blanks=True)'
    said = cell.run()
    assert "of 8 right" in said
    assert "left open" in said
    assert list(cell.held.attempts[0].answers.values()).count(None) == 7


def test_a_reset_cell_gets_its_answers_back(desk: Any, cell: Cell):
    quiz("77", right_answers())
    said, source = cell.run(), cell.source
    cell.source = 'submit("77")  # my answers'
    assert cell.run() == said
    assert cell.source == source


def test_a_lost_log_is_made_up_for_by_the_cell_and_the_file(desk: Any, cell: Cell):
    quiz("77", right_answers())
    said = cell.run()
    desk.file.unlink()
    desk.restart()
    assert cell.run() == said
    (desk.root / "answers-77.txt").unlink()
    desk.restart()
    assert "8 of 8 right" in cell.run()


def test_a_cell_with_more_attempts_than_an_old_copy_of_the_workspace_counts(desk: Any, cell: Cell):
    quiz("77", {**right_answers(), 2: 0})
    cell.run()
    copy = {path: path.read_bytes() for path in (desk.file, desk.root / "answers-77.txt")}
    quiz("77", right_answers(again=True), again=True)
    said = cell.run()
    for path, content in copy.items():
        path.write_bytes(content)  # a backup is put back
    desk.restart()
    assert cell.run() == said
    assert len(saved("77").attempts) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('submit("77", "t1.AAAA")', "The answers are not whole"),
        ('submit("77", "some text")', "These are no answers of a test"),
        (
            f'submit("77", "{encode(Submission("03", "x", (Attempt({}, {}, 1.0),)))}")',
            "These are the answers of test 03",
        ),
        ('submit("55")', "no questions for module '55'"),
    ],
)
def test_a_foreign_text_is_told_and_changes_nothing(desk: Any, cell: Cell, source: str, said: str):
    quiz("77", right_answers())
    before = log.log().entries()
    cell.source = source
    assert said in cell.run()
    assert cell.source == source
    assert log.log().entries() == before
    cell.source = 'submit("77")'
    assert "8 of 8 right" in cell.run()  # the learner's own answers are all there


def test_another_learners_answers_are_shown_and_not_taken_over(desk: Any, cell: Cell):
    quiz("77", right_answers())
    cell.run()
    other = encode(Submission("77", "somebody", cell.held.attempts))
    cell.source = f'submit("77", "{other}")'
    said = cell.run()
    assert "These answers come from another workspace" in said
    assert "8 of 8 right" in said
    kept = saved("77")
    assert kept is not None
    assert kept.learner == log.log().learner()
    cell.source = 'submit("77")'
    assert "another workspace" not in cell.run()


def test_questions_that_are_gone_are_named_and_the_rest_is_shown(desk: Any, cell: Cell):
    attempt = Attempt({"gone": 0, "sample-t6": 0, "sample-t7": 5}, {"gone": "a", "sample-t6": 4.5, "sample-t7": 1}, 1.0)
    cell.source = f'submit("77", "{encode(Submission("77", log.log().learner(), (attempt,)))}")'
    said = cell.run()
    assert "1 of 3 right" in said
    assert "The question gone is no longer in the course" in said
    assert "The question sample-t7 is no longer in the course" in said  # it has fewer draws now


def test_a_release_without_verdicts_tells_nothing(desk: Any, cell: Cell):
    answers = right_answers()
    desk.hand_out(tests=False)
    desk.restart()
    quiz("77", answers)
    said = cell.run()
    assert "Submitted: 1 attempt." in said
    assert "explanations come back with the feedback" in " ".join(said.split())
    assert "ight." not in said
    assert "Counting on" not in said
    assert desk.entries("submitted")[0]["right"] is None
    assert saved("77") == cell.held


def test_a_disk_that_takes_nothing_leaves_the_answers_in_the_cell(desk: Any, cell: Cell):
    quiz("77", right_answers())

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    with desk.patch.context() as patch:
        patch.setattr("os.fsync", full)
        said = cell.run()
    assert "is full" in said
    assert "Your answers are in this cell" in said
    assert "8 of 8 right" in said
    assert not (desk.root / "answers-77.txt").exists()
    source = cell.source
    desk.restart()  # and the kernel's memory is gone too
    assert "8 of 8 right" in cell.run()
    assert cell.source == source


def test_without_a_workspace_the_cell_still_holds_the_answers(
    desk: Any, cell: Cell, tmp_path_factory: pytest.TempPathFactory
):
    quiz("77", right_answers())
    cell.run()
    desk.patch.chdir(tmp_path_factory.mktemp("grader"))
    desk.restart()
    desk.patch.setattr(shelf, "module", lambda _: shelf._read(desk.root / ".minidist" / "questions" / "77.json", 0))
    source = cell.source
    assert "8 of 8 right" in cell.run()
    assert cell.source == source


def test_where_no_cell_can_be_rewritten_the_line_is_printed(desk: Any, cell: Cell):
    quiz("77", right_answers())
    del cell.kernel
    said = cell.run()
    assert "Keep this line, it is your submission:" in said
    line = next(each for each in said.splitlines() if each.startswith('submit("77", "'))
    assert decode(line.split('"')[3]) == saved("77")


def test_the_widget_form_keeps_what_is_chosen_and_drops_what_is_no_answer(desk: Any, cell: Cell):
    test = open_test("77")
    box = _widget(test)
    fields = [child.children[0] for child in box.children if child._view_name == "HBoxView"]
    fields[0].value = "5"
    count = box.children[-1]
    assert "1 of 8 answered" in count.outputs[0]["data"]["text/markdown"]
    fields[0].value = "five"
    assert "0 of 8 answered" in count.outputs[0]["data"]["text/markdown"]
    fields[0].value = "6"
    assert [value for value in test.drafts().values() if value is not None] == [6.0]
    desk.restart()
    again = _widget(open_test("77"))
    assert next(child.children[0].value for child in again.children if child._view_name == "HBoxView") == "6"


def test_a_kept_answer_that_no_longer_fits_is_open_again(desk: Any, cell: Cell):
    quiz("77", right_answers())
    test = open_test("77")
    for asked in test.questions[:2]:
        test.draft(asked, {"gone": "gone"})
    assert list(test.drafts().values())[:2] != [None, None]  # the last answer that fits is kept
    desk.file.unlink()
    desk.restart()
    test = open_test("77")
    first, second = test.questions[:2]
    test.draft(first, {"gone": "gone"})
    record("drafted", module="77", attempt=0, question=second.drawn.id, variant=second.drawn.variant + 1, answer=5)
    assert set(test.drafts().values()) == {None}  # neither a gone option nor an answer to other numbers


def test_the_form_of_a_submitted_attempt_says_that_it_no_longer_counts(desk: Any, cell: Cell):
    box = _widget(open_test("77"))
    quiz("77", right_answers())
    cell.run()
    before = desk.entries("drafted")
    next(child.children[0] for child in box.children if child._view_name == "HBoxView").value = "5"
    said = "".join(str(child.outputs) for child in box.children if child._view_name == "OutputView")
    assert "what you change here no longer counts" in said
    assert desk.entries("drafted") == before


def test_the_public_test_and_a_courses_are_two(desk: Any, cell: Cell):
    quiz("77", right_answers())
    cell.run()
    public = cell.source
    quiz("77", {2: 5}, again=True)
    assignment = desk.root / "ps77"
    own = Bank.load(SAMPLE, seed="of a course")
    (assignment / ".minidist" / "questions").mkdir(parents=True)
    (assignment / ".minidist" / "questions" / "77.json").write_bytes(seal(own, "77", verdicts_for_tests=True))
    desk.patch.chdir(assignment)
    assert open_test("77").submitted == 0
    assert set(open_test("77").drafts().values()) == {None}
    said = cell.run()
    assert "other questions of test 77 than those here" in said
    assert cell.source == public
    cell.source = 'submit("77")'
    quiz("77", right_answers())
    assert "8 of 8 right" in cell.run()
    assert (cell.held.edition, len(cell.held.attempts)) == (own.edition, 1)
    assert (assignment / "answers-77.txt").read_text().strip() == encode(cell.held)
    desk.patch.chdir(desk.root)
    cell.source = public
    assert "8 of 8 right" in cell.run()
    assert cell.held.edition == Bank().edition
    assert open_test("77").drafts()[open_test("77").questions[1].drawn.id] == 5.0


def test_what_was_answered_before_there_were_editions_still_counts(desk: Any, cell: Cell):
    quiz("77", right_answers())
    cell.run()
    old = encode(replace(cell.held, edition=""))
    lines = [json.loads(line) for line in desk.file.read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if key != "edition"} for line in lines]
    lines = [line | {"answers": old} if line["kind"] == "submitted" else line for line in lines]
    desk.file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (desk.root / "answers-77.txt").write_text(old)
    desk.restart()
    cell.source = f'submit("77", "{old}")'
    assert "8 of 8 right" in cell.run()
    assert open_test("77").submitted == 1
