"""workspace/ holds the learner's copies of the notebooks. Updating the course never loses a learner's work.

A manifest remembers what was handed out. When a newer version of a notebook comes:

- a copy whose source the learner did not change becomes the new version; outputs stay with the cells they belong to,
  and if some cell with an output is gone, the old copy is kept beside as NAME.old.ipynb;
- a copy whose source the learner changed is left alone and the new version is put beside it as NAME.new.ipynb;
- a copy that is not there is handed out again: deleting or renaming a notebook is how to get a fresh one.

No other file is touched, and a file beside is never written over unless it is exactly as it was handed out.

Beside the notebooks, `.minidist/` holds the sealed questions, which always follow the course, and the learner's
progress, which no update touches.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course.files import ROOT, locked, write_atomically

MANIFEST = ".handed-out.json"
QUESTIONS = Path(".minidist") / "questions"
HELPERS = ROOT / "grading" / "ai_helpers.md"  # handed out as AGENTS.md, where AI helpers look for what they may do
README = """# Your copies

These notebooks are yours: change them as you like. `make course` adds new lessons and updates the notebooks whose cells
you did not change. Where you did, yours stays and the newer version is put beside it as `NAME.new.ipynb`: look at it,
take over what you want, delete it. Outputs are kept; if an update had to drop a cell with output, the notebook as it
was lies beside as `NAME.old.ipynb`.

To start a lesson afresh, rename or delete its notebook here and run `make course` again.

`practice_ps02_...` and its like are assignments to practise with. If you hand in to an instructor, work in the notebook
that you were given for it, not in these: its exercises and questions may be others.

What you answered and built is kept here too, in `.minidist/` and `answers-NN.txt`; no update touches that. Take the
whole folder along when you move to another machine.

git ignores this folder, and `make clean` leaves it alone.
"""


@dataclass(frozen=True)
class HandedOut:
    """One version that a learner got: a hash of its bytes, and of what counts as the learner's source in it."""

    version: str
    source: str


def fill(
    notebooks: Path,
    workspace: Path,
    questions: Mapping[str, bytes] | None = None,
    assignments: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Bring workspace up to date with notebooks/*.ipynb; returns one line for each file that was written.

    questions: module number -> its sealed file. assignments: file name -> a notebook to practise with.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    with locked(workspace):
        manifest = _read_manifest(workspace / MANIFEST)
        shipped = {path.name: path.read_bytes() for path in sorted(notebooks.glob("*.ipynb"))}
        shipped |= assignments or {}
        for name, content in {"README.md": README.encode(), "AGENTS.md": HELPERS.read_bytes(), **shipped}.items():
            lines += _hand_out(workspace / name, content, manifest.get(name))
            manifest[name] = HandedOut(_hash(content), source_hash(name, content))
        _write_manifest(workspace / MANIFEST, manifest)
        lines += _fill_questions(workspace / QUESTIONS, questions or {})
    return lines


def _fill_questions(folder: Path, questions: Mapping[str, bytes]) -> list[str]:
    """Write the sealed files that are new or differ: they are the course's, with nothing of the learner's in them."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for module, content in sorted(questions.items()):
        path = folder / f"{module}.json"
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)
            lines.append(f"{QUESTIONS.as_posix()}/{path.name}: the questions of module {module}")
    return lines


def _hand_out(path: Path, new: bytes, before: HandedOut | None) -> list[str]:
    """Write the new version of one file, to its place or beside it; returns what to tell the learner."""
    if not path.exists():
        write_atomically(path, new)
        return [f"{path.name}: new"]
    old = path.read_bytes()
    if old == new or (before is not None and before.version == _hash(new)):
        return []
    known = {source_hash(path.name, new)} | ({before.source} if before else set())
    if source_hash(path.name, old) not in known:
        beside, written = _write_beside(path, "new", new, replaceable=before.version if before else "")
        return [f"{path.name}: you changed it, so it stays; the newer version is {beside.name}"] if written else []
    merged, complete = (new, True) if path.suffix != ".ipynb" else carry_over(old, new)
    lines = [f"{path.name}: updated"]
    if not complete:
        beside, _ = _write_beside(path, "old", old)
        lines = [f"{path.name}: updated; the notebook as it was, with all its outputs, is {beside.name}"]
    if path.read_bytes() != old:  # saved meanwhile: next time
        return [f"{path.name}: it was saved just now; run this again to update it"]
    write_atomically(path, merged)
    return lines


def _write_beside(path: Path, label: str, content: bytes, replaceable: str = "") -> tuple[Path, bool]:
    """Write NAME.label.SUFFIX, or NAME.label-2.SUFFIX and so on where a different file has the name already.

    replaceable is the hash of the one content that may be written over. Returns the file and whether it was written.
    """
    number = 1
    while True:
        suffix = label if number == 1 else f"{label}-{number}"
        beside = path.with_name(f"{path.stem}.{suffix}{path.suffix}")
        if not beside.exists() or _hash(beside.read_bytes()) == replaceable:
            write_atomically(beside, content)
            return beside, True
        if beside.read_bytes() == content:
            return beside, False
        number += 1


def source_hash(name: str, content: bytes) -> str:
    """A hash of what a person writes: for a notebook its cells' types and sources, not their outputs or metadata.

    A notebook that cannot be read hashes by its bytes, so it equals nothing and is left alone.
    """
    notebook = _parse(content) if name.endswith(".ipynb") else None
    if notebook is None:
        return _hash(content)
    cells = [(cell.get("cell_type"), _source(cell), cell.get("attachments") or {}) for cell in notebook["cells"]]
    return _hash(json.dumps(cells, sort_keys=True).encode())


def carry_over(old: bytes, new: bytes) -> tuple[bytes, bool]:
    """The new notebook with the old one's outputs in the cells that are the same; and whether all of them found one."""
    before, after = _parse(old), _parse(new)
    if before is None or after is None:
        return new, False
    remaining: dict[tuple[Any, str], list[dict[str, Any]]] = {}
    for cell in before["cells"]:
        remaining.setdefault((cell.get("cell_type"), _source(cell)), []).append(cell)
    for cell in after["cells"]:
        same = remaining.get((cell.get("cell_type"), _source(cell)))
        if same:
            mine = same.pop(0)
            cell["metadata"] = {**mine.get("metadata", {}), **cell.get("metadata", {})}
            for key in ("outputs", "execution_count"):
                if key in mine:
                    cell[key] = mine[key]
    after["metadata"] = {**before.get("metadata", {}), **after.get("metadata", {})}
    complete = not any(cell.get("outputs") for cells in remaining.values() for cell in cells)
    return (json.dumps(after, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode(), complete


def _parse(content: bytes) -> dict[str, Any] | None:
    """A notebook's JSON, None if it is not one."""
    try:
        notebook = json.loads(content)
        return notebook if all(isinstance(cell, dict) for cell in notebook["cells"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(path: Path) -> dict[str, HandedOut]:
    """What was handed out; a damaged manifest counts as none, so that whatever differs is kept as the learner's."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {name: HandedOut(**entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_manifest(path: Path, manifest: dict[str, HandedOut]) -> None:
    content = json.dumps({name: asdict(entry) for name, entry in sorted(manifest.items())}, indent=1) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        write_atomically(path, content.encode())
