"""workspace/: updates arrive, and nothing of the learner's is ever lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course import workspace
from course.build import notebook_bytes
from course.files import ROOT as REPOSITORY
from course.files import locked, write_atomically

ONE = "# %% [markdown]\n# Hello\n\n# %% tags=['run']\n1 + 1\n".replace("'", '"')
TWO = ONE.replace("Hello", "Hello again")
THREE = TWO.replace("1 + 1", "2 + 2")


class Course:
    """A course folder with one lesson, and the learner's workspace."""

    def __init__(self, folder: Path):
        self.notebooks, self.workspace = folder / "course", folder / "workspace"
        self.notebooks.mkdir()
        self.mine = self.workspace / "00_start.ipynb"

    def ship(self, source: str) -> list[str]:
        (self.notebooks / "00_start.ipynb").write_bytes(notebook_bytes(source))
        return workspace.fill(self.notebooks, self.workspace)

    def edit(self, **changes: object) -> None:
        """Change the code cell as the learner or a run of it does."""
        notebook = json.loads(self.mine.read_bytes())
        notebook["cells"][1].update(changes)
        self.mine.write_text(json.dumps(notebook), encoding="utf-8")

    def run(self, text: str = "2") -> None:
        self.edit(outputs=[{"output_type": "stream", "name": "stdout", "text": [text]}], execution_count=7)

    def names(self) -> set[str]:
        return {path.name for path in self.workspace.glob("*.ipynb")}


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def test_the_first_fill_hands_out_and_the_second_does_nothing(course: Course):
    assert course.ship(ONE) == ["README.md: new", "AGENTS.md: new", "00_start.ipynb: new"]
    assert course.mine.read_bytes() == notebook_bytes(ONE)
    stamps = {path: path.stat().st_mtime_ns for path in course.workspace.iterdir()}
    assert course.ship(ONE) == []
    del stamps[course.workspace / ".lock"]
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_an_unchanged_copy_is_updated(course: Course):
    course.ship(ONE)
    assert course.ship(TWO) == ["00_start.ipynb: updated"]
    assert course.mine.read_bytes() == notebook_bytes(TWO)
    assert course.names() == {"00_start.ipynb"}


def test_a_copy_that_was_only_run_is_updated_and_keeps_its_outputs(course: Course):
    course.ship(ONE)
    course.run("forty-two")
    assert course.ship(TWO) == ["00_start.ipynb: updated"]
    cells = json.loads(course.mine.read_bytes())["cells"]
    assert "Hello again" in "".join(cells[0]["source"])
    assert cells[1]["outputs"][0]["text"] == ["forty-two"]
    assert cells[1]["execution_count"] == 7


def test_outputs_of_a_cell_that_is_gone_are_kept_beside(course: Course):
    course.ship(TWO)
    course.run("precious")
    (line,) = course.ship(THREE)
    assert "00_start.old.ipynb" in line
    assert b"precious" in (course.workspace / "00_start.old.ipynb").read_bytes()
    assert course.mine.read_bytes() == notebook_bytes(THREE)
    course.run("also precious")
    course.ship(ONE)
    assert b"precious" in (course.workspace / "00_start.old.ipynb").read_bytes()
    assert b"also precious" in (course.workspace / "00_start.old-2.ipynb").read_bytes()


def test_a_changed_copy_stays_and_the_new_version_comes_beside_once(course: Course):
    course.ship(ONE)
    course.edit(source="my own work")
    changed = course.mine.read_bytes()
    assert course.ship(ONE) == []  # no newer version, nothing to offer
    (line,) = course.ship(TWO)
    assert "you changed it" in line
    assert course.mine.read_bytes() == changed
    beside = course.workspace / "00_start.new.ipynb"
    assert beside.read_bytes() == notebook_bytes(TWO)
    beside.unlink()
    assert course.ship(TWO) == []  # offered, looked at, deleted
    assert not beside.exists()


def test_a_version_beside_is_replaced_only_while_untouched(course: Course):
    course.ship(ONE)
    course.edit(source="my own work")
    course.ship(TWO)
    course.ship(THREE)
    beside = course.workspace / "00_start.new.ipynb"
    assert beside.read_bytes() == notebook_bytes(THREE)
    beside.write_bytes(beside.read_bytes() + b"\n")  # the learner's now
    course.ship(TWO)
    assert beside.read_bytes() == notebook_bytes(THREE) + b"\n"
    assert (course.workspace / "00_start.new-2.ipynb").read_bytes() == notebook_bytes(TWO)


def test_taking_over_the_new_version_makes_updates_arrive_again(course: Course):
    course.ship(ONE)
    course.edit(source="my own work")
    course.ship(TWO)
    os.replace(course.workspace / "00_start.new.ipynb", course.mine)
    assert course.ship(THREE) == ["00_start.ipynb: updated"]


def test_a_deleted_copy_comes_back_fresh_and_a_renamed_one_is_left_alone(course: Course):
    course.ship(ONE)
    course.edit(source="my own work")
    kept = course.workspace / "my attempt.ipynb"
    course.mine.rename(kept)
    changed = kept.read_bytes()
    assert course.ship(ONE) == ["00_start.ipynb: new"]
    assert kept.read_bytes() == changed


@pytest.mark.parametrize("content", [b"", b"{ half a note", b'{"cells": 3}', b"\xff\xfe", b"[]"])
def test_an_unreadable_copy_is_the_learners(course: Course, content: bytes):
    course.ship(ONE)
    course.mine.write_bytes(content)
    course.ship(TWO)
    assert course.mine.read_bytes() == content
    assert (course.workspace / "00_start.new.ipynb").read_bytes() == notebook_bytes(TWO)


@pytest.mark.parametrize(
    "manifest", [None, b"", b"{]", b'{"00_start.ipynb": 3}', b'{"00_start.ipynb": {"version": 1}}']
)
def test_without_a_readable_manifest_what_differs_is_the_learners(course: Course, manifest: bytes | None):
    course.ship(ONE)
    path = course.workspace / workspace.MANIFEST
    path.unlink() if manifest is None else path.write_bytes(manifest)
    course.edit(source="my own work")
    changed = course.mine.read_bytes()
    course.ship(TWO)
    assert course.mine.read_bytes() == changed
    assert (course.workspace / "00_start.new.ipynb").read_bytes() == notebook_bytes(TWO)


def test_a_lesson_that_left_the_course_stays_in_the_workspace(course: Course):
    course.ship(ONE)
    (course.notebooks / "00_start.ipynb").unlink()
    assert workspace.fill(course.notebooks, course.workspace) == []
    assert course.mine.exists()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def crash(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_fills_at_the_same_time_wait_for_each_other(course: Course):
    course.ship(ONE)
    course.edit(source="my own work")
    changed = course.mine.read_bytes()
    (course.notebooks / "00_start.ipynb").write_bytes(notebook_bytes(TWO))
    code = "import sys; from pathlib import Path; from course.workspace import fill; print('in', flush=True); "
    code += "fill(*map(Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(course.notebooks), str(course.workspace)]
    with locked(course.workspace):
        runs = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert [run.stdout.readline() for run in runs if run.stdout] == ["in\n", "in\n"]
        time.sleep(0.3)
        assert [run.poll() for run in runs] == [None, None]
        assert course.names() == {"00_start.ipynb"}
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode == 0
    assert course.mine.read_bytes() == changed
    assert course.names() == {"00_start.ipynb", "00_start.new.ipynb"}  # offered once
