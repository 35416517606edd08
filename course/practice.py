"""Assignments to practise with: an instructor's source without its solutions, as a notebook.

They are not what a class hands in: that is what its instructor released. So their names differ.
"""

import re
from pathlib import Path

from course.build import LessonError, notebook_bytes
from grading.course.settings import PRACTICE

STUB = "# YOUR CODE HERE\nraise NotImplementedError()"
_SOLUTION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?^ *### END SOLUTION$", re.DOTALL | re.MULTILINE)
_MARKS = re.compile(r"^# === BEGIN MARK SCHEME ===\n.*?^# === END MARK SCHEME ===$", re.DOTALL | re.MULTILINE)


def practice_notebooks(sources: Path) -> dict[str, bytes]:
    """File name -> bytes, for every assignment in this folder. Raises LessonError where a solution has no end."""
    found = {}
    for path in sorted(sources.glob("*.py")):
        text = without_solutions(path.read_text(encoding="utf-8"), path.name)
        found[f"{PRACTICE}{path.stem}.ipynb"] = notebook_bytes(text, path.name)
    return found


def without_solutions(source: str, name: str = "assignment") -> str:
    """The source as learners get it.

    >>> print(without_solutions("def f():\\n    ### BEGIN SOLUTION\\n    return 1\\n    ### END SOLUTION"))
    def f():
        # YOUR CODE HERE
        raise NotImplementedError()
    """
    text = _SOLUTION.sub(lambda match: "\n".join(match[1] + line for line in STUB.splitlines()), source)
    text = _MARKS.sub("# Your answer.", text)
    if "SOLUTION" in text or "MARK SCHEME" in text:
        raise LessonError(f"{name}: a solution or mark scheme has no end, or an end without a beginning")
    return text
