"""Collecting: what learning systems give becomes one submission for each learner, and the rest is told."""

import os
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from grading.course.collect import collect
from grading.course.new_course import new_course
from grading.course.record import submitted_at
from grading.course.settings import Course, CourseError, load

ROSTER = """id,first_name,last_name,email,also
ada,Ada,Lovelace,ada@example.org,100234
kurt,Kurt,Gödel,kurt@example.org,100235
ann,Ann,Lee,ann@example.org,
ann-lee,Anna,Leeds,leeds@example.org,
"""
DUE = datetime(2027, 3, 12, 12, tzinfo=UTC)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    new_course(tmp_path / "course")
    (tmp_path / "course" / "roster.csv").write_text(ROSTER, encoding="utf-8")
    (tmp_path / "course" / "course.toml").write_text(f"[assignments.ps02]\ndue = {DUE.isoformat()}\nlate_days = 2\n")
    (tmp_path / "course" / "extensions.csv").write_text("learner,assignment,days\nkurt,ps02,3\n")
    return load(tmp_path / "course")


def archive(path: Path, *entries: tuple[str, str], when: datetime = DUE - timedelta(hours=1)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries:
            local = when.astimezone().timetuple()[:6]
            file.writestr(zipfile.ZipInfo(name, date_time=local), content)
    return path


def inbox(course: Course, name: str) -> Path:
    return course.root / "inbox" / "ps02" / name


def got(course: Course) -> dict[str, dict[str, str]]:
    """Learner -> file -> content, of what counts."""
    found: dict[str, dict[str, str]] = {}
    for folder in sorted((course.root / "submitted").glob("*/ps02")):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "timestamp.txt")
        found[folder.parent.name] = {path.relative_to(folder).as_posix(): path.read_text() for path in files}
    return found


def test_folders_by_learner(course: Course):
    archive(
        inbox(course, "all.zip"),
        ("Ada Lovelace_4711_assignsubmission_file_/ps02.ipynb", "ada's"),
        ("Ada Lovelace_4711_assignsubmission_file_/answers-02.txt", "t1"),
        ("Godel, Kurt_4712_assignsubmission_file_/ps02.ipynb", "kurt's"),
        ("Zoe Zorn_4713_assignsubmission_file_/ps02.ipynb", "who?"),
        ("__MACOSX/Ada Lovelace_4711/._ps02.ipynb", "rubbish"),
    )
    lines = collect(course, "ps02")
    assert got(course) == {"ada": {"answers-02.txt": "t1", "ps02.ipynb": "ada's"}, "kurt": {"ps02.ipynb": "kurt's"}}
    assert "Zoe Zorn_4713_assignsubmission_file_: belongs to nobody in roster.csv, and was left where it is" in lines
    assert lines[-1] == "2 of 4 handed in ps02"
    assert "nothing from 2: ann, ann-lee" in lines


def test_flat_files_with_numbers(course: Course):
    archive(
        inbox(course, "submissions.zip"),
        ("lovelaceada_100234_9911_ps02-1.ipynb", "ada's"),
        ("godelkurt_LATE_100235_9912_ps02.ipynb", "kurt's"),
        ("godelkurt_LATE_100235_9912_helper.py", "h"),
    )
    collect(course, "ps02")
    assert got(course) == {"ada": {"ps02-1.ipynb": "ada's"}, "kurt": {"helper.py": "h", "ps02.ipynb": "kurt's"}}


def test_folders_and_files_named_by_id_and_zip_files_inside(course: Course):
    inbox(course, "ada").mkdir(parents=True)
    (inbox(course, "ada") / "ps02.ipynb").write_text("ada's")
    (inbox(course, "kurt_ps02.ipynb")).write_text("kurt's")
    archive(inbox(course, "ann-lee.zip"), ("ps02.ipynb", "anna's"), (".minidist/questions/02.json", "{}"))
    archive(inbox(course, "ann@example.org.zip"), ("ps02/ps02.ipynb", "ann's"))
    collect(course, "ps02")
    files = got(course)
    assert files["ada"] == {"ps02.ipynb": "ada's"}
    assert files["kurt"] == {"ps02.ipynb": "kurt's"}
    assert files["ann-lee"] == {".minidist/questions/02.json": "{}", "ps02.ipynb": "anna's"}
    assert files["ann"] == {"ps02/ps02.ipynb": "ann's"}


def test_the_newest_of_several_counts_and_the_one_before_is_kept(course: Course):
    archive(inbox(course, "1.zip"), ("ada/ps02.ipynb", "first"), when=DUE - timedelta(days=2))
    assert not [line for line in collect(course, "ps02") if "submissions" in line]
    archive(inbox(course, "2.zip"), ("ada/ps02.ipynb", "second"), when=DUE - timedelta(days=1))
    lines = collect(course, "ps02")
    assert got(course)["ada"] == {"ps02.ipynb": "second"}
    assert any("ada: 2 submissions; the newest counts, of 2027-03-11 12:00 UTC" in line for line in lines)
    assert any("ada: a newer submission replaced" in line for line in lines)
    (kept,) = (course.root / "replaced" / "ada" / "ps02").glob("*/ps02.ipynb")
    assert kept.read_text() == "first"
    before = submitted_at(course.folder("submitted", "ps02", "ada"))
    assert collect(course, "ps02")[-1] == "1 of 4 handed in ps02"  # again: nothing changes
    assert submitted_at(course.folder("submitted", "ps02", "ada")) == before
    assert len(list((course.root / "replaced" / "ada" / "ps02").iterdir())) == 1


def test_late_ones_and_extensions_are_told(course: Course):
    archive(inbox(course, "1.zip"), ("ada/ps02.ipynb", ""), ("kurt/ps02.ipynb", ""), when=DUE + timedelta(hours=30))
    lines = collect(course, "ps02")
    assert "ada: late by 30.0 hours" in lines
    assert "kurt: in time, with an extension" in lines
    archive(inbox(course, "2.zip"), ("kurt/ps02.ipynb", "x"), when=DUE + timedelta(days=5))
    assert "kurt: late by 2.0 days after an extension" in collect(course, "ps02")


def test_what_was_put_into_submitted_by_hand_gets_its_files_time(course: Course):
    for who in ("ada", "stranger"):
        place = course.folder("submitted", "ps02", who)
        place.mkdir(parents=True)
        (place / "ps02.ipynb").write_text("{}")
        os.utime(place / "ps02.ipynb", (DUE.timestamp() - 3600,) * 2)
    lines = collect(course, "ps02")
    assert "ada: no time was given; 2027-03-12 11:00 UTC was taken, of its newest file" in lines
    assert "stranger: not in roster.csv; add a line there, or delete submitted/stranger/ps02" in lines
    assert submitted_at(course.folder("submitted", "ps02", "ada")) == datetime(2027, 3, 12, 11)


@pytest.mark.parametrize(
    "name", ["ada/{}x.txt".format("../" * up) for up in range(1, 5)] + ["/ada/x.txt", "ada\\..\\..\\x.txt"]
)
def test_nothing_is_written_outside_of_the_learners_folder(course: Course, tmp_path: Path, name: str):
    archive(inbox(course, "evil.zip"), (name, "out"))
    collect(course, "ps02")
    assert [*tmp_path.rglob("x.txt"), *tmp_path.parent.glob("x.txt")] == [
        course.folder("submitted", "ps02", "ada") / "x.txt"
    ]


def test_a_damaged_zip_file_and_a_huge_submission_are_told(course: Course, monkeypatch: pytest.MonkeyPatch):
    inbox(course, "").mkdir(parents=True, exist_ok=True)
    inbox(course, "broken.zip").write_bytes(b"PK\x03\x04 and no more")
    archive(inbox(course, "all.zip"), ("ada/ps02.ipynb", "x" * 100), ("kurt/ps02.ipynb", "y"))
    monkeypatch.setattr("grading.course.collect.LARGEST", 50)
    lines = collect(course, "ps02")
    assert any(line.startswith("broken.zip: cannot be unpacked") for line in lines)
    assert any(line.startswith("ada: more than") for line in lines)
    assert set(got(course)) == {"kurt"}


def test_one_submission_that_cannot_be_read_stops_nobody_else(course: Course):
    one = archive(inbox(course, "ada.zip"), ("ps02.ipynb", "ada's"))
    damaged = one.read_bytes().replace(b"ada's", b"adas?")  # its sum no longer fits
    one.write_bytes(damaged)
    archive(inbox(course, "all.zip"), ("ann/a", "1"), ("ann/a/b", "2"), ("kurt/ps02.ipynb", "kurt's"))
    dated = archive(inbox(course, "leeds.zip"), ("ann-lee/ps02.ipynb", "leeds'"))
    stamp = zipfile.ZipFile(dated).infolist()[0]
    day = ((stamp.date_time[0] - 1980) << 9 | stamp.date_time[1] << 5 | stamp.date_time[2]).to_bytes(2, "little")
    dated.write_bytes(dated.read_bytes().replace(day, b"\0\0"))  # a day that no calendar has
    lines = collect(course, "ps02")
    assert got(course) == {"ann-lee": {"ps02.ipynb": "leeds'"}, "kurt": {"ps02.ipynb": "kurt's"}}
    for who in ("ada", "ann"):
        assert any(line.startswith(f"{who}: could not be collected") for line in lines), lines


def test_a_learners_zip_file_inside_that_of_the_learning_system(course: Course, tmp_path: Path):
    inner = archive(tmp_path / "ps02.zip", ("ps02/ps02_collectives.ipynb", "ada's"))
    inbox(course, "").mkdir(parents=True)
    with zipfile.ZipFile(inbox(course, "moodle.zip"), "w") as outer:
        outer.writestr("Ada Lovelace_100234_assignsubmission_file/ps02.zip", inner.read_bytes())
        outer.writestr("kurt/notes.txt", "no notebook")
    lines = collect(course, "ps02")
    assert list(got(course)["ada"].values()) == ["ada's"]
    assert "kurt: no notebook among notes.txt" in lines


def test_a_path_that_is_not_there_is_told(course: Course):
    with pytest.raises(CourseError, match="does not exist"):
        collect(course, "ps02", [Path("nowhere.zip")])
    with pytest.raises(CourseError, match=r"there is no .*inbox/ps02: make it"):
        collect(course, "ps02")
    (course.root / "inbox" / "ps02").mkdir()
    assert collect(course, "ps02")[-1] == "0 of 4 handed in ps02"


def test_a_full_disk_leaves_the_submission_that_was_there(course: Course, monkeypatch: pytest.MonkeyPatch):
    archive(inbox(course, "1.zip"), ("ada/ps02.ipynb", "first"), when=DUE - timedelta(days=2))
    collect(course, "ps02")
    archive(inbox(course, "2.zip"), ("ada/ps02.ipynb", "second"), when=DUE - timedelta(days=1))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("grading.course.collect.shutil.copytree", full)
        with pytest.raises(OSError, match="No space"):
            collect(course, "ps02")
    assert got(course)["ada"] == {"ps02.ipynb": "first"}
    collect(course, "ps02")
    assert got(course)["ada"] == {"ps02.ipynb": "second"}
