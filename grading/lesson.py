"""What questions need to know of a lesson's source (py:percent): the concepts its head lists, and its cells' tags."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LESSONS = Path(__file__).resolve().parents[1] / "course" / "src"
TO_TEN = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = (*TO_TEN, "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen")


@dataclass(frozen=True)
class Lesson:
    """file: its name. concepts: the lines of the list in the head. said: the number in front of it. cells: all tags."""

    file: str
    concepts: tuple[str, ...]
    said: int | None
    cells: frozenset[str]


def read(path: Path) -> Lesson:
    """The lesson in a py:percent file."""
    source = path.read_text(encoding="utf-8")
    cells = re.split(r"^# %%", source, flags=re.MULTILINE)[1:]
    tags = [_tags(cell) for cell in cells]
    head = next((cell for cell, own in zip(cells, tags, strict=True) if "head" in own), "")
    said, concepts = _concepts(head)
    return Lesson(path.name, concepts, said, frozenset(tag for own in tags for tag in own))


def find(module: str, folders: Sequence[Path]) -> Lesson | None:
    """The lesson NN_*.py of a module in the last of these folders that has one."""
    found = [path for folder in folders for path in sorted(folder.glob(f"{module}_*.py"))]
    return read(found[-1]) if found else None


def differences(lesson: Lesson, concepts: Sequence[str]) -> str:
    """How the concepts of a question file differ from the head of the lesson, "" if they do not.

    A line of the head is one concept, or several with commas between.

    >>> lesson = Lesson("02_x.py", ("reduce, all-reduce", "ring in two halves"), 3, frozenset())
    >>> differences(lesson, ["reduce", "all-reduce", "ring in two halves"])
    ''
    >>> differences(lesson, ["reduce", "ring in two halves"])
    "02_x.py has 'reduce, all-reduce' where this has 'reduce'"
    """
    left = list(concepts)
    for line in lesson.concepts:
        apart = [part.strip() for part in line.split(",")]
        if left[:1] == [line]:
            del left[0]
        elif left[: len(apart)] == apart:
            del left[: len(apart)]
        else:
            return f"{lesson.file} has {line!r} where this has " + (repr(left[0]) if left else "nothing more")
    if left:
        return f"{left[0]!r} is not in the head of {lesson.file}"
    if lesson.said != len(concepts):
        return f"the head of {lesson.file} says {lesson.said or 'no number of'} concepts, and these are {len(concepts)}"
    return ""


def _tags(cell: str) -> list[str]:
    match = re.search(r"tags=\[([^\]]*)\]", cell.split("\n", 1)[0])
    return re.findall(r'"([^"]+)"', match[1]) if match else []


def _concepts(head: str) -> tuple[int | None, tuple[str, ...]]:
    """The number said and the list under "**Ten concepts**"; a line may go on in an indented one."""
    match = re.search(r"^# \*\*(\w+) concepts\*\*$", head, flags=re.MULTILINE)
    if not match:
        return None, ()
    concepts: list[str] = []
    for line in head[match.end() :].lstrip("#\n ").splitlines():
        text = line.removeprefix("#").removeprefix(" ")
        if text.startswith("- ") or not concepts:
            concepts.append(text.removeprefix("- ").strip())
        elif text.startswith("  "):
            concepts[-1] += " " + text.strip()
        else:
            break
    word = match[1].lower()
    return NUMBERS.index(word) + 1 if word in NUMBERS else None, tuple(concepts)
