"""All of it in a real kernel: Run All with widgets, and the same calls where widgets are turned off."""

from typing import Any

import nbformat
from nbclient import NotebookClient

from course.build import notebook_bytes
from grading.log import Log

LESSON = """
# %% tags=["setup"]
from grading import card, compare, predict, progress, quiz, reveal, review, submit
# %% tags=["review"]
review("77")
# %% tags=["predict"]
predict("sample-number")
# %% tags=["show-ring"]
compare("sample-number", 123456)
# %% tags=["card"]
card("sample-choice")
# %% tags=["quiz"]
quiz("77")
# %% tags=["submit"]
submit("77")
# %% tags=["progress"]
progress()
"""
AS_TEXT = """
# %% tags=["off"]
import os
os.environ["MINIDIST_TEXT"] = "1"
# %% tags=["open"]
card("sample-choice")
compare("sample-number", 123456)
# %% tags=["answers"]
predict("sample-number", "15 kB")
card("sample-choice", "a")
quiz("77", {number: "a b c" if number == 1 else 5 for number in range(1, 9)})
# %% tags=["compared"]
compare("sample-number", 123456)
# %% tags=["submitted"]
submit("77")
"""


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_run_all_in_a_kernel_then_as_text(desk: Any):
    notebook = nbformat.reads(notebook_bytes(LESSON + AS_TEXT).decode(), as_version=4)
    where = {"metadata": {"path": str(desk.root)}}
    NotebookClient(notebook, timeout=90, kernel_name="python3", resources=where).execute()
    shown = {cell.id: cell.outputs for cell in notebook.cells}
    widget = "application/vnd.jupyter.widget-view+json"
    for tag in ("predict", "card", "quiz"):
        output, when_gone = shown[tag]
        assert widget in output.data, tag
        assert output.data["text/plain"]  # what a page without the kernel shows
        assert when_gone.data["text/plain"].startswith("What you answered is kept.")
    hidden, _ = shown["show-ring"]
    assert "Measured, and kept back" in hidden.data["text/plain"]
    assert "Not submitted: 0 of 8" in printed(shown["submit"])
    assert "|77 Sample|" in shown["progress"][0].data["text/markdown"]

    assert widget not in str([shown[tag] for tag in ("open", "answers", "compared", "submitted")])
    assert "To answer: give one letter" in printed(shown["open"])
    assert "Then run this cell again." in printed(shown["open"])
    assert "123456" not in printed(shown["open"])
    assert "Committed: 15,000 bytes (15 kB)." in printed(shown["answers"])
    assert "8 of 8 answered" in printed(shown["answers"])
    assert "ight." in printed(shown["compared"])
    assert " of 8 right." in printed(shown["submitted"])
    assert (desk.root / "answers-77.txt").exists()
    kinds = [entry["kind"] for entry in Log(desk.root / ".minidist").entries()]
    assert kinds.count("submitted") == kinds.count("predicted") == 1
