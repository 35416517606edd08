"""From py:percent to a notebook, and the search for what must not leave the course folder."""

import json
from pathlib import Path

import pytest

from grading.bank import Bank
from grading.course import audit
from grading.course.settings import CourseError
from grading.course.source import exercise_of, notebook
from grading.course.source import test_of as module_of

SMALL = Path(__file__).parent / "small_course"
SOURCE = SMALL / "assignments" / "small.py"


def points(kind: str, part: str) -> float:
    return {"exercise": 3.0, "test": 8.0}[kind]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hw.py"
    path.write_text(text)
    return path


def test_nbgraders_metadata_follows_from_what_cells_say():
    cells = notebook(SOURCE, points).cells
    about = {cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader for cell in cells if "nbgrader" in cell.metadata}
    flags = {
        name: "".join(flag[0] for flag in ("grade", "solution", "locked") if each[flag]) for name, each in about.items()
    }
    assert flags == {
        "setup": "l", "pass_on": "s", "check-S-1": "gl", "total": "s", "check-S-2": "gl", "messages": "gs",
        "test-90": "gl",
    }  # fmt: skip
    assert (about["check-S-1"].points, about["messages"].points, about["test-90"].points) == (3, 2, 8)
    graded = {exercise_of(cell) or module_of(cell) for cell in cells if cell.cell_type == "code"}
    assert graded == {"", "S.1", "S.2", "90"}
    before = next(i for i, cell in enumerate(cells) if cell.source == 'submit("90")')
    assert module_of(cells[before + 1]) == "90"


def test_the_same_source_gives_the_same_notebook_with_ids_of_its_own():
    one, other = notebook(SOURCE, points), notebook(SOURCE, points)
    assert one == other
    ids = [cell["id"] for cell in one.cells]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# %%\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n", "needs a name"),
        (
            "# %%\ndef f():\n    ### BEGIN SOLUTION\n    pass\n# %%\ndef f():\n    ### BEGIN SOLUTION\n    pass\n",
            "two cells are called f",
        ),
        ('# %% [markdown] tags=["q", "by-hand"]\n# Why\n', "points=3"),
        (
            '# %% [markdown] tags=["q", "by-hand", "points=3"]\n# Why is that?\n',
            "put the question in a cell of its own",
        ),
    ],
)
def test_mistakes_in_a_source_are_told(tmp_path: Path, text: str, message: str):
    with pytest.raises(CourseError, match=message):
        notebook(written(tmp_path, text), points)


def test_secret_is_what_stands_in_solutions_and_not_what_was_also_said_outside():
    lines = audit.secret_lines([SOURCE.read_text()], [(SMALL / "checks" / "small.py").read_text()])
    assert "running_sum, travelling = x.clone(), x" in lines
    assert "n - 1 with this ring; one point for the number, one for the reason" in lines
    assert "secret_neighbours = [xs[rank - 1] for rank in range(len(xs))]" in lines
    assert not any(line == "def total(comm, x):" for line in lines)


@pytest.mark.parametrize(
    "hide",
    [str, lambda text: json.dumps({"cells": [{"source": [text]}]}), lambda text: f"x\n   {text.replace(' ', '  ')}"],
)
def test_a_planted_secret_is_found_however_it_is_wrapped(tmp_path: Path, hide):
    bank = Bank.load(SMALL / "questions")
    secrets = audit.secret_lines([SOURCE.read_text()]) | audit.secret_texts(bank, ["90"])
    (tmp_path / "clean.ipynb").write_text(json.dumps({"cells": ["def total(comm, x):"]}))
    assert audit.leaks(tmp_path, secrets) == []
    for number, secret in enumerate(
        ["travelling = pass_on(comm, travelling)", "The ring closes, so going left from zero leads to the last one."]
    ):
        (tmp_path / f"{number}.txt").write_text(hide(secret))
        assert any(line.startswith(f"{number}.txt") for line in audit.leaks(tmp_path, secrets))


def test_a_secret_that_json_writes_differently_is_found(tmp_path: Path):
    secret = 'raise ValueError("the ranks\u2019 sums differ")'
    (tmp_path / "hw.ipynb").write_text(json.dumps({"cells": [{"source": ["x = 1\n", secret[:20], secret[20:]]}]}))
    assert audit.leaks(tmp_path, {secret}) == [f"hw.ipynb: {secret}"]
