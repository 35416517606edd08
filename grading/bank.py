"""All questions, by module: the repository's own, and an instructor's private ones beside them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.question import Module, Place, Problem, Question, QuestionError
from grading.read import File, read

QUESTIONS = Path(__file__).parent / "questions"


def edition_of(seed: str) -> str:
    """A short name for the values that a seed draws, which does not tell the seed.

    >>> edition_of("") == edition_of("of a course")
    False
    """
    return hashlib.sha256(f"edition {seed}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Bank:
    """Modules by their number, "00" to "13". edition: goes along with sealed questions and the answers to them."""

    modules: Mapping[str, Module] = field(default_factory=dict)
    edition: str = edition_of("")

    @classmethod
    def load(cls, *folders: Path, seed: str = "") -> "Bank":
        """The questions of all *.yaml in these folders, by default the repository's own.

        A later folder adds modules and questions, and replaces those of the same id. seed: draw other values than the
        public ones. Raises QuestionError that lists every problem of every file.
        """
        files, problems = read_all(*folders)
        if problems:
            raise QuestionError(*problems)
        bank, problems = merge(files, seed)
        if problems:
            raise QuestionError(*problems)
        return bank

    def question(self, question_id: str) -> Question:
        """The question of this id. Raises KeyError."""
        for module in self.modules.values():
            for question in module.questions:
                if question.id == question_id:
                    return question
        raise KeyError(f"no question has the id {question_id!r}; modules are {', '.join(sorted(self.modules))}")

    def of(self, module: str, use: str | None = None) -> tuple[Question, ...]:
        """The questions of a module in their order; use: only the cards, tests or predictions. Raises KeyError."""
        if module not in self.modules:
            raise KeyError(f"no questions for module {module!r}; there are {', '.join(sorted(self.modules))}")
        return tuple(q for q in self.modules[module].questions if use is None or q.use == use)


def read_all(*folders: Path) -> tuple[list[File], list[Problem]]:
    """Every question file of these folders, by default the repository's own, and all that is wrong with them."""
    files, problems = [], []
    for folder in folders or (QUESTIONS,):
        if not folder.is_dir():
            problems.append(
                Problem(Place(str(folder)), "", "", "is no folder; question files lie in one, NN.yaml each")
            )
        for path in sorted(folder.glob("*.yaml")):
            try:
                file = read(path, path.name if folder == QUESTIONS else str(path))
            except QuestionError as error:
                problems += error.problems
                continue
            files.append(file)
            problems += file.problems
    return files, problems


def merge(files: list[File], seed: str = "") -> tuple[Bank, list[Problem]]:
    """One bank of these files, the later ones on top, and what does not fit together."""
    modules: dict[str, Module] = {}
    problems: list[Problem] = []
    owner: dict[str, Question] = {}
    for file in files:
        before = modules.get(file.module)
        kept = {q.id: q for q in (before.questions if before else ()) if q.use not in file.replace}
        for question in file.questions:
            other = owner.get(question.id)
            if other and (other.module != question.module or other.place.file == question.place.file):
                text = f"{other.place} has a question of this id already; ids are unique over all modules"
                problems.append(Problem(question.place, question.id, "id", text))
            owner[question.id] = question
            kept[question.id] = replace(question, seed=seed)
        try:
            modules[file.module] = Module(
                file.module,
                file.title or (before.title if before else ""),
                file.concepts or (before.concepts if before else ()),
                tuple(kept.values()),
            )
        except ValueError as error:
            problems.append(Problem(file.place, "", *str(error).split(": ", 1)))
    return Bank(modules, edition_of(seed)), problems
