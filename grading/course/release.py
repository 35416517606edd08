"""grading release: an assignment as learners get it, in release/NAME and as one zip file to upload.

Beside the notebook lie the questions of its test, sealed and without any verdict, and a page for AI helpers. Nothing
leaves before it was searched for solutions, checks, answers and explanations.
"""

import argparse
import os
import shutil
import zipfile
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path

import nbformat

from grading.bank import Bank
from grading.course import audit
from grading.course.marking import calls
from grading.course.nbgrader_settings import (
    Messages,
    configure,
    course_directory,
    enter_roster,
    find_commands,
    gradebook,
    logger,
)
from grading.course.record import replace_folder
from grading.course.scratch import scratch
from grading.course.settings import PUBLIC, Course, CourseError, load
from grading.course.source import notebook
from grading.files import write_atomically
from grading.seal import seal

ASKING = ("card", "predict", "compare", "quiz", "submit", "review")  # functions that need a module's questions
HELPERS = "AGENTS.md"  # where AI helpers look for what they may do


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading release", description="Make an assignment as learners get it.")
    parser.add_argument("assignment")
    options = parser.parse_args(argv)
    course = load(Path.cwd())
    folder, packed = release(course, options.assignment)
    print(f"Hand out {packed.relative_to(course.root)} (or the folder {folder.relative_to(course.root)}).")
    return 0


def release(course: Course, name: str) -> tuple[Path, Path]:
    """Make release/NAME and release/NAME.zip; returns both. What was released before stays until all is well."""
    from grading.course.examine import Checks

    course.assignment(name)
    written = course.source(name)
    checks = Checks.load(course, name)
    made = notebook(written, checks.points)
    modules = modules_of([cell.source for cell in made.cells if cell.cell_type == "code"], checks.bank)
    source = course.folder("source", name)
    with scratch(course.root, "release") as folder:
        staging = folder
        draft = staging / "source" / "." / name
        draft.mkdir(parents=True)
        nbformat.write(made, draft / f"{written.stem}.ipynb")
        write_beside(draft, checks.bank, modules)
        _generate(course, name, staging)
        handed_out = staging / "release" / name
        found = audit.leaks(handed_out, secrets(course, name, written, checks.bank, modules))
        if found:
            raise CourseError(f"{name} was not released, since it would give away:\n  " + "\n  ".join(found))
        packed = pack(handed_out, staging / f"{name}.zip")
        replace_folder(draft, source)
        replace_folder(handed_out, course.folder("release", name))
        os.replace(packed, course.folder("release") / f"{name}.zip")
    enter_roster(course)
    with gradebook(course) as book:
        due = course.assignment(name).due
        book.update_or_create_assignment(name, duedate=due.astimezone(UTC).replace(tzinfo=None) if due else None)
    return course.folder("release", name), course.folder("release") / f"{name}.zip"


def modules_of(sources: Sequence[str], bank: Bank) -> list[str]:
    """The modules whose questions a notebook asks: of quiz("02") and submit("02"), or the owner of card("an-id")."""
    found: set[str] = set()
    for function in ASKING:
        for call in calls(sources, function):
            if not call:
                continue
            try:
                found.add(call[0] if call[0] in bank.modules else bank.question(call[0]).module)
            except KeyError:
                raise CourseError(f'{function}("{call[0]}"): there is no such module or question') from None
    return sorted(found)


def write_beside(folder: Path, bank: Bank, modules: Sequence[str]) -> None:
    """Put the sealed questions and the page for AI helpers beside a notebook."""
    place = folder / ".minidist" / "questions"
    place.mkdir(parents=True)
    for module in modules:
        write_atomically(place / f"{module}.json", seal(bank, module, verdicts_for_tests=False))
    shutil.copyfile(PUBLIC / "ai_helpers.md", folder / HELPERS)


def secrets(course: Course, name: str, written: Path, bank: Bank, modules: Sequence[str]) -> set[str]:
    """What must not be found in a release."""
    files = [path for folder in course.checks for path in folder.glob("*.py")]
    checks = [path.read_text(encoding="utf-8") for path in files]
    lines = audit.secret_lines([written.read_text(encoding="utf-8")], checks)
    return lines | audit.secret_texts(bank, modules)


def _generate(course: Course, name: str, staging: Path) -> None:
    """nbgrader's own step, from staging/source to staging/release; it also enters the cells into the gradebook."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.converters.base import NbGraderException
    from traitlets.config import Config

    find_commands()
    with gradebook(course):
        pass  # make it, or say why not
    folders = course_directory(course, source_directory=staging / "source", release_directory=staging / "release")
    folders.assignment_id = name
    messages = Messages()
    converter = GenerateAssignment(coursedir=folders, config=configure(Config(), course), log=logger(messages))
    converter.force = True
    try:
        converter.start()
    except (NbGraderException, SystemExit) as error:
        told = [line for line in "\n".join(messages.lines).splitlines() if line.strip()]
        reason = next((line for line in reversed(told) if "Error" in line or "Cannot" in line), str(error))
        raise CourseError(
            f"nbgrader did not take {name}: {reason.strip()}. Once submissions were graded, an assignment whose cells "
            "change needs a new name"
        ) from None


def pack(folder: Path, target: Path) -> Path:
    """All files of a folder in a zip file, the same bytes for the same files."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target
