"""Public and private folders of questions together, and the catalogue of mistakes."""

import doctest
import importlib
import shutil
from pathlib import Path

import pytest

from grading import misconceptions
from grading.bank import Bank
from grading.fill import variants
from grading.question import QuestionError
from grading.verdict import explain

SAMPLE = Path(__file__).parent / "sample" / "questions"
OWN = """
module: "77"
questions:
- {id: own, use: test, kind: number, concept: sums, cell: show-ring, stem: "One and one?", answer: 1 + 1,
   why: "Counting on from one by one step gives two.", otherwise: "Count on from one."}
- {id: sample-t7, use: test, kind: number, concept: sums, cell: show-ring, stem: "A third of six?", answer: 6 / 3,
   why: "Three twos are six, so one of three is two.", otherwise: "Look for the number that three of make six."}
"""


def private(folder: Path, text: str, name: str = "77.yaml") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_private_folder_adds_and_replaces(tmp_path: Path):
    public, both = Bank.load(SAMPLE), Bank.load(SAMPLE, private(tmp_path, OWN))
    assert both.modules["77"].concepts == public.modules["77"].concepts
    assert [q.id for q in both.of("77")] == [*(q.id for q in public.of("77")), "own"]
    assert both.question("sample-t7").stem == "A third of six?"
    assert explain(both.question("own"), 0)[0].text == "2"


def test_a_private_folder_can_drop_the_public_tests(tmp_path: Path):
    bank = Bank.load(SAMPLE, private(tmp_path, OWN.replace("questions:", "replace: [test]\nquestions:")))
    assert [q.id for q in bank.of("77", "test")] == ["own", "sample-t7"]
    assert len(bank.of("77", "card")) == len(Bank.load(SAMPLE).of("77", "card"))
    with pytest.raises(QuestionError, match="replace: 'tests' is none of card, test, predict"):
        Bank.load(SAMPLE, private(tmp_path, OWN.replace("questions:", "replace: [tests]\nquestions:")))


def test_a_private_folder_adds_a_module(tmp_path: Path):
    text = OWN.replace('"77"', '"78"\ntitle: Own\nconcepts: [sums]').replace("sample-t7", "own-too")
    bank = Bank.load(SAMPLE, private(tmp_path, text, "78.yaml"))
    assert sorted(bank.modules) == ["77", "78"]
    assert bank.modules["78"].title == "Own"
    with pytest.raises(QuestionError, match="title: is empty; write it"):
        Bank.load(SAMPLE, private(tmp_path, text.replace("title: Own\n", ""), "78.yaml"))


def test_an_id_of_another_module_is_refused(tmp_path: Path):
    text = OWN.replace('"77"', '"78"\ntitle: Own\nconcepts: [sums]')
    with pytest.raises(QuestionError, match=r"sample-t7: id: .*77\.yaml, line \d+ has a question of this id already"):
        Bank.load(SAMPLE, private(tmp_path, text, "78.yaml"))


def test_a_seed_draws_other_values_and_changes_no_key():
    def texts(bank: Bank) -> list[str]:
        return [str(variants(question)) for question in bank.of("77") if len(question.params) == 2]

    public, private = Bank.load(SAMPLE), Bank.load(SAMPLE, seed="of an instructor")
    assert texts(public) == texts(Bank.load(SAMPLE))
    assert texts(public) != texts(private)
    keys = [[part.key for part in explain(bank.question("sample-choice"), 0)] for bank in (public, private)]
    assert keys[0] == keys[1]


def test_every_problem_of_every_file_is_in_one_error(tmp_path: Path):
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "77.yaml").read_text(encoding="utf-8")
    (tmp_path / "77.yaml").write_text(text.replace("use: card", "use: cart"), encoding="utf-8")
    (tmp_path / "79.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(QuestionError) as raised:
        Bank.load(tmp_path)
    assert [problem.question for problem in raised.value.problems] == [
        "sample-choice",
        "sample-several",
        "sample-order",
        "",
    ]
    assert str(raised.value).count("use: one of card, test, predict, got 'cart'") == 3


def test_what_is_not_there_is_named():
    bank = Bank.load(SAMPLE)
    with pytest.raises(KeyError, match="no question has the id 'gone'; modules are 77"):
        bank.question("gone")
    with pytest.raises(KeyError, match="no questions for module '03'; there are 77"):
        bank.of("03")


def test_the_catalogue_says_what_a_mistake_is_and_why_it_is_made(tmp_path: Path):
    catalogue = misconceptions.load(SAMPLE.parent / "misconceptions.yaml")
    assert catalogue["sample-twice"].because == "A message has two ends, and both are seen."
    assert len(catalogue) == len(misconceptions.load()) + 2
    for mistake in catalogue.values():
        assert len(mistake.name) <= 60, f"{mistake.id}: the name is one line"
        assert len(mistake.because.split()) >= 4, mistake.id
    (tmp_path / "m.yaml").write_text("id: a\n", encoding="utf-8")
    with pytest.raises(QuestionError, match=r"m\.yaml, line 1: has to be a list of mistakes"):
        misconceptions.load(tmp_path / "m.yaml")


MODULES = ("draw", "fill", "formulas", "lesson", "question", "template")


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of_questions(name: str):
    result = doctest.testmod(importlib.import_module(f"grading.{name}"), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
