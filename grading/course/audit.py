"""Before a release leaves the instructor's folder: is anything in it that only graders may have?

Secret are the lines of solutions, mark schemes and checks, and every test question's explanations. A line that the
author also wrote outside of them is not. Files are searched as they are and, where they hold JSON, unpacked.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from grading.bank import Bank
from grading.fill import variants
from grading.question import Question
from grading.verdict import explain

SHORTEST = 12  # characters: shorter lines, such as `return x`, say nothing
REGIONS = (("BEGIN SOLUTION", "END SOLUTION"), ("BEGIN MARK SCHEME", "END MARK SCHEME"), ("BEGIN HIDDEN", "END HIDDEN"))


def secret_lines(sources: Iterable[str], checks: Iterable[str] = ()) -> set[str]:
    """The lines of an assignment's source, and of checks, that may not leave the course folder."""
    secret: set[str] = set()
    public: set[str] = set()
    for source in sources:
        inside = ""
        for line in source.splitlines():
            opened = next((end for begin, end in REGIONS if begin in line), "")
            if opened or (inside and inside in line):
                inside = opened
                continue
            (secret if inside else public).add(_bare(line))
    secret |= {_bare(line) for text in checks for line in text.splitlines() if not line.lstrip().startswith("import ")}
    told = " ".join(public)
    return {line for line in secret if len(line) >= SHORTEST and re.search(r"[a-z]", line) and line not in told}


def secret_texts(bank: Bank, modules: Iterable[str]) -> set[str]:
    """What explains the answers of the modules' test questions, as learners will read it with the feedback."""
    return {text for module in modules for question in bank.of(module, "test") for text in _explanations(question)}


def _explanations(question: Question) -> Iterator[str]:
    for variant in range(len(variants(question))):
        yield from (_plain(part.why) for part in explain(question, variant))


def leaks(folder: Path, secrets: Iterable[str]) -> list[str]:
    """Which secrets stand in which file below folder, a line each."""
    wanted = sorted({_plain(secret) for secret in secrets} - {""})
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        text = _plain(path.read_text(encoding="utf-8", errors="replace"))
        inside = " ".join(map(_plain, _strings(path)))
        found += [
            f"{path.relative_to(folder)}: {secret:.100}" for secret in wanted if secret in text or secret in inside
        ]
    return found


def _strings(path: Path) -> Iterator[str]:
    """Every text in a JSON file, keys too; nothing from other files."""
    try:
        waiting = [json.loads(path.read_bytes())]
    except ValueError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            yield "".join(item for item in value if isinstance(item, str))  # a cell's source is a list of lines
            waiting += value


def _bare(line: str) -> str:
    """A line of source as it stands in a notebook: text in markdown cells is written as comments."""
    return _plain(line).lstrip("# ")


def _plain(text: str) -> str:
    """Spaces do not matter: as in a cell that was indented, or a paragraph that was folded."""
    return " ".join(text.split())
