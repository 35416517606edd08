"""Lessons are written as course/src/NN_topic.py (py:percent) and generated into course/NN_topic.ipynb.

The same source gives the same bytes, on any machine: no outputs, no times, cell ids that come from the source. A cell's
id is its first tag (a name of its own, such as `measure-bytes`), else a hash of its content.
"""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import jupytext
import nbformat

from course.files import write_atomically

# Tags that say how a cell is shown or run; many cells carry them, so they name none.
SHARED_TAGS = frozenset(
    {"hide-input", "hide-output", "hide-cell", "remove-input", "remove-cell", "raises-exception", "skip-execution"}
    | {"locked", "by-hand"}  # in assignments
)
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class LessonError(ValueError):
    """A lesson's source cannot become a notebook; the message says where and what to change."""


@dataclass(frozen=True)
class Report:
    """What a build found: notebooks written (or, when only checking, out of date) and those without a source."""

    stale: list[Path] = field(default_factory=list)
    orphans: list[Path] = field(default_factory=list)


def notebook_bytes(source: str, name: str = "lesson") -> bytes:
    """The notebook of a py:percent source, as the bytes of its file.

    Raises LessonError if two cells claim the same id, or a tag cannot be one.

    >>> notebook_bytes("# %% [markdown]\\n# Hello\\n") == notebook_bytes("# %% [markdown]\\n# Hello\\n")
    True
    """
    notebook = jupytext.reads(source, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(KERNEL)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    taken: set[str] = set()
    for cell in notebook.cells:
        cell.id = _cell_id(cell, taken, name)
        taken.add(cell.id)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        raise LessonError(f"{name}: not a valid notebook: {error}") from error
    return (nbformat.writes(notebook).rstrip("\n") + "\n").encode()


def _cell_id(cell: nbformat.NotebookNode, taken: set[str], name: str) -> str:
    named = [tag for tag in cell.metadata.get("tags", []) if tag not in SHARED_TAGS]
    if named:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", named[0]):
            raise LessonError(
                f"{name}: the tag {named[0]!r} becomes the cell's id: use 1 to 64 letters, digits, - or _"
            )
        if named[0] in taken:
            raise LessonError(f"{name}: two cells have {named[0]!r} as their first tag: give one of them its own name")
        return named[0]
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
    copies = (digest if copy == 1 else f"{digest}-{copy}" for copy in range(1, len(taken) + 2))
    return next(candidate for candidate in copies if candidate not in taken)


def build(sources: Path, notebooks: Path, *, check: bool = False) -> Report:
    """Generate every notebook from its source; with check, only find the ones that would change."""
    report = Report()
    expected = {notebooks / f"{source.stem}.ipynb": source for source in sorted(sources.glob("[0-9]*.py"))}
    for notebook, source in expected.items():
        content = notebook_bytes(source.read_text(encoding="utf-8"), source.name)
        if not notebook.exists() or notebook.read_bytes() != content:
            report.stale.append(notebook)
            if not check:
                write_atomically(notebook, content)
    report.orphans.extend(sorted(set(notebooks.glob("*.ipynb")) - set(expected)))
    return report
