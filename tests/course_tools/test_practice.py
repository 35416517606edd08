"""Assignments to practise with: everything but the solutions."""

import json
import re

import pytest

from course.build import LessonError
from course.files import ASSIGNMENTS
from course.practice import STUB, practice_notebooks, without_solutions

SOURCE = """# %%
def f():
    x = 1
    ### BEGIN SOLUTION
    return x
    ### END SOLUTION


# %% [markdown] tags=["words", "by-hand", "points=3"]
# === BEGIN MARK SCHEME ===
# 1 point
# === END MARK SCHEME ===
"""


def test_solutions_and_mark_schemes_go_and_what_is_around_them_stays():
    text = without_solutions(SOURCE)
    assert "    x = 1\n    # YOUR CODE HERE\n    raise NotImplementedError()\n" in text
    assert "# Your answer.\n" in text
    for gone in ("return x", "SOLUTION", "1 point", "MARK"):
        assert gone not in text


@pytest.mark.parametrize("line", ["    ### END SOLUTION\n", "# === END MARK SCHEME ===\n", "    ### BEGIN SOLUTION\n"])
def test_half_a_mark_is_told(line: str):
    with pytest.raises(LessonError, match="small: a solution or mark scheme has no end"):
        without_solutions(SOURCE.replace(line, ""), "small")


def test_the_assignments_are_handed_out_without_a_line_of_their_solutions():
    made = practice_notebooks(ASSIGNMENTS)
    assert list(made) == [
        "practice_ps02_collectives.ipynb",
        "practice_ps03_data_parallelism.ipynb",
        "practice_ps04_zero.ipynb",
        "practice_ps05_tensor_parallelism.ipynb",
        "practice_ps06_pipeline_parallelism.ipynb",
    ]
    for path in ASSIGNMENTS.glob("*.py"):
        cells = ["".join(cell["source"]) for cell in json.loads(made[f"practice_{path.stem}.ipynb"])["cells"]]
        source = path.read_text(encoding="utf-8")
        holes = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", source, flags=re.DOTALL)
        assert sum(cell.count("# YOUR CODE HERE") for cell in cells) == len(holes)
        lines = {line.strip() for hole in holes for line in hole.splitlines() if len(line.strip()) > 30}
        assert lines
        shown = {line.strip() for cell in cells if STUB.split("\n")[0] in cell for line in cell.splitlines()}
        assert not lines & shown
        asked = sum(cell.startswith("check(") for cell in cells)
        assert sum("# YOUR CODE HERE" in cell for cell in cells) == asked == source.count("\ncheck(") >= 4
