"""docs/instructor.md: every command in it is run, in its order, from a clone to a graded class."""

import csv
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from grading.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "instructor.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_every_command_exists_and_is_explained():
    named = set(re.findall(r"\bgrading ([a-z-]+)", GUIDE)) - {"instructors", "command"}
    assert named <= set(COMMANDS) | {"on"}
    assert set(COMMANDS) - {"progress"} <= named
    assert {kind for kind, _ in BLOCKS} == {"sh", "bash"}
    shown = "".join(text for kind, text in BLOCKS if kind == "sh")
    assert "make setup" in shown  # what the test has done already
    assert "-m course open ../my-course" in shown  # what would not end


@pytest.mark.slow
def test_the_guide_word_by_word(tmp_path: Path):
    clone = tmp_path / "minidist"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    os.symlink(ROOT / ".venv", clone / ".venv")
    script = "set -eu\ncd minidist\n" + "\n".join(text for kind, text in BLOCKS if kind == "bash")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    run = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    for words in (
        "This machine can grade.",
        "nothing from 1: emmy",
        "2 of 3 handed in ps02",
        "2 graded",
        "Nothing changed.",
    ):
        assert words in run.stdout
    course = tmp_path / "my-course"
    with open(course / "grades.csv", newline="", encoding="utf-8") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert float(rows["ada"]["points"]) == 30  # every exercise; the text waits for a person, the test was not answered
    assert (float(rows["kurt"]["points"]), float(rows["emmy"]["points"])) == (0, 0)
    with zipfile.ZipFile(course / "feedback" / "ps02.zip") as archive:
        assert archive.namelist() == ["ps02/ada/ps02_collectives.html", "ps02/kurt/ps02_collectives.html"]
    assert "| 02.3 | any N |" in (course / "report-ps02.md").read_text()
