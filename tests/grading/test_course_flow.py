"""A small class from release to export: lateness, blocked criteria, grading by hand, a wrong check, feedback."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode

from grading import __main__ as command
from grading.bank import Bank
from grading.course import audit
from grading.course.export import export
from grading.course.feedback import feedback
from grading.course.grade import grade
from grading.course.nbgrader_settings import gradebook
from grading.course.new_course import new_course
from grading.course.record import graded_notebooks, outcomes
from grading.course.regrade import regrade
from grading.course.release import release
from grading.course.report import report
from grading.course.settings import Course, CourseError, load
from grading.fill import variants
from grading.verdict import explain

SMALL = Path(__file__).parent / "small_course"
ROOT = Path(__file__).parents[2]
DUE = datetime(2027, 3, 12, 12, tzinfo=UTC)
SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=alert(1)>"
pytestmark = pytest.mark.slow


def make(root: Path) -> Course:
    new_course(root)
    shutil.copytree(SMALL, root, dirs_exist_ok=True)
    (root / "roster.csv").write_text(
        "id,first_name,last_name,email\nada,Ada,Lovelace,\nkurt,=Kurt,,\nemmy,,,\nlate,,,\n"
    )
    (root / "extensions.csv").write_text("learner,assignment,days\nemmy,small,3\n")
    lines = [f'seed = "secret"\n[assignments.small]\ndue = {DUE.isoformat()}', "late_days = 2", "late_penalty = 0.25"]
    (root / "course.toml").write_text("\n".join(lines) + "\n")
    return load(root)


def solved(course: Course, text: str = "n - 1") -> NotebookNode:
    """The instructor's notebook, handed in as a learner's."""
    (notebook,) = graded_notebooks(course.folder("source", "small")).values()
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == "messages":
            cell.source = text
    return notebook


def hand_in(course: Course, who: str, notebook: NotebookNode, when: datetime = DUE - timedelta(hours=1)) -> None:
    folder = course.folder("submitted", "small", who)
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, folder / "small.ipynb")
    (folder / "timestamp.txt").write_text(when.strftime("%Y-%m-%d %H:%M:%S UTC"))


def rows(course: Course) -> dict[str, dict[str, str]]:
    export(course, course.root / "grades.csv")
    with open(course.root / "grades.csv", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """Released, and graded once."""
    made = make(tmp_path_factory.mktemp("flow") / "course")
    release(made, "small")
    hand_in(made, "ada", solved(made, f"n - 1 {SCRIPT}"))
    hand_in(made, "emmy", solved(made), DUE + timedelta(days=2, hours=1))
    hand_in(made, "late", solved(made), DUE + timedelta(hours=25))
    grade(made, "small", jobs=2)
    return made


def test_a_release_gives_nothing_away(course: Course):
    bank = Bank.load(*course.questions, seed=course.seed)
    explained = {
        part.why for each in bank.of("90", "test") for v in range(len(variants(each))) for part in explain(each, v)
    }
    checks = (course.root / "checks" / "small.py").read_text().splitlines()
    source = (course.root / "assignments" / "small.py").read_text()
    solution = [
        line for line in source.splitlines() if "left_buffer" in line or "travelling" in line or "by hand" in line
    ]
    secrets = explained | {line for line in checks if len(line) > 25} | set(solution)
    assert len(secrets) > 30
    assert audit.leaks(course.folder("release", "small"), secrets) == []
    with zipfile.ZipFile(course.folder("release") / "small.zip") as archive:
        names = archive.namelist()
    assert names == ["small/.minidist/questions/90.json", "small/AGENTS.md", "small/small.ipynb"]
    assert "raise NotImplementedError" in (course.folder("release", "small") / "small.ipynb").read_text()


def test_a_release_that_would_give_something_away_is_not_made(course: Course, tmp_path: Path):
    leaky = make(tmp_path / "leaky")
    source = leaky.root / "assignments" / "small.py"
    said = "# %% [markdown]\n# Hint: keep a `running_sum, travelling = x.clone(), x` and go round.\n"
    source.write_text(source.read_text() + "\n" + said)
    release(leaky, "small")  # said outside of the solution too, so it is no secret
    (leaky.root / "assignments" / "small.py").write_text(
        source.read_text().replace(
            "# Two functions", "# The ring closes, so going left from zero leads to the last one.\n# Two"
        )
    )
    before = (leaky.folder("release") / "small.zip").read_bytes()
    with pytest.raises(CourseError, match=r"would give away:\n  small.ipynb: The ring closes"):
        release(leaky, "small")
    assert (leaky.folder("release") / "small.zip").read_bytes() == before
    (leaky.root / "submitted").mkdir(exist_ok=True)


def test_lateness_is_taken_off_but_for_extensions(course: Course):
    found = rows(course)
    assert {who: (row["points"], row["late_penalty"]) for who, row in found.items()} == {
        "ada": ("8", "0"),
        "emmy": ("8", "0"),
        "late": ("4", "4"),  # two days begun, a quarter each
        "kurt": ("0", "0"),
    }
    assert found["kurt"]["first_name"] == "'=Kurt"
    assert found["ada"]["by_hand"] == "1"


def test_feedback_holds_the_learners_and_nothing_of_ours(course: Course):
    pages = feedback(course, "small")
    assert sorted(page.parent.parent.name for page in pages) == ["ada", "emmy", "late"]
    (page,) = [page for page in pages if page.parent.parent.name == "ada"]
    text = page.read_text()
    assert "S.2 total: 5 of 5 points" in text
    assert "secret_neighbours" not in text
    assert "<script>document" not in text
    assert "onerror=alert" not in text.replace("&lt;img src=x onerror=alert", "")
    assert 'src="http' not in text
    assert "one point for the number" not in text
    assert sorted(path.name for path in page.parent.iterdir()) == ["small.html"]
    with zipfile.ZipFile(course.folder("feedback") / "small.zip") as archive:
        assert "small/ada/small.html" in archive.namelist()


def test_a_repaired_check_changes_what_it_should_and_says_for_whom(course: Course):
    check = course.root / "checks" / "small.py"
    right = check.read_text()
    check.write_text(right.replace("torch.stack(list(xs)).sum(0)", "torch.stack(list(xs)).sum(0) + 1"))
    wrong = regrade(course, "small", ["ada"])
    assert wrong == [
        "ada: S.2 basic: passed -> failed, 3 -> 0 points",
        "ada: S.2 five ranks: passed -> failed, 1 -> 0 points",
        "ada: S.2 x unchanged: passed -> failed, 1 -> 0 points",
    ]
    (page,) = feedback(course, "small", ["ada"])
    assert "expected" in page.read_text()
    assert rows(course)["late"]["points"] == "4"
    check.write_text(right)
    assert len(regrade(course, "small", ["ada"])) == 3
    assert rows(course)["ada"]["points"] == "8"


def test_blocked_criteria_wait_for_a_person_and_are_exported(course: Course, monkeypatch: pytest.MonkeyPatch):
    from grading.course.ranks import RanksBesideKernel
    from grading.ranks.host import NoRanks

    def none_here(self: RanksBesideKernel) -> None:
        raise NoRanks("this machine has no ranks")

    with monkeypatch.context() as patch:
        patch.setattr(RanksBesideKernel, "start", none_here)
        (result,) = grade(course, "small", ["emmy"])
    assert result.score is not None
    assert (result.score.points, result.score.blocked) == (0, 8)
    row = rows(course)["emmy"]
    assert (row["points"], row["points_possible"], row["points_blocked"], row["by_hand"]) == ("0", "13", "8", "3")
    with gradebook(course) as book:
        notebook = book.find_submission_notebook("small", "small", "emmy")
        assert {grade.name for grade in notebook.grades if grade.needs_manual_grade} == {
            "check-S-1",
            "check-S-2",
            "messages",
        }
        comments = {comment.name: comment.auto_comment for comment in notebook.comments}
        assert "graded by hand: basic, five ranks, x unchanged" in comments["total"]
        book.find_grade("check-S-2", "small", "small", "emmy").manual_score = 4
        book.db.commit()
    row = rows(course)["emmy"]
    assert (row["points"], row["points_blocked"]) == ("4", "3")
    assert "| S.1 | basic | 1.00 | - | 1 |" in report(course, "small")
    (result,) = grade(course, "small", ["emmy"])  # a score by hand stays
    assert result.score is not None
    assert (result.score.points, result.score.blocked) == (7, 0)


def test_a_submission_that_cannot_be_graded_keeps_its_score_and_waits(course: Course, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake in the grader")

    before = rows(course)
    with monkeypatch.context() as patch:
        patch.setattr("grading.course.grade.repair", broken)
        (result,) = grade(course, "small", ["late"])
    assert result.score is None
    assert "look at it by hand" in result.notes[0]
    assert rows(course)["late"] == {**before["late"], "by_hand": "4"}
    assert "a mistake in the grader" in (course.root / ".grading" / "logs" / "small" / "late.log").read_text()
    (notebook,) = graded_notebooks(course.folder("autograded", "small", "late")).values()
    assert outcomes(notebook)["check-S-2"].points == 5


@pytest.fixture(scope="module")
def formgrader(course: Course) -> Iterator[str]:
    environment = {**os.environ, "PORT": "8790", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "course", "open", str(course.root)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "token=" in line:
                yield line.strip()
                break
        else:
            pytest.fail("the server ended")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_formgrader_shows_submissions_and_takes_scores(course: Course, formgrader: str):
    base, _, token = formgrader.partition("/formgrader?token=")

    def fetch(path: str, method: str = "GET", **data: object) -> str:
        headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
        body = json.dumps(data).encode() if data else None
        asked = urllib.request.Request(f"{base}/formgrader/{path}", body, headers, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()

    (assignment,) = json.loads(fetch("api/assignments"))
    assert (assignment["name"], assignment["num_submissions"], assignment["max_score"]) == ("small", 3, 13)
    notebooks = {each["student"]: each["id"] for each in json.loads(fetch("api/submitted_notebooks/small/small"))}
    page = fetch(f"submissions/{notebooks['ada']}")
    assert 'id="messages"' in page
    assert "S.2 total: 5 of 5 points" in page
    assert "<script>document" not in page
    grades = json.loads(fetch(f"api/grades?submission_id={notebooks['ada']}"))
    (by_hand,) = [each for each in grades if each["name"] == "messages"]
    fetch(f"api/grade/{by_hand['id']}", "PUT", manual_score=1.5, extra_credit=None)
    assert rows(course)["ada"]["points"] == "9.5"
    assert rows(course)["ada"]["by_hand"] == "0"


def test_a_check_file_that_is_broken_stops_everything_before_it_starts(course: Course):
    check = course.root / "checks" / "small.py"
    right, before = check.read_text(), rows(course)
    for broken, where in {right + "\nraise KeyError('x')\n": "KeyError", "def f(:\n": "SyntaxError"}.items():
        check.write_text(broken)
        with pytest.raises(CourseError, match=rf"small.py, line \d+ are broken \({where}.*Nothing was graded"):
            grade(course, "small")
    check.write_text("x = 1\n")
    with pytest.raises(CourseError, match="defines no exercise"):
        grade(course, "small")
    check.write_text(right)
    (course.root / "questions" / "91.yaml").write_text("module: '91'\nquestions: [{id: x}]\n")
    with pytest.raises(CourseError, match="nothing was graded"):
        grade(course, "small")
    (course.root / "questions" / "91.yaml").unlink()
    assert rows(course) == before


def test_missing_folders_are_told(course: Course, tmp_path: Path):
    fresh = make(tmp_path / "fresh")
    with pytest.raises(CourseError, match="run grading release small first"):
        grade(fresh, "small")
    with pytest.raises(CourseError, match="was graded yet"):
        feedback(fresh, "small")
    with pytest.raises(CourseError, match="was graded yet"):
        report(fresh, "small")
    with pytest.raises(CourseError, match="nobody has handed in nothing"):
        grade(course, "small", ["nobody"])
    (course.root / "roster.csv").rename(course.root / "roster.bak")
    try:
        with pytest.raises(CourseError, match=r"roster\.csv is missing"):
            grade(course, "small")
    finally:
        (course.root / "roster.bak").rename(course.root / "roster.csv")


def test_a_lost_gradebook_or_file_is_told_by_every_command_in_one_line(
    course: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(course.root)

    def said(*argv: str) -> str:
        capsys.readouterr()
        assert command.main(list(argv)) == 1
        return capsys.readouterr().err

    book = course.root / "gradebook.db"
    kept, anew = book.read_bytes(), "run grading release small and grading grade small again"
    try:
        book.unlink()
        for name in ("grade", "regrade", "feedback"):
            assert anew in said(name, "small")
        assert "the gradebook has no assignment, so" in said("export")
        book.write_bytes(b"rubbish" * 1000)
        for name in ("grade", "regrade", "feedback", "release"):
            assert "it is damaged. Move it away" in said(name, "small")
        book.unlink()
        release(course, "small")
        assert "the gradebook does not have ada, emmy, late: grade again" in said("feedback", "small")
    finally:
        book.write_bytes(kept)
    assert "has no assignment ps77, but small" in said("export", "ps77")
    assert "inbox/ps77: make it" in said("collect", "ps77")
    for path, words in {
        course.folder("release", "small") / "small.ipynb": "run grading release small again",
        course.folder("autograded", "small", "late") / "small.ipynb": "run grading grade small late again",
    }.items():
        whole = path.read_bytes()
        path.write_text("{")
        try:
            for name in ("grade",) if "release" in path.parts else ("regrade", "feedback", "report"):
                assert words in said(name, "small")
        finally:
            path.write_bytes(whole)


def test_grading_says_at_once_what_it_does_and_then_how_far_it_is(course: Course, capsys: pytest.CaptureFixture[str]):
    grade(course, "small", ["late", "emmy"], jobs=2)
    first, *rest = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("    ")]
    assert first.startswith("2 submissions of small, 2 at a time: about 10 s on a quiet machine")
    assert [re.sub(r"\d+ s: \w+ .*", "", line) for line in rest[:2]] == ["1 of 2, ", "2 of 2, "]


def test_a_full_or_read_only_disk_loses_no_grade(course: Course, monkeypatch: pytest.MonkeyPatch):
    before = rows(course)
    graded = (course.folder("autograded", "small", "late") / "small.ipynb").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("grading.course.record.os.replace", full)
        with pytest.raises(OSError, match="No space"):
            grade(course, "small", ["late"])
    assert (course.folder("autograded", "small", "late") / "small.ipynb").read_bytes() == graded
    from sqlalchemy.exc import OperationalError

    def read_only(*_: object, **__: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("attempt to write a readonly database"))

    with monkeypatch.context() as patch:
        patch.setattr("grading.course.grade.enter", read_only)
        with pytest.raises(CourseError, match=r"attempt to write a readonly database.*What it holds is as it was"):
            grade(course, "small", ["late"])
    assert {who: row["points"] for who, row in rows(course).items()} == {
        who: row["points"] for who, row in before.items()
    }


def test_without_a_sandbox_it_has_to_be_said(course: Course, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("grading.course.sandbox.problem", lambda: "bwrap is not installed")
    with pytest.raises(CourseError, match=r"no sandbox can be had here .bwrap is not installed.*--no-sandbox"):
        grade(course, "small")
    (result,) = grade(course, "small", ["late"], sandboxed=False)
    assert result.score is not None
    assert result.score.points == 8
    assert "WARNING: no sandbox" in capsys.readouterr().err
