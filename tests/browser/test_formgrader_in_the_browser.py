"""nbgrader's menus are where an instructor opens a course folder, and not in a learner's lessons."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course.files import ROOT
from grading.course.new_course import new_course

# Ids of plugins, what the menu bar says, and whether a side bar is nbgrader's.
SEEN = """
const app = window.jupyterapp, side = [...app.shell.widgets('left'), ...app.shell.widgets('right')];
return {
  plugins: app.listPlugins().filter(id => id.startsWith('@jupyter/nbgrader') && app.isPluginActivated(id)),
  menus: [...document.querySelectorAll('.lm-MenuBar-itemLabel')].map(node => node.textContent),
  side: side.map(widget => `${widget.id} ${widget.title?.caption}`).filter(text => /nbgrader|assignment/i.test(text)),
};
"""


def seen(lab: Any) -> Any:
    lab.wait(lambda: lab.js("return document.querySelectorAll('.lm-MenuBar-itemLabel').length > 5"), "menus")
    return lab.js(SEEN)


@pytest.mark.slow
def test_a_lesson_has_nothing_of_nbgrader(browser: Any, scratch: Path, tmp_path: Path):
    with browser.server(tmp_path, scratch) as base, browser.window(base, scratch) as lab:
        lab.open("")
        found = seen(lab)
    assert found["menus"]
    assert (found["plugins"], found["side"], "Nbgrader" in found["menus"]) == ([], [], False)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A course folder with an assignment, opened as an instructor opens it: address and token."""
    new_course(tmp_path / "course")
    (tmp_path / "course" / "source" / "ps02").mkdir(parents=True)
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / "course" / "source" / "ps02" / "ps02.ipynb")
    command = [sys.executable, "-m", "course", "open", str(tmp_path / "course")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PORT": "0"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "token=" in line).strip()
        yield tuple(line.split("/formgrader?token="))  # type: ignore[misc]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_course_folder_opens_on_a_formgrader_that_works(opened: tuple[str, str], browser: Any, scratch: Path):
    base, token = opened
    with browser.window(base, scratch) as lab:
        lab.driver.get(f"{base}/formgrader?token={token}")
        lab.wait(lambda: "ps02" in lab.js("return document.body.innerText"), "the list of assignments")
        warnings = lab.js("return [...document.querySelectorAll('.alert')].map(node => node.innerText);")
        foreign = lab.foreign_addresses()
        lab.shot("formgrader")
        lab.driver.get(f"{base}/lab?token={token}&reset")
        lab.wait(lambda: "Nbgrader" in lab.js("return document.body.innerText"), "nbgrader's menu")
    assert warnings == []
    assert foreign == []
