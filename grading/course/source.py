"""From an assignment's source, written as py:percent, to the notebook that nbgrader releases.

nbgrader's metadata follows from what a cell says, so that it is written once:

    ### BEGIN SOLUTION ... ### END SOLUTION     the learner's cell, named by its first tag or the function it defines
    check("02.3")                               a locked cell named check-02-3, with the points of that exercise
    submit("02")                                an ordinary cell; a locked one with a point a question is put behind it
    tags=["locked"]                             a locked cell, restored if it was changed
    tags=["NAME", "by-hand", "points=3"]        a markdown cell for a text that a person grades

A cell that has metadata of its own (nbgrader={...}) keeps it, completed.
"""

import ast
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat.notebooknode import NotebookNode

from grading.course.marking import calls
from grading.course.settings import CourseError

BEGIN = "### BEGIN SOLUTION"
ROLES = ("locked", "by-hand")
ORDINARY = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
GRADED_LATER = "# Graded from the answers in the cell above, once you have handed in."

Points = Callable[[str, str], float]  # ("exercise", "02.3") or ("test", "02") -> points


def notebook(path: Path, points: Points) -> NotebookNode:
    """The instructor's notebook of an assignment: solutions are still in it. Raises CourseError."""
    try:
        written = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    except Exception as error:
        raise CourseError(f"{path.name} cannot be read as py:percent: {error}") from error
    cells: list[NotebookNode] = []
    for cell in written.cells:
        cell.metadata.pop("lines_to_next_cell", None)
        cell.source = cell.source.rstrip("\n")
        try:
            about = _about(cell, points)
        except CourseError as error:
            raise CourseError(f"{path.name}, cell {cell.source.strip().splitlines()[:1]}: {error}") from None
        if about:
            cell.metadata["nbgrader"] = NotebookNode({**ORDINARY, **about})
            cell.metadata.pop("tags", None)
        cells.append(cell)
        cells += [_test_cell(call[0], points) for call in calls([cell.source], "submit") if cell.cell_type == "code"]
    _name(cells, path.name)
    result = nbformat.v4.new_notebook(cells=cells, metadata=nbformat.from_dict(KERNEL))
    result.nbformat_minor = 5
    return result


def exercise_of(cell: NotebookNode) -> str:
    """The exercise that a cell checks, "" if it is none: check("02.3") and nothing else."""
    try:
        body = ast.parse(cell.source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        return ""
    found = calls([cell.source], "check")
    return found[0][0] if len(found) == 1 and found[0] else ""


def test_of(cell: NotebookNode) -> str:
    """The module whose test a cell is graded by, "" if it is none."""
    match = re.fullmatch(r"test-(\d\d)", cell.metadata.get("nbgrader", {}).get("grade_id", ""))
    return match[1] if match else ""


def _about(cell: NotebookNode, points: Points) -> dict[str, Any]:
    """nbgrader's metadata of a cell, {} for an ordinary one."""
    tags = cell.metadata.get("tags", [])
    given = dict(cell.metadata.get("nbgrader", {}))
    if cell.cell_type == "markdown":
        if "by-hand" in tags:
            given |= {"grade": True, "solution": True, "grade_id": _own_tag(tags), "points": _points_tag(tags)}
        if given.get("grade") and given.get("solution") and "?" in cell.source.split("BEGIN MARK SCHEME")[0]:
            raise CourseError(
                "a text graded by hand loses what it says when it is released: put the question in a cell of its own"
            )
        return given
    exercise = exercise_of(cell) if cell.cell_type == "code" else ""
    if exercise:
        given |= {"grade": True, "locked": True, "points": points("exercise", exercise)}
        given.setdefault("grade_id", f"check-{exercise.replace('.', '-')}")
    elif BEGIN in cell.source:
        given["solution"] = True
        given.setdefault("grade_id", _own_tag(tags, _defined(cell.source)))
    elif "locked" in tags:
        given["locked"] = True
        given.setdefault("grade_id", _own_tag(tags, hashlib.sha256(cell.source.encode()).hexdigest()[:8]))
    return given


def _own_tag(tags: list[str], otherwise: str = "") -> str:
    name = next((tag for tag in tags if tag not in ROLES and not tag.startswith("points=")), otherwise)
    if not name:
        raise CourseError("it needs a name: give it a tag of its own")
    return name


def _points_tag(tags: list[str]) -> float:
    for tag in tags:
        if re.fullmatch(r"points=\d+(\.\d+)?", tag):
            return float(tag.partition("=")[2])
    raise CourseError("say what it is worth with a tag such as points=3")


def _defined(source: str) -> str:
    """The first function or class that a cell defines."""
    match = re.search(r"^(?:def|class)\s+(\w+)", source, flags=re.MULTILINE)
    return match[1] if match else ""


def _test_cell(module: str, points: Points) -> NotebookNode:
    about = {**ORDINARY, "grade": True, "locked": True, "grade_id": f"test-{module}", "points": points("test", module)}
    return nbformat.v4.new_code_cell(source=GRADED_LATER, metadata=NotebookNode(nbgrader=NotebookNode(about)))


def _name(cells: list[NotebookNode], file: str) -> None:
    """Cell ids from nbgrader's names, else from content: the same source gives the same notebook."""
    taken: set[str] = set()
    named: set[str] = set()
    for cell in cells:
        name = cell.metadata.get("nbgrader", {}).get("grade_id", "")
        if name and name in named:
            raise CourseError(f"{file}: two cells are called {name}; give one of them a tag of its own")
        named.add(name)
        base = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:50]
        base = base or hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        cell["id"] = next(
            f"{base}-{n}" if n else base for n in range(len(cells)) if (f"{base}-{n}" if n else base) not in taken
        )
        taken.add(cell["id"])
        if cell.cell_type == "code":
            cell["outputs"], cell["execution_count"] = [], None
