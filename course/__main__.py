"""python -m course build [--check] | workspace | open [DIR]"""

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run one of the course's commands; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course", description="Build, hand out and open the lessons.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="generate course/*.ipynb from course/src/*.py")
    build.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is out of date")
    commands.add_parser("workspace", help="hand out new and updated lessons to workspace/; never over your changes")
    opened = commands.add_parser("open", help="open JupyterLab on the first lesson (PORT=8888 in the environment)")
    opened.add_argument("folder", metavar="DIR", nargs="?", type=Path, help="or formgrader on an instructor's folder")
    options = parser.parse_args(argv)
    if options.command == "build":
        return _build(check=options.check)
    return _workspace() if options.command == "workspace" else _open(options.folder)


def _build(*, check: bool) -> int:
    from course.build import LessonError, build
    from course.files import NOTEBOOKS, SOURCES

    try:
        report = build(SOURCES, NOTEBOOKS, check=check)
    except LessonError as error:
        sys.exit(str(error))
    for path in report.stale:
        print(f"{path.name}: out of date; run `python -m course build`" if check else f"{path.name}: built")
    for path in report.orphans:
        print(f"{path.name}: has no source in course/src; delete it")
    return int(check and bool(report.stale or report.orphans))


def _workspace() -> int:
    from course.files import ASSIGNMENTS, NOTEBOOKS, WORKSPACE
    from course.practice import practice_notebooks
    from course.workspace import fill

    for line in fill(NOTEBOOKS, WORKSPACE, _questions(), practice_notebooks(ASSIGNMENTS)):
        print(f"workspace/{line}")
    return 0


def _questions() -> dict[str, bytes]:
    """Each module's questions, sealed; none if they cannot be read, since the lessons run without them too."""
    from grading.bank import Bank
    from grading.question import QuestionError
    from grading.seal import seal

    try:
        bank = Bank.load()
        return {module: seal(bank, module, verdicts_for_tests=True) for module in bank.modules}
    except QuestionError as error:
        print(f"The questions stay as they are in workspace/, because these cannot be read:\n{error}")
        return {}


def _open(instructor: Path | None) -> int:
    from course.serve import open_course

    try:
        open_course(os.environ, instructor=instructor)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
