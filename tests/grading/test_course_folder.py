"""A course folder: made once, never overwritten, and every mistake in its files told with what to change."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from grading.__main__ import main
from grading.course.new_course import new_course
from grading.course.settings import Assignment, CourseError, load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_course(tmp_path / "course")
    return tmp_path / "course"


def test_a_new_folder_is_complete_and_has_draws_of_its_own(tmp_path: Path, folder: Path):
    new_course(tmp_path / "other")
    course, other = load(folder), load(tmp_path / "other")
    assert course.id == "course"
    assert len(course.seed) == 16
    assert course.seed != other.seed
    assert course.roster() == {}
    assert course.extensions() == {}
    assert course.source("ps02").name == "ps02_collectives.py"


def test_it_says_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert main(["new-course", "my course"]) == 0
    said = capsys.readouterr().out
    assert f"export PATH=\"{Path(sys.executable).parent}:$PATH\"\n  cd 'my course'\n  grading doctor" in said
    assert "grading release ps02" in said
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert main(["new-course", "my course"]) == 0
    assert "export PATH" not in capsys.readouterr().out


def test_making_it_again_adds_what_is_missing_and_changes_nothing(folder: Path):
    (folder / "roster.csv").write_text("id\nada\n")
    (folder / "README.md").unlink()
    assert new_course(folder) == [str(folder / "README.md")]
    assert list(load(folder).roster()) == ["ada"]


def test_no_course_is_made_among_other_files_or_in_the_repository(tmp_path: Path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CourseError, match="name a new or an empty folder"):
        new_course(tmp_path)
    with pytest.raises(CourseError, match="is the repository itself"):
        new_course(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id = ", "course.toml cannot be read"),
        ('colour = "red"', "colour is not known; there is id, seed"),
        ("[assignments.ps02]\ndue = 2027-03-12", r"\[assignments.ps02\]: due needs a time and a zone"),
        ("[assignments.ps02]\ndue = 2027-03-12T23:59:00", "due needs a time and a zone"),
        ("[assignments.ps02]\ntest_attempts = 0", "test_attempts is a number of at least 1"),
        ("[assignments.ps02]\nlate_penalty = 10", "late_penalty is a share of the points per day, from 0 to 1"),
        ("[assignments.ps02]\nlate_days = -1", "late_days is a whole number"),
        ("[assignments]\nps02 = 3", r"write an assignment as \[assignments.NAME\]"),
        ("[limits]\ncell_s = 500", "0 < cell_s <= notebook_s"),
        ('[limits]\ncell_s = "x"', "wrong type"),
    ],
)
def test_a_mistake_in_course_toml_is_told(folder: Path, text: str, message: str):
    (folder / "course.toml").write_text(text)
    with pytest.raises(CourseError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name\nada\n", "it lacks id"),
        ("id\nada\nada\n", "line 3: ada is there twice"),
        ("id\n../ada\n", "line 2: '../ada' cannot be an id"),
        ("id,first_name\n,Ada\n", "line 2: id is empty"),
        ("id\n*\n", "cannot be an id"),
    ],
)
def test_a_mistake_in_the_roster_is_told_with_its_line(folder: Path, text: str, message: str):
    (folder / "roster.csv").write_text(text)
    with pytest.raises(CourseError, match=message):
        load(folder).roster()


def test_a_spreadsheets_roster_is_read(folder: Path):
    (folder / "roster.csv").write_bytes("\ufeffid,first_name,also\r\n ada , Ada ,17 18\r\n,,\r\n".encode())
    (learner,) = load(folder).roster().values()
    assert (learner.id, learner.first_name, learner.also) == ("ada", "Ada", ("17", "18"))


def test_an_extension_moves_one_learners_deadline(folder: Path):
    (folder / "course.toml").write_text("[assignments.ps02]\ndue = 2027-03-12T12:00:00+00:00\n")
    (folder / "extensions.csv").write_text("learner,assignment,days\nada,ps02,1.5\nkurt,*,2\n")
    course, due = load(folder), datetime(2027, 3, 12, 12, tzinfo=UTC)
    assert course.deadline("ps02", "emmy") == due
    assert course.deadline("ps02", "ada") == due + timedelta(days=1.5)
    assert course.deadline("ps02", "kurt") == due + timedelta(days=2)
    assert course.deadline("ps03", "kurt") is None
    (folder / "extensions.csv").write_text("learner,assignment,days\nada,ps02,soon\n")
    with pytest.raises(CourseError, match="line 2: days is a number, not 'soon'"):
        load(folder).extensions()


def test_an_assignment_that_is_not_there_is_told_with_those_that_are(folder: Path):
    with pytest.raises(CourseError, match=r"no source of ps77 .* there are: .*ps02"):
        load(folder).source("ps77")
    with pytest.raises(CourseError, match="cannot be an assignment's name"):
        load(folder).assignment("../ps02")
    assert load(folder).assignment("ps77") == Assignment("ps77")


def test_a_private_source_takes_the_place_of_a_public_one(folder: Path):
    (folder / "assignments" / "ps02_mine.py").touch()
    assert load(folder).source("ps02").name == "ps02_mine.py"
    (folder / "assignments" / "ps02_other.py").touch()
    with pytest.raises(CourseError, match=r"keep one of ps02_mine\.py, ps02_other\.py"):
        load(folder).source("ps02")


def test_the_command_says_what_to_do_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["grade", "ps02"]) == 1
    assert "is no course folder" in capsys.readouterr().err
    assert main(["frobnicate"]) == 2
    assert "grading grade" in capsys.readouterr().err


def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "course.toml")

    monkeypatch.setattr("grading.course.new_course.write_atomically", full)
    assert main(["new-course", str(tmp_path / "course")]) == 1
    assert "course.toml: No space left on device" in capsys.readouterr().err
