"""grading feedback: what learners get back, one page each in feedback/, and one zip file to upload.

A page holds the learner's own notebook, what each check reported of that run, the explanations of their own test
answers, and a grader's comments. It is made from the graded notebook, which never held a solution or a check, and it
loads nothing from another machine: formulas stay as they were typed.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from grading.course.nbgrader_settings import Messages, configure, course_directory, entry, gradebook, logger
from grading.course.record import graded_notebooks, penalty, replace_folder
from grading.course.release import pack
from grading.course.scratch import scratch
from grading.course.settings import Course, CourseError, load


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading feedback", description="Make the pages that learners get back.")
    parser.add_argument("assignment")
    parser.add_argument("learners", nargs="*")
    options = parser.parse_args(argv)
    course = load(Path.cwd())
    pages = feedback(course, options.assignment, options.learners)
    print(f"{len(pages)} pages in {course.root / 'feedback'}, all of them in feedback/{options.assignment}.zip")
    return 0


def feedback(course: Course, name: str, learners: Sequence[str] = ()) -> list[Path]:
    """Make feedback/LEARNER/NAME for everyone graded, or some; returns the pages."""
    course.assignment(name)
    graded = sorted({path.parent.parent.name for path in course.folder("autograded").glob(f"*/{name}/*.ipynb")})
    if not graded:
        raise CourseError(f"nothing was graded yet: run grading grade {name} first")
    for learner in learners:
        if learner not in graded:
            raise CourseError(f"{learner} was not graded: there is no autograded/{learner}/{name}")
    with gradebook(course) as book:  # a person may have changed points since
        entry(course, book, name)
        entered = {submission.student.id: submission for submission in book.assignment_submissions(name)}
        lost = sorted(set(learners or graded) - set(entered))
        if lost:
            raise CourseError(f"the gradebook does not have {', '.join(lost)}: grade again, with grading grade {name}")
        for submission in entered.values():
            penalty(course, submission)
        book.db.commit()
    pages: list[Path] = []
    with scratch(course.root, "feedback") as folder:
        for learner in learners or graded:
            made = _convert(course, name, learner, folder)
            place = course.folder("feedback", name, learner)
            replace_folder(made, place)
            pages += sorted(place.glob("*.html"))
        everyone = folder / name
        for page in sorted(course.folder("feedback").glob(f"*/{name}/*.html")):
            target = everyone / page.parent.parent.name / page.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(page.read_bytes())
        pack(everyone, folder / "all.zip").replace(course.folder("feedback") / f"{name}.zip")
    return pages


def _convert(course: Course, name: str, learner: str, folder: Path) -> Path:
    graded_notebooks(course.folder("autograded", name, learner))  # or say which cannot be read
    from nbgrader.converters import GenerateFeedback
    from nbgrader.converters.base import NbGraderException
    from traitlets.config import Config

    folders = course_directory(course, feedback_directory=folder / "feedback")
    folders.assignment_id, folders.student_id = name, learner
    messages = Messages()
    converter = GenerateFeedback(coursedir=folders, config=configure(Config(), course), log=logger(messages))
    converter.force = True
    try:
        converter.start()
    except (NbGraderException, SystemExit):
        said = (messages.lines or ["nbgrader gave no reason"])[-1].strip().splitlines()[-1]
        raise CourseError(
            f"no feedback could be made for {learner}: {said}. What was there before is as it was"
        ) from None
    pages = folder / "pages" / learner / name  # only these: what was handed in beside the notebook they have already
    pages.mkdir(parents=True)
    for path in (folder / "feedback" / learner / name).glob("*.html"):
        page = re.sub(r'<script[^>]*\bsrc="https?:[^>]*>\s*</script>', "", path.read_text(encoding="utf-8"))
        (pages / path.name).write_text(page, encoding="utf-8")
    return pages
