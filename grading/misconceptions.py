"""The catalogue of mistakes: one id for a wrong option, a mutant and a failure message that come of the same thinking.

- id: half-a-ring
  name: counting only one half of a ring all-reduce
  looks: a number half as large as the right one
  because: the reduce-scatter already adds everything up, so the all-gather is easily forgotten
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grading import yamlfile
from grading.fields import FieldError, Fields, make_at
from grading.question import ID, Place, Problem, QuestionError

CATALOGUE = Path(__file__).parent / "misconceptions.yaml"


@dataclass(frozen=True)
class Misconception:
    """A mistake: its name in one line, how it shows, and why people think so."""

    id: str
    name: str
    looks: str
    because: str

    def __post_init__(self) -> None:
        if not ID.fullmatch(self.id):
            raise ValueError(f"id: lower case letters and digits with single - between, got {self.id!r}")
        for field in ("name", "looks", "because"):
            if not getattr(self, field).strip():
                raise ValueError(f"{field}: is empty; write it")
        if "\n" in self.name.strip():
            raise ValueError("name: one line; the rest goes into looks and because")


def load(*files: Path) -> Mapping[str, Misconception]:
    """The mistakes of the repository's catalogue and then of these files, by id; a later one replaces an earlier one.

    Raises QuestionError with every problem of the first file that has some.
    """
    found: dict[str, Misconception] = {}
    for file in (CATALOGUE, *files):
        found |= _read(file, file.name if file == CATALOGUE else str(file))
    return found


def _read(path: Path, name: str) -> dict[str, Misconception]:
    raw, lines = yamlfile.load(path, name)
    if not isinstance(raw, list):
        raise QuestionError(Problem(Place(name, 1), "", "", "has to be a list of mistakes, each `- id: ...`"))
    found: dict[str, Misconception] = {}
    problems = []
    for each, line in zip(raw, lines, strict=True):
        try:
            mistake = make_at("", each, _misconception)
        except FieldError as error:
            problems.append(
                Problem(
                    Place(name, line),
                    str(each.get("id", "")) if isinstance(each, dict) else "",
                    error.field,
                    error.text,
                )
            )
            continue
        if mistake.id in found:
            problems.append(Problem(Place(name, line), mistake.id, "id", "is there twice; keep one"))
        found[mistake.id] = mistake
    if problems:
        raise QuestionError(*problems)
    return found


def _misconception(fields: Fields) -> Misconception:
    return Misconception(*(fields.text(name) for name in ("id", "name", "looks", "because")))
