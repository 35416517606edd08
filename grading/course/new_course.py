"""grading new-course: a folder of the instructor's own, for what is worth marks."""

import argparse
import secrets
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from grading.course.settings import CourseError, load
from grading.files import write_atomically

FILES = {
    "course.toml": """\
# Your course. Keep this folder private: all that is in the public repository is practice, answers included.
id = "{id}"
seed = "{seed}"  # questions draw other values than the public ones; keep it for as long as the course runs

[limits]  # seconds that grading may take
cell_s = 20
notebook_s = 120
submission_s = 240

[assignments.ps02]
# due = 2027-03-12T23:59:00+01:00  # without it nothing is late
test_attempts = 3   # of the test in this assignment; the best counts
late_days = 2       # accepted this long after it is due
late_penalty = 0.1  # share of the points taken off for each day begun

[assignments.ps03]
test_attempts = 3
late_days = 2
late_penalty = 0.1

[assignments.ps04]
test_attempts = 3
late_days = 2
late_penalty = 0.1

[assignments.ps05]
test_attempts = 3
late_days = 2
late_penalty = 0.1

[assignments.ps06]
test_attempts = 3
late_days = 2
late_penalty = 0.1
""",
    "roster.csv": "id,first_name,last_name,email,also\n",
    "extensions.csv": "learner,assignment,days,reason\n",
    "nbgrader_config.py": '''\
"""nbgrader's settings, for formgrader and nbgrader's own commands; they follow from course.toml."""

from pathlib import Path

from grading.course.nbgrader_settings import configure
from grading.course.settings import load

configure(get_config(), load(Path(__file__).parent))  # noqa: F821
''',
    ".gitignore": "/.grading/\n.ipynb_checkpoints/\n__pycache__/\n",
    "README.md": """# {id}

One course, as its instructor keeps it. `docs/instructor.md` in the minidist repository says how to use it.

| file or folder | what is in it |
|---|---|
| course.toml | due dates, attempts, late days, limits |
| roster.csv | the learners: `id` as in your learning system; `also` has other names it uses, separated by spaces |
| extensions.csv | more time: learner, assignment (or `*`), days, reason |
| assignments/ | your own assignments, NAME_topic.py; one of a public name takes its place |
| checks/ | your own exercises, NAME.py |
| questions/ | your own questions, NN.yaml; one of a public id takes its place |
| source/, release/ | an assignment with and without its solutions; `release/NAME.zip` is handed out |
| inbox/NAME/ | what your learning system gave you: zip files, or folders |
| submitted/, replaced/ | what counts of that, by learner; and what came before it |
| autograded/, feedback/ | graded notebooks, and what learners get back |
| gradebook.db | the grades |

Private are checks, questions, assignments, source, autograded and the gradebook. Learners get `release/` and their own
`feedback/`, and nothing else.
""",
}
FOLDERS = ("assignments", "checks", "questions", "inbox", "submitted")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="grading new-course", description="Make a course folder of your own.")
    parser.add_argument("folder", metavar="DIR", type=Path)
    folder = parser.parse_args(argv).folder
    for line in new_course(folder):
        print(line)
    print("\n".join(next_steps(folder)))
    return 0


def next_steps(folder: Path) -> list[str]:
    """The commands that come next, from where this one was run."""
    here = Path(sys.executable).parent
    path = [] if shutil.which("grading") else [f'  export PATH="{here}:$PATH"']
    return [
        "",
        "Next:",
        *path,
        f"  cd {shlex.quote(str(folder))}",
        "  grading doctor          # can this machine grade?",
        "  $EDITOR roster.csv      # a line for each learner",
        "  grading release ps02    # makes release/ps02.zip, to hand out",
        f"All of it is in {Path(__file__).resolve().parents[2] / 'docs' / 'instructor.md'}.",
    ]


def new_course(folder: Path) -> list[str]:
    """Make a course folder, or add what an existing one lacks; nothing in it is changed. Returns what was made."""
    folder = folder.resolve()
    repository = Path(__file__).resolve().parents[2]
    if folder == repository or (folder / "minidist").is_dir():
        raise CourseError(f"{folder} is the repository itself: name another folder, such as ../my-course")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "course.toml").exists():
        raise CourseError(f"{folder} has other files in it and no course.toml: name a new or an empty folder")
    made = []
    for name in FOLDERS:
        if not (folder / name).is_dir():
            (folder / name).mkdir(parents=True)
            made.append(f"{folder / name}/")
    seed = secrets.token_hex(8)
    for name, text in FILES.items():
        path = folder / name
        if not path.exists():
            write_atomically(path, text.replace("{id}", folder.name).replace("{seed}", seed).encode())
            made.append(str(path))
    load(folder)
    return made
