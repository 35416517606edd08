"""Making a submission gradable before nbgrader sees it: whatever was handed in, a notebook with every cell comes out.

The release is what counts: its cells have their own points, flags and (where locked) source again, each once and in its
order. What the learner wrote stays, also in cells added. Notes say what was done, for learner and instructor.
"""

import copy
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.notebooknode import NotebookNode

from grading.course.harmless import is_picture
from grading.course.kernel import copy_files
from grading.course.settings import PRACTICE

LARGEST_NOTEBOOK = 50 << 20  # bytes
UNMARKED = (
    "no cell has the marks of the released notebook: it may be the public practice copy, or a tool dropped them. Cells "
    "were told by their names and what they define; an instructor should see whether any was missed"
)


@dataclass(frozen=True)
class Repaired:
    """A notebook that can be graded. foreign: nothing in it is from the assignment; look at it by hand."""

    notebook: NotebookNode
    notes: tuple[str, ...]
    foreign: bool = False


def repair(handed_in: Path, release: Path, target: Path) -> tuple[str, ...]:
    """Write to target what of the folder handed_in can be graded as the release; returns notes."""
    target.mkdir(parents=True)
    copy_files(handed_in, target)
    when = handed_in / "timestamp.txt"
    if when.is_file() and not when.is_symlink():
        shutil.copyfile(when, target / when.name)
    notes: list[str] = []
    for original in sorted(release.glob("*.ipynb")):
        handed_out = nbformat.read(original, as_version=4)
        path, found = find(handed_in, original.name, single=len(list(release.glob("*.ipynb"))) == 1)
        notebook, trouble = read(path) if path else (None, "")
        repaired = mend(notebook, handed_out)
        notes += [note for note in (found, trouble, *repaired.notes) if note]
        nbformat.write(repaired.notebook, target / original.name)
    return tuple(notes)


def _shown(name: str) -> str:
    """A file's name as it can stand in a note: it was chosen by a learner."""
    return "".join(char if char.isprintable() and char not in "<>&`[]" else "?" for char in name)[:80]


def find(folder: Path, name: str, *, single: bool) -> tuple[Path | None, str]:
    """The file handed in as notebook `name`, also under another name; and a note."""
    plain = sorted(path for path in folder.rglob("*.ipynb") if path.is_file() and not path.is_symlink())
    plain = [path for path in plain if ".ipynb_checkpoints" not in path.parts]
    exact = [path for path in plain if path.name == name]
    if exact:
        return min(exact, key=lambda path: len(path.parts)), ""
    stem = Path(name).stem.lower()
    alike = [path for path in plain if stem in path.stem.lower()] or (plain if single and len(plain) == 1 else [])
    if alike:
        newest = max(alike, key=lambda path: (not path.name.startswith(PRACTICE), path.stat().st_mtime, path.name))
        return newest, f"{_shown(newest.name)} was graded as {name}"
    return None, f"no notebook {name} was handed in; the empty one was graded"


def read(path: Path) -> tuple[NotebookNode | None, str]:
    """The notebook in a file, None with a note where there is none."""
    unreadable = f"{_shown(path.name)} cannot be read as a notebook"
    try:
        if path.stat().st_size > LARGEST_NOTEBOOK:
            return None, f"{unreadable}: it has more than {LARGEST_NOTEBOOK >> 20} MB; the empty one was graded"
        notebook = nbformat.reads(path.read_text(encoding="utf-8-sig"), as_version=4)
        cells = [_whole(cell) for cell in notebook.cells]
    except (
        ValueError,
        RecursionError,
        AttributeError,
        KeyError,
        TypeError,
        OSError,
        nbformat.ValidationError,
    ) as error:
        reason = (
            "it is no JSON" if isinstance(error, json.JSONDecodeError | nbformat.reader.NotJSONError) else "damaged"
        )
        return None, f"{unreadable} ({reason}); the empty one was graded"
    notebook.cells = [cell for cell in cells if cell is not None]
    return notebook, ""


def _whole(cell: Any) -> NotebookNode | None:
    """A cell with every part it needs and no output; None for what is none."""
    kinds = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    make = kinds.get(cell.get("cell_type"), nbformat.v4.new_markdown_cell)
    source = cell.get("source", "")
    source = source if isinstance(source, str) else "".join(map(str, source))
    metadata = cell.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    whole = make(source=source)
    whole.metadata = NotebookNode({key: metadata[key] for key in ("nbgrader", "tags") if metadata.get(key)})
    if isinstance(cell.get("id"), str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", cell["id"]):
        whole["id"] = cell["id"]
    pictures = cell.get("attachments")
    if make is not kinds["code"] and isinstance(pictures, dict) and all(map(_is_picture, pictures.values())):
        whole["attachments"] = pictures
    return whole


def _is_picture(bundle: Any) -> bool:
    return isinstance(bundle, dict) and all(is_picture(kind, data) for kind, data in bundle.items())


def mend(notebook: NotebookNode | None, release: NotebookNode) -> Repaired:
    """The learner's cells within the release's frame; the empty release where there is no notebook."""
    known = {grade_id(cell): cell for cell in release.cells if grade_id(cell)}
    if notebook is None:
        return Repaired(_finished(list(release.cells), release), (), foreign=True)
    notes: list[str] = []
    cells: list[NotebookNode] = []
    seen: dict[str, int] = {}
    unmarked = known.keys().isdisjoint(map(grade_id, notebook.cells))
    for cell, name in zip(notebook.cells, _recognised(notebook.cells, known), strict=True):
        cell.metadata = NotebookNode()  # tags could switch execution off
        if name in seen:
            notes.append(f"cell {name} was there more than once: the first counts, the others ran as ordinary cells")
        elif name in known:
            seen[name] = len(cells)
            cell, note = _ours(cell, known[name])
            notes += [note] if note else []
        cells.append(cell)
    foreign = bool(known) and not seen
    if foreign:
        notes.append("this is not the notebook that was handed out: none of its cells are from the assignment")
    elif unmarked and known:
        notes.insert(0, UNMARKED)
    cells = _in_order(cells, list(seen.values()), list(known), notes)
    cells = _put_back(cells, release, set(seen), notes if not foreign else [])
    return Repaired(_finished(cells, release), tuple(dict.fromkeys(notes)), foreign)


def grade_id(cell: NotebookNode) -> str:
    """nbgrader's name of a cell, "" if it has none."""
    about = cell.metadata.get("nbgrader")
    name = about.get("grade_id") if isinstance(about, dict) else None
    return name if isinstance(name, str) else ""


def _recognised(cells: list[NotebookNode], known: dict[str, NotebookNode]) -> list[str]:
    """What each cell is in the release, "" for none: by nbgrader's name, by id or tag, by what it says or defines."""
    result = [name if (name := grade_id(cell)) in known else "" for cell in cells]
    missing = {name: cell for name, cell in known.items() if name not in result}
    for marks in (_labels, _likenesses):
        wanted = {(cell.cell_type, mark): name for name, cell in missing.items() for mark in marks(cell)}
        for place, cell in enumerate(cells):
            fits = [wanted.get((cell.cell_type, mark), "") for mark in marks(cell)] if not result[place] else []
            result[place] = next((name for name in fits if missing.pop(name, None)), result[place])
    return result


def _labels(cell: NotebookNode) -> set[str]:
    """What a cell is called: the public practice copies have the release's names as ids and tags."""
    tags = cell.metadata.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return {cell.get("id", ""), grade_id(cell), *tags} - {""}


def _likenesses(cell: NotebookNode) -> set[str]:
    """What tells a cell apart without a name: what it says, and the functions it defines."""
    defined = re.findall(r"^(?:def|class) (\w+)", cell.source, flags=re.MULTILINE) if cell.cell_type == "code" else []
    return {" ".join(cell.source.split()), *(f"def {name}" for name in defined)} - {""}


def _ours(cell: NotebookNode, original: NotebookNode) -> tuple[NotebookNode, str]:
    """The cell with the release's flags and points, and its source and type where these are not the learner's."""
    about = original.metadata.nbgrader
    locked = about.get("locked") or (about.get("grade") and not about.get("solution"))
    note = ""
    if locked and cell.source.strip() != original.source.strip():
        note = f"cell {about.grade_id} had been changed and was restored"
    source = original.source if locked else cell.source
    mended = NotebookNode({**original, "source": source, "metadata": NotebookNode(original.metadata)})
    return mended, note


def _in_order(cells: list[NotebookNode], places: list[int], order: list[str], notes: list[str]) -> list[NotebookNode]:
    """The release's cells in the release's order, in the places where they were."""
    moved = sorted(places, key=lambda place: order.index(grade_id(cells[place])))
    if moved != places:
        notes.append("cells had been moved and were put back in their order")
    result = list(cells)
    for place, origin in zip(places, moved, strict=True):
        result[place] = cells[origin]
    return result


def _put_back(cells: list[NotebookNode], release: NotebookNode, seen: set[str], notes: list[str]) -> list[NotebookNode]:
    """Missing cells of the release, each behind the one that it followed."""
    result = list(cells)
    before = ""
    for original in release.cells:
        name = grade_id(original)
        if not name:
            continue
        if name not in seen:
            place = next((i + 1 for i, cell in enumerate(result) if before and grade_id(cell) == before), 0)
            result.insert(place, NotebookNode(copy.deepcopy(original)))
            notes.append(f"cell {name} was missing and was put back")
        before = name
    return result


def _finished(cells: list[NotebookNode], release: NotebookNode) -> NotebookNode:
    """A valid notebook of these cells, for the release's kernel, every cell with an id of its own."""
    taken: set[str] = set()
    for number, cell in enumerate(cells):
        if not cell.get("id") or cell["id"] in taken:
            cell["id"] = next(name for more in range(len(cells)) if (name := f"cell-{number + more}") not in taken)
        taken.add(cell["id"])
        if cell.cell_type == "code":
            cell["outputs"], cell["execution_count"] = [], None
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=nbformat.from_dict(dict(release.metadata)))
    notebook.nbformat_minor = 5
    return notebook
