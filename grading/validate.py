"""`grading validate [FOLDER ...]`: everything to change in question files, before a learner finds it.

Looks at the repository's own questions and, on top of them, at the *.yaml of these folders, with the mistakes of a
misconceptions.yaml beside each folder. Looked at are single questions (`grading.rules`) and each module as a whole.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from grading import lesson, misconceptions, rules
from grading.bank import QUESTIONS, merge, read_all
from grading.fill import Filled, variants
from grading.lesson import LESSONS, Lesson
from grading.misconceptions import CATALOGUE
from grading.question import Choice, Module, Problem, Question, QuestionError

CONCEPTS_ON_CARDS = 6  # of a module, or all where it has fewer
TESTS = 8  # of a module

Found = Iterator[tuple[str, str]]  # a field, and what to change in it


def main(argv: Sequence[str]) -> int:
    """The command; returns 1 if there is something to change."""
    parser = argparse.ArgumentParser(prog="grading validate", description="Look for mistakes in question files.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="private questions, *.yaml")
    parser.add_argument(
        "--lessons", action="append", default=[], type=Path, metavar="DIR", help="where NN_*.py of private lessons lie"
    )
    options = parser.parse_args(argv)
    problems = check([QUESTIONS, *options.folders], [LESSONS, *options.lessons])
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} to change", file=sys.stderr)
        return 1
    print("nothing to change")
    return 0


def check(folders: Sequence[Path] = (QUESTIONS,), lessons: Sequence[Path] = (LESSONS,)) -> list[Problem]:
    """Everything to change in the questions of these folders, the later on top; lessons: where their sources are."""
    files, problems = read_all(*folders)
    incomplete = {file.module for file in files if file.problems}
    bank, unfit = merge(files)
    problems += unfit
    catalogues = [path for folder in folders if (path := folder.resolve().parent / CATALOGUE.name).exists()]
    mistakes = None
    try:
        mistakes = misconceptions.load(*catalogues)
    except QuestionError as error:
        problems += error.problems
    places = {file.module: file.place for file in files}
    for name, module in sorted(bank.modules.items()):
        found = lesson.find(name, lessons)
        for question in module.questions:
            problems += rules.problems(question, mistakes, found.cells if found else None)
        if name not in incomplete:  # what a left out question covers is not missing
            problems += (Problem(places[name], "", field, text) for field, text in of_module(module, found))
    return problems


def of_module(module: Module, found: Lesson | None) -> Found:
    """What is wrong with a module as a whole."""
    if found is None:
        yield "module", f"there is no lesson {module.id}_*.py; say with --lessons in which folder it is"
    elif difference := lesson.differences(found, module.concepts):
        yield "concepts", difference
    yield from covers_the_concepts(module)
    tests = [question for question in module.questions if question.use == "test"]
    if len(tests) < TESTS:
        yield "questions", f"{len(tests)} of use: test; write at least {TESTS}"
    if tests and 2 * sum(len(variants(question)) > 1 for question in tests) < len(tests):
        yield "questions", "most tests are the same when taken again; give at least half of them params"
    yield from lengths_tell_nothing(module)


def covers_the_concepts(module: Module) -> Found:
    """Every concept has a question, and enough of them a card."""
    for question in module.questions:
        if question.concept not in module.concepts:
            like = get_close_matches(question.concept, module.concepts, 1, 0.4)
            hint = f"; is it {like[0]!r}?" if like else f"; there are {', '.join(module.concepts)}"
            yield f"{question.id}: concept", f"{question.concept!r} is not in the list of concepts{hint}"
    for concept in module.concepts:
        if all(question.concept != concept for question in module.questions):
            yield "concepts", f"{concept!r} has no card, prediction or test question; write one"
    on_cards = {question.concept for question in module.questions if question.use == "card"} & set(module.concepts)
    needed = min(CONCEPTS_ON_CARDS, len(module.concepts))
    if len(on_cards) < needed:
        without = [concept for concept in module.concepts if concept not in on_cards]
        yield "questions", f"cards for {len(on_cards)} concepts; at least {needed}. Without one: {', '.join(without)}"


def lengths_tell_nothing(module: Module) -> Found:
    """The right option is neither the longest nor the shortest in more than half of the choices."""
    choices = [question for question in module.questions if question.kind == "choice"]
    for word, best in (("longest", max), ("shortest", min)):
        telling = [question.id for question in choices if _right_is(question, best)]
        if 2 * len(telling) > len(choices) > 3:
            text = f"the right option is the {word} in {len(telling)} of {len(choices)} choices; at most half"
            yield "questions", f"{text}: reword some of {', '.join(telling)}"


def _right_is(question: Question, best: Callable[[list[int]], int]) -> bool:
    """Whether the right option alone has the greatest or the smallest length, in the first variant."""
    assert isinstance(question.body, Choice)
    try:
        filled = Filled(question, variants(question)[0])
        lengths = [len(filled.text("options", option.value)) for option in question.body.options]
    except QuestionError:  # told by the rules
        return False
    right = next(length for length, option in zip(lengths, question.body.options, strict=True) if option.right)
    return right == best(lengths) and lengths.count(right) == 1
