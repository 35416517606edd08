"""What learners wrote cannot move, hide or retype what stands in a terminal, wherever it is printed or kept."""

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.notebooknode import NotebookNode

from grading import __main__ as command
from grading.course.grade import Graded
from grading.course.harmless import harmless
from grading.course.outcome import Outcome
from grading.course.plain import COLOUR, plain
from grading.course.settings import CourseError

ATTACK = "\x1b[2J\x1b]0;title\x07\x1b[1;1Hall right\x9b2J\x08\u202egnorw\x00"


def has_control(text: str) -> bool:
    return any((ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 or char == "\u202e" for char in text)


@given(st.text(alphabet=st.sampled_from("\x1b[]m0;2J\x07\x9b\r\n\t\\ab\u202e")))
def test_nothing_that_controls_is_left(text: str):
    assert not has_control(plain(text))
    assert not has_control(COLOUR.sub("", plain(text, colours=True)))
    assert plain(plain(text)) == plain(text)


def test_what_is_text_stays():
    text = "Gödel, 数\tn - 1\n  \U0001f600 50 % [1m"
    assert plain(text) == plain(text, colours=True) == text
    assert plain(ATTACK) == "all right?2J??gnorw?"


def test_where_it_is_kept():
    outcome = Outcome("02.1", (), ATTACK, (ATTACK,))
    assert not has_control(outcome.text + outcome.notes[0])
    outputs = [
        NotebookNode(output_type="stream", name="stdout", text=ATTACK),
        NotebookNode(output_type="error", ename=ATTACK, evalue=ATTACK, traceback=["\x1b[31mred\x1b[0m", ATTACK]),
        NotebookNode(
            output_type="execute_result", execution_count=None, data=NotebookNode({"text/plain": ATTACK}), metadata={}
        ),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("f()", outputs=outputs)])
    stream, error, result = harmless(notebook).cells[0].outputs
    assert error.traceback[0] == "\x1b[31mred\x1b[0m"
    rest = [stream.text, error.ename, error.evalue, error.traceback[1], result.data["text/plain"]]
    assert not any(map(has_control, rest))


def test_where_it_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert not has_control(Graded("ada", None, 1.0, (ATTACK,)).line())

    def fails(_: object) -> int:
        raise CourseError(f"{ATTACK} is no notebook")

    monkeypatch.setattr("grading.course.doctor.main", fails)
    command.main(["doctor"])
    assert not has_control(capsys.readouterr().err)
