"""A lesson as a learner meets it, in JupyterLab in headless Chromium. Screenshots are kept for looking at."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from selenium.webdriver.common.by import By

from course.__main__ import _questions
from course.build import notebook_bytes
from course.files import SOURCES
from course.workspace import fill
from grading.answers import decode

LESSON, MODULE = "00_start", "00"
CARD = "card-ranks-own-memory"
READABLE = 4.5  # contrast of text to what it stands on, WCAG 2.2 AA


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workspace that was just filled."""
    root, built = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("built")
    source = (SOURCES / f"{LESSON}.py").read_text(encoding="utf-8")
    (built / f"{LESSON}.ipynb").write_bytes(notebook_bytes(source))
    fill(built, root / "workspace", _questions())
    return root


@pytest.fixture(scope="module")
def lab(root: Path, scratch: Path, browser: Any) -> Iterator[Any]:
    """The lesson, open and run from top to bottom."""
    with browser.server(root, scratch) as base, browser.window(base, scratch) as lab:
        lab.open(f"workspace/{LESSON}.ipynb")
        lab.run_all()
        yield lab


def saved(root: Path) -> Any:
    return nbformat.read(root / "workspace" / f"{LESSON}.ipynb", as_version=4)


def log(root: Path, kind: str) -> list[Any]:
    lines = (root / "workspace" / ".minidist" / "progress.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def test_run_all_fails_nowhere_and_spoils_nothing(lab: Any, root: Path):
    lab.save()
    outputs = [(cell.id, out) for cell in saved(root).cells if cell.cell_type == "code" for out in cell.outputs]
    assert [(tag, out.evalue) for tag, out in outputs if out.output_type == "error"] == []
    assert "kept back until you commit" in lab.text("measure-wait")
    assert "Not submitted: 0 of" in lab.text("submit")
    assert log(root, "answered") == log(root, "submitted") == []
    assert {"measure-wait", "deadlock", "submit"} <= {entry["cell"] for entry in log(root, "ran")}
    lab.shot("lesson")


def test_a_slider_moves_the_figure(lab: Any):
    cell = lab.cell("explore-arrival")
    image = cell.find_element(By.CSS_SELECTOR, ".widget-image")
    before = image.get_attribute("src")
    lab.js("arguments[0].focus()", cell.find_element(By.CSS_SELECTOR, ".noUi-handle"))
    lab.press("ARROW_RIGHT")
    lab.wait(lambda: image.get_attribute("src") != before, "another figure")
    lab.shot("slider")


def test_a_deadlock_is_reported(lab: Any):
    report = lab.text("deadlock")
    assert report.startswith("deadlock")
    assert all(f"rank {rank}" in report for rank in range(4))
    lab.shot("deadlock")


def test_an_answer_with_the_keyboard_explains_itself_and_leads_to_its_cell(lab: Any, root: Path):
    options = lab.buttons(CARD)
    assert len(options) >= 2
    lab.js("arguments[0].focus()", options[0])
    for _ in options[1:]:
        lab.press("TAB")
    lab.press("SPACE")
    explanation = ".minidist-right, .minidist-wrong"
    said = lab.wait(lambda: lab.cell(CARD).find_elements(By.CSS_SELECTOR, explanation), "an explanation")[0]
    lab.wait(lambda: said.text.startswith(("Right.", "Not right.")), "words for the verdict")
    below = "return arguments[0].compareDocumentPosition(arguments[1]) & Node.DOCUMENT_POSITION_FOLLOWING"
    assert lab.js(below, lab.buttons(CARD)[-1], said)  # it was the last option, and it explains itself below it
    assert [entry["question"] for entry in log(root, "answered")] == [CARD.removeprefix("card-")]
    lab.shot("card")
    link = said.find_element(By.TAG_NAME, "a")
    tag = link.text.removeprefix("cell ")
    link.click()
    in_view = "const box = arguments[0].getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight;"
    lab.wait(lambda: lab.js(in_view, lab.node(tag)), f"the cell {tag} in view")
    lab.shot("led-to")


def test_cards_can_be_read_in_both_themes(lab: Any):
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.theme(theme)
        for tag in (CARD, "predict-wait", "quiz"):
            faint = [(words, ratio) for words, ratio in lab.contrasts(tag) if ratio < READABLE]
            assert faint == [], f"{theme}, {tag}"
            lab.shot(f"{tag}-{theme.split()[-1].lower()}")


NAMES = """
const words = ids => ids.split(" ").map(id => document.getElementById(id)?.innerText.trim() ?? "").join(" ");
const controls = arguments[0].querySelectorAll(
    ".widget-radio-box, .minidist-group, .widget-text input, .widget-dropdown select, .minidist-card");
return [...controls].map(node => [node.getAttribute("role") ?? node.tagName,
    words(node.getAttribute("aria-labelledby") ?? node.getAttribute("aria-describedby") ?? "")]);
"""


def test_every_control_says_which_question_it_answers(lab: Any):
    for tag in (CARD, "predict-wait", "quiz"):
        cell = lab.cell(tag)
        lab.wait(lambda cell=cell: all(name for _, name in lab.js(NAMES, cell)), f"names in {tag}")
    names = lab.js(NAMES, lab.cell("quiz"))
    groups = [name for role, name in names if role == "radiogroup"]
    assert groups
    assert all(name.startswith(f"{name.split('.')[0]}. ") for name in groups)  # by the question's number and text
    radios = lab.cell("quiz").find_element(By.CSS_SELECTOR, "[role=radiogroup]").find_elements(By.TAG_NAME, "input")
    lab.js("arguments[0].focus()", radios[0])
    lab.press("SPACE")
    lab.press("ARROW_DOWN")
    assert [radio.is_selected() for radio in radios[:2]] == [False, True]


def test_a_click_while_a_cell_runs_is_answered_after_it(lab: Any, root: Path):
    before = len(log(root, "answered"))
    lab.cell("first-world")
    lab.command("notebook:insert-cell-below")
    lab.js(lab.panel + "panel.content.activeCell.model.sharedModel.setSource(arguments[0]);", SLOW)
    slow = lab.js(lab.panel + "return panel.content.activeCell.model.id;")
    lab.command("notebook:run-cell")
    time.sleep(1)
    lab.buttons("card-group-is-alone")[0].click()
    assert "launched" not in lab.text(slow)  # it still runs
    lab.wait(lambda: len(log(root, "answered")) == before + 1, "the answer")
    lab.idle()
    assert "launched [0, 1]" in lab.text(slow)
    assert "ight." in lab.text("card-group-is-alone")


SLOW = """
import time
time.sleep(3)
print("launched", md.launch(lambda world: world.rank, ranks=2))
"""


def test_the_comparison_appears_when_the_prediction_is_made(lab: Any, root: Path):
    number = "return arguments[0].querySelector('.jp-InputPrompt').innerText"
    before = lab.js(number, lab.cell("measure-wait"))
    lab.cell("predict-wait").find_element(By.CSS_SELECTOR, "input[type=text]").send_keys("100 ms")
    lab.buttons("predict-wait", "Commit")[0].click()
    lab.wait(lambda: "Committed: 100 ms" in lab.text("predict-wait"), "the commitment")
    lab.wait(lambda: lab.cell("measure-wait").find_elements(By.TAG_NAME, "img"), "the comparison's figure")
    assert "ight." in lab.text("measure-wait")
    assert lab.js(number, lab.cell("measure-wait")) == before  # nothing ran again
    assert log(root, "predicted")[0]["answer"] == 0.1
    lab.shot("comparison")


def test_a_submitted_test_is_in_the_saved_notebook_and_survives_a_restart(lab: Any, root: Path):
    lab.answer_everything("quiz")
    lab.wait(lambda: "To submit, run the cell" in lab.text("quiz"), "the count")
    count = len(log(root, "drafted"))
    assert count
    lab.run("submit")
    lab.wait(lambda: "of" in lab.text("submit") and " right." in lab.text("submit"), "the results")
    lab.shot("submitted")
    lab.save()
    (cell,) = [cell for cell in saved(root).cells if cell.id == "submit"]
    held = decode(cell.source.split('"')[3])
    assert (held.module, len(held.attempts)) == (MODULE, 1)
    assert None not in held.attempts[0].answers.values()
    assert decode((root / "workspace" / f"answers-{MODULE}.txt").read_text()) == held
    shown = lab.text("submit")
    lab.restart()
    lab.run("setup")
    lab.run("submit")
    assert lab.text("submit") == shown
    assert lab.source("submit") == cell.source


def test_a_reopened_lesson_says_how_to_see_its_cards_again(lab: Any):
    lab.restart()  # the widgets are gone
    lab.open(f"workspace/{LESSON}.ipynb")
    for tag in (CARD, "predict-wait", "quiz"):
        lab.wait(lambda tag=tag: lab.said(tag).startswith("What you answered is kept."), f"what {tag} says")
        assert "not found" not in lab.said(tag)
    lab.cell(CARD)
    lab.shot("reopened")
    lab.run("setup")
    lab.run(CARD)
    assert len(lab.buttons(CARD)) >= 2
    assert "is kept." not in lab.text(CARD)


def test_nothing_came_from_another_machine(lab: Any):
    assert lab.foreign_addresses() == []
