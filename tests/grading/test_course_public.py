"""The public assignments, released, handed in and graded as in a course: references, empty ones, and mutants."""

import ast
import inspect
import re
import shutil
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode

from grading.check import exercises, find
from grading.course.feedback import feedback
from grading.course.grade import Graded, grade
from grading.course.new_course import new_course
from grading.course.outcome import Outcome
from grading.course.record import graded_notebooks, outcomes
from grading.course.release import release
from grading.course.settings import Course, load
from grading.mutants import Mutant, mutants

ASSIGNMENTS = {
    "ps02": "ps02_collectives",
    "ps03": "ps03_data_parallelism",
    "ps04": "ps04_zero",
    "ps05": "ps05_tensor_parallelism",
    "ps06": "ps06_pipeline_parallelism",
}
MUTANTS = 4
"""So many submissions consist of mutants only: each exercise is answered by one of its own, another one in each."""


def answered(notebook: NotebookNode, answers: dict[str, str]) -> NotebookNode:
    """The notebook with source in the place of the cells that define these functions."""
    for cell in notebook.cells:
        for function, source in answers.items():
            if (
                cell.cell_type == "code"
                and f"def {function}(" in cell.source
                and not cell.metadata.get("deletable", True)
            ):
                cell.source = source
    return notebook


def returning(what: str, names: list[str]) -> dict[str, str]:
    return {name: f"def {name}(first, second=None, *rest):\n    return {what}" for name in names}


def source_of(mutant: Mutant) -> str:
    """A cell that defines the exercise's function as this mutant does, with whatever the mutant calls.

    What other exercises ask for is left to the notebook, as in a learner's.
    """
    tree = ast.parse(inspect.getsource(inspect.getmodule(mutant.function)))  # type: ignore[arg-type]
    name, body = mutant.function.__name__, []
    others = {find(exercise).function for exercise in exercises()} - {name}
    others |= {given for exercise in exercises() for given in find(exercise).given}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "grading.mutants":
            continue
        if isinstance(node, ast.FunctionDef):
            if node.name in others:
                continue
            node.decorator_list = []
        body.append(ast.unparse(node))
    text = "\n".join(["def answer():", *(textwrap.indent(each, "    ") for each in body), f"    return {name}"])
    return f"{text}\n\n\n{find(mutant.exercise).function} = answer()"


def spread(assignment: str, number: int) -> dict[str, Mutant]:
    """By exercise, one of its mutants: those of different numbers lie far from one another in the list."""
    found = {}
    for exercise in sorted({m.exercise for m in mutants(assignment)}):
        of_it = [m for m in mutants(assignment) if m.exercise == exercise]
        found[exercise] = of_it[(number * len(of_it)) // MUTANTS]
    return found


@pytest.fixture(scope="module", params=ASSIGNMENTS)
def graded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The assignment's name, the course, and how each submission went."""
    assignment: str = request.param
    root = tmp_path_factory.mktemp(assignment) / "course"
    new_course(root)
    ids = ["reference", "empty", "none", "same", *(f"wrong{number}" for number in range(MUTANTS))]
    (root / "roster.csv").write_text("id,first_name,last_name,email\n" + "".join(f"{name},,,\n" for name in ids))
    course = load(root)
    release(course, assignment)
    file = f"{ASSIGNMENTS[assignment]}.ipynb"
    functions = [find(name).function for name in exercises() if name.startswith(assignment[2:])]
    submissions: dict[str, dict[str, str]] = {
        "empty": {},
        "none": returning("None", functions),
        "same": returning("second if second is not None else first", functions),
    }
    for number in range(MUTANTS):
        chosen = spread(assignment, number)
        submissions[f"wrong{number}"] = {find(name).function: source_of(each) for name, each in chosen.items()}
    for who, answers in submissions.items():
        notebook = nbformat.read(course.folder("release", assignment) / file, as_version=4)
        hand_in(course, assignment, who, answered(notebook, answers))
    solved = course.folder("submitted", assignment, "reference")
    solved.mkdir(parents=True)
    shutil.copy(course.folder("source", assignment) / file, solved / file)
    return assignment, course, {each.learner: each for each in grade(course, assignment, jobs=2)}


def hand_in(course: Course, assignment: str, who: str, notebook: NotebookNode) -> None:
    folder = course.folder("submitted", assignment, who)
    folder.mkdir(parents=True)
    nbformat.write(notebook, folder / f"{ASSIGNMENTS[assignment]}.ipynb")


def parts(course: Course, assignment: str, who: str) -> dict[str, Outcome]:
    (notebook,) = graded_notebooks(course.folder("autograded", assignment, who)).values()
    return {each.part: each for each in outcomes(notebook).values() if each.part in exercises()}


@pytest.mark.slow
class TestPublicAssignments:
    def test_everyone_has_a_verdict(self, graded: tuple[str, Course, dict[str, Graded]]):
        assert [who for who, each in graded[2].items() if each.score is None] == []
        assert len(graded[2]) == 4 + MUTANTS

    def test_the_reference_has_every_point(self, graded: tuple[str, Course, dict[str, Graded]]):
        assignment, course, _ = graded
        got = parts(course, assignment, "reference")
        assert {name: each.points for name, each in got.items()} == {
            name: find(name).points for name in exercises() if name.startswith(assignment[2:])
        }

    @pytest.mark.parametrize("who", ["empty", "none", "same"])
    def test_nothing_earns_nothing(self, graded: tuple[str, Course, dict[str, Graded]], who: str):
        assignment, course, results = graded
        assert {each.points for each in parts(course, assignment, who).values()} == {0}
        assert results[who].score.points == 0

    @pytest.mark.parametrize("number", range(MUTANTS))
    def test_a_mistake_costs_its_own_criterion(self, graded: tuple[str, Course, dict[str, Graded]], number: int):
        assignment, course, _ = graded
        got = parts(course, assignment, f"wrong{number}")
        for exercise, mutant in spread(assignment, number).items():
            lost = [item.name for item in got[exercise].items if item.state != "passed"]
            assert lost == mutant.loses([item.name for item in got[exercise].items]), got[exercise].text
            named = {mistake for item in got[exercise].items for mistake in item.mistakes}
            assert mutant.mistake in named, got[exercise].text

    def test_feedback_shows_no_reference_and_no_check(self, graded: tuple[str, Course, dict[str, Graded]]):
        assignment, course, _ = graded
        feedback(course, assignment)
        folder = Path(__file__).parents[2] / "grading"
        secret = [folder / "checks" / f"{assignment}.py", folder / "src" / f"{ASSIGNMENTS[assignment]}.py"]
        page = (course.folder("feedback", assignment, "empty") / f"{ASSIGNMENTS[assignment]}.html").read_text()
        shown = (course.folder("release", assignment) / f"{ASSIGNMENTS[assignment]}.ipynb").read_text()
        text = re.sub(r"<[^>]+>", "", page).replace("&quot;", '"').replace("&#39;", "'").replace("&gt;", ">")
        assert "from grading import check, hint, quiz, submit" in text  # what is in the page is found
        for line in {line.strip() for path in secret for line in path.read_text().splitlines()}:
            if len(line) > 40 and not line.startswith(("#", '"')) and line not in shown.replace('\\"', '"'):
                assert line not in text
