"""Repair: whatever was handed in, a notebook comes out that has every cell of the release once, as released."""

import json
import os
import tempfile
import warnings
from pathlib import Path

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.notebooknode import NotebookNode

from course.files import ASSIGNMENTS
from course.practice import practice_notebooks
from grading.course.repair import UNMARKED, find, grade_id, mend, read, repair
from grading.course.source import notebook as notebook_of


def cell(name: str, source: str, kind: str = "code", **flags: object) -> NotebookNode:
    about = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3, **flags}
    make = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
    return make(source=source, metadata=NotebookNode(nbgrader=NotebookNode(grade_id=name, **about)))


def release() -> NotebookNode:
    cells = [
        nbformat.v4.new_markdown_cell("# Task"),
        cell("setup", "import torch", locked=True),
        cell("f", "def f(x):\n    raise NotImplementedError", solution=True),
        cell("check-f", 'check("1.1")', grade=True, locked=True, points=3),
        cell("why", "YOUR ANSWER HERE", "markdown", grade=True, solution=True, points=2),
    ]
    return nbformat.v4.new_notebook(
        cells=cells, metadata=NotebookNode(kernelspec=NotebookNode(name="python3", display_name="Python 3"))
    )


def names(notebook: NotebookNode) -> list[str]:
    return [grade_id(cell) for cell in notebook.cells if grade_id(cell)]


def source(notebook: NotebookNode, name: str) -> str:
    return next(cell.source for cell in notebook.cells if grade_id(cell) == name)


def read_again(notebook: NotebookNode) -> NotebookNode:
    """The notebook as repair reads it from a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hw.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
        found, _ = read(Path(folder) / "hw.ipynb")
    assert found is not None
    return found


def test_an_untouched_notebook_stays_and_nothing_is_noted():
    repaired = mend(release(), release())
    assert repaired.notes == ()
    assert [cell.source for cell in repaired.notebook.cells] == [cell.source for cell in release().cells]


def test_what_the_learner_wrote_stays_and_what_is_ours_is_restored():
    notebook = release()
    notebook.cells[2].source = "def f(x):\n    return x"
    notebook.cells[3].source = "pass"
    notebook.cells[3].metadata.nbgrader.points = 300
    notebook.cells[3].metadata["tags"] = ["skip-execution"]
    notebook.cells[4].source = "Because."
    repaired = mend(notebook, release())
    assert source(repaired.notebook, "f") == "def f(x):\n    return x"
    assert source(repaired.notebook, "why") == "Because."
    assert source(repaired.notebook, "check-f") == 'check("1.1")'
    assert repaired.notebook.cells[3].metadata == release().cells[3].metadata
    assert repaired.notes == ("cell check-f had been changed and was restored",)


def test_missing_cells_come_back_behind_the_one_they_followed():
    notebook = release()
    del notebook.cells[3], notebook.cells[1]
    repaired = mend(notebook, release())
    assert names(repaired.notebook) == ["setup", "f", "check-f", "why"]
    assert "cell check-f was missing and was put back" in repaired.notes


def test_of_copies_the_first_counts():
    notebook = release()
    notebook.cells.insert(3, cell("f", "def f(x):\n    return 2", solution=True))
    repaired = mend(notebook, release())
    assert names(repaired.notebook) == ["setup", "f", "check-f", "why"]
    assert "return 2" in repaired.notebook.cells[3].source
    assert grade_id(repaired.notebook.cells[3]) == ""


def test_moved_cells_go_back_to_their_order():
    notebook = release()
    notebook.cells.insert(0, notebook.cells.pop(3))
    repaired = mend(notebook, release())
    assert names(repaired.notebook) == ["setup", "f", "check-f", "why"]
    assert "cells had been moved and were put back in their order" in repaired.notes


def test_cells_whose_metadata_a_tool_dropped_are_known_by_what_they_say():
    notebook = release()
    notebook.cells[2].source = "# mine\ndef f(x):\n    return x"
    for each in notebook.cells:
        each.metadata = NotebookNode()
    repaired = mend(notebook, release())
    assert source(repaired.notebook, "f") == "# mine\ndef f(x):\n    return x"
    assert names(repaired.notebook) == ["setup", "f", "check-f", "why"]


def test_the_public_practice_copy_is_graded_as_far_as_it_can_be_and_told():
    original = notebook_of(ASSIGNMENTS / "ps02_collectives.py", lambda *_: 1.0)
    practice = nbformat.reads(practice_notebooks(ASSIGNMENTS)["practice_ps02_collectives.ipynb"].decode(), as_version=4)
    for each in practice.cells:
        if each.source.startswith("def shift"):
            each.source = "import time\n\n\ndef shift(comm, x):\n    return x"
        if each.id == "in-words":
            each.source = "Because."
        each.source = each.source.replace('submit("02")', 'submit("02", "t1.x")')
    practice.cells.insert(3, nbformat.v4.new_code_cell("mine = 1", id="cell-5"))
    practice.cells[3].metadata["tags"] = ["a,b", 7]  # what no notebook should hold
    repaired = mend(read_again(practice), original)
    assert names(repaired.notebook) == names(original)
    assert "return x" in source(repaired.notebook, "shift")
    assert source(repaired.notebook, "in-words") == "Because."
    assert sum("mine = 1" in cell.source or "t1.x" in cell.source for cell in repaired.notebook.cells) == 2
    assert repaired.notes == (UNMARKED, "cell test-02 was missing and was put back")
    nbformat.validate(repaired.notebook)
    same = nbformat.from_dict(original)
    del next(cell for cell in same.cells if grade_id(cell) == "shift").metadata["nbgrader"]  # one of several is no sign
    assert mend(same, original).notes == ()


def test_a_cell_is_known_by_its_name_before_what_it_defines():
    notebook = release()
    for each in notebook.cells:
        each["id"], each.metadata = grade_id(each) or "x", NotebookNode()
    notebook.cells[2].source = "def f(x):\n    return 2"
    notebook.cells.insert(1, nbformat.v4.new_code_cell("def f(x):\n    return 1"))
    notebook.cells[5].source, notebook.cells[5]["id"] = "Mine.", "0123"
    notebook.cells[5].metadata["tags"] = ["why", "by-hand"]
    repaired = mend(notebook, release()).notebook
    assert source(repaired, "f") == "def f(x):\n    return 2"
    assert source(repaired, "why") == "Mine."


def test_ids_that_are_there_twice_become_ones_that_are_free():
    notebook = release()
    notebook.cells[:0] = [nbformat.v4.new_code_cell(str(n), id="cell-1") for n in range(2)]
    with warnings.catch_warnings(action="error"):  # nbformat mends them too, and says that it will stop to
        cells = mend(notebook, release()).notebook.cells
    assert len({cell.id for cell in cells}) == len(cells)


def test_a_foreign_notebook_is_called_one():
    other = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    repaired = mend(other, release())
    assert repaired.foreign
    assert "none of its cells are from the assignment" in repaired.notes[0]
    assert names(repaired.notebook) == ["setup", "f", "check-f", "why"]


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 4), max_size=9), drop=st.sets(st.integers(0, 8)))
def test_every_cell_of_the_release_is_there_once_whatever_was_done(order: list[int], drop: set[int]):
    original = release()
    cells = [nbformat.from_dict(original.cells[i]) for i in order]
    for place, each in enumerate(cells):
        each["id"] = f"c{place}"
        if place in drop:
            each.metadata = NotebookNode(nbgrader=["no", "dict"])
    notebook = nbformat.v4.new_notebook(cells=cells)
    repaired = mend(notebook, release()).notebook
    assert names(repaired) == names(original)
    nbformat.validate(repaired)
    assert len({cell["id"] for cell in repaired.cells}) == len(repaired.cells)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not json", b"[]", b"null", b"{}", b'{"cells": 3}', b'{"nbformat": 4, "nbformat_minor": 5, "cells": [3]}',
        b'{"nbformat": 99, "cells": []}', b"\xff\xfe\x00", b"[" * 100_000,
        b'{"nbformat": 4, "cells": [{}], "metadata": []}',
    ],
)  # fmt: skip
def test_no_file_is_too_broken(tmp_path: Path, content: bytes):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "hw.ipynb").write_bytes(content)
    (tmp_path / "release").mkdir()
    nbformat.write(release(), tmp_path / "release" / "hw.ipynb")
    notes = repair(tmp_path / "in", tmp_path / "release", tmp_path / "out")
    assert notes
    assert names(nbformat.read(tmp_path / "out" / "hw.ipynb", 4)) == ["setup", "f", "check-f", "why"]


def test_an_old_notebook_is_read(tmp_path: Path):
    old = {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"metadata": {}, "cells": [
        {"cell_type": "code", "input": ["def f(x):\n", "    return 7"], "language": "python", "outputs": [],
         "metadata": {}}]}]}  # fmt: skip
    (tmp_path / "hw.ipynb").write_text(json.dumps(old))
    notebook, trouble = read(tmp_path / "hw.ipynb")
    assert trouble == ""
    assert notebook is not None
    assert source(mend(notebook, release()).notebook, "f") == "def f(x):\n    return 7"


def mended_name(folder: Path, beside: str) -> str:
    """Which notebook is taken for hw.ipynb while a newer one of this name lies beside it."""
    nbformat.write(release(), folder / beside)
    later = (folder / beside).stat().st_mtime + 10
    os.utime(folder / beside, (later, later))
    path, _ = find(folder, "hw.ipynb", single=True)
    (folder / beside).unlink()
    return path.name if path else ""


def test_a_renamed_notebook_is_found_and_links_are_not_followed(tmp_path: Path):
    (tmp_path / "secret.txt").write_text("the roster")
    folder = tmp_path / "in"
    folder.mkdir()
    os.symlink(tmp_path / "secret.txt", folder / "hw.ipynb")
    nbformat.write(release(), folder / "HW (3)<b>.ipynb")
    os.symlink(tmp_path / "secret.txt", folder / "data.txt")
    assert mended_name(folder, "practice_hw.ipynb") == "HW (3)<b>.ipynb"  # newer, but not what was released
    path, note = find(folder, "hw.ipynb", single=True)
    assert path == folder / "HW (3)<b>.ipynb"
    assert note == "HW (3)?b?.ipynb was graded as hw.ipynb"
    (tmp_path / "release").mkdir()
    nbformat.write(release(), tmp_path / "release" / "hw.ipynb")
    repair(folder, tmp_path / "release", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["hw.ipynb"]
