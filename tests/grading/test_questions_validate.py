"""grading validate: the repository's questions have nothing to change, and a planted fault is told with its place."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from grading import rules, validate
from grading.bank import Bank
from grading.lesson import LESSONS
from grading.misconceptions import load
from grading.question import Choice, Number, Place
from grading.read import question

SAMPLE = Path(__file__).parent / "sample"


def test_the_repositorys_questions_have_nothing_to_change():
    assert [str(problem) for problem in validate.check()] == []


@pytest.mark.parametrize("module", sorted(path.name[:2] for path in LESSONS.glob("[0-9][0-9]_*.py")))
def test_every_lesson_has_its_questions(module: str):
    bank = Bank.load()
    assert len(bank.of(module, "test")) >= 8
    assert len({question.concept for question in bank.of(module, "card")}) >= 6
    assert bank.of(module, "predict")


def test_every_wrong_answer_names_a_catalogued_mistake():
    bank, catalogue = Bank.load(), load()
    for module in bank.modules:
        for written in bank.of(module):
            body = written.body
            if isinstance(body, Choice):
                assert {option.mistake for option in body.options if not option.right} <= set(catalogue)
            elif isinstance(body, Number):
                assert {wrong.mistake for wrong in body.wrong} <= set(catalogue)
            else:
                assert body.mistake in catalogue


def test_the_example_in_the_documentation_is_a_question():
    page = (LESSONS.parents[1] / "docs" / "questions.md").read_text(encoding="utf-8")
    example = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    asked = question(example["questions"][0], example["module"], Place("docs/questions.md"))
    catalogue, cells = load(), {"measure-traffic", "ring-halves"}
    told = [problem.text for problem in rules.problems(asked, catalogue, cells)]
    assert all("words; say why" in text or "is the same as" in text for text in told), told  # its whys are dots


# ---- planted faults --------------------------------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "sample"))


def found(sample: Path) -> list[str]:
    """What the validator says of the sample, without the folder's name."""
    problems = validate.check([sample / "questions"], [sample / "lessons"])
    return [str(problem).replace(f"{sample / 'questions'}/", "") for problem in problems]


def plant(sample: Path, *changes: Sequence[str], file: str = "questions/77.yaml") -> list[str]:
    path = sample / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path.write_text(text, encoding="utf-8")
    return found(sample)


def test_the_sample_has_nothing_to_change(sample: Path):
    assert found(sample) == []


FAULTS = yaml.safe_load((SAMPLE / "faults.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"].replace(" ", "-"))
def test_a_planted_fault_is_told(sample: Path, fault: dict):
    told = plant(sample, *fault["change"])
    assert any(fault["told"] in line for line in told), told
    assert all(line.startswith("77.yaml, line ") for line in told)
    assert len(told) <= 3, "one fault is told once, not in every draw"


def test_options_that_differ_by_one_are_let_through(sample: Path):
    assert (
        plant(sample, ("value: an all-reduce", "value: 1023"), ("value: a reduce and a broadcast", "value: 1024")) == []
    )


def test_more_draws_than_can_be_looked_at_are_told(sample: Path):
    told = plant(sample, ("params: {n: [2, 3, 4]}", f"params: {{n: {list(range(1001))}}}"))
    assert any("params: make 1001 combinations; at most 1000, so give fewer values" in line for line in told)


def test_a_fault_of_the_catalogue_is_told(sample: Path):
    told = plant(sample, ("  because: Nobody has drawn the arrow yet.\n", ""), file="misconceptions.yaml")
    assert told == [f"{sample}/misconceptions.yaml, line 5: sample-backwards: because: is missing; write it"]
    shutil.copy(SAMPLE / "misconceptions.yaml", sample)
    told = plant(sample, ("sample-backwards", "sample-twice"), file="misconceptions.yaml")
    assert told == [f"{sample}/misconceptions.yaml, line 5: sample-twice: id: is there twice; keep one"]


def test_a_lesson_that_lists_other_concepts_is_told(sample: Path):
    told = plant(sample, ("**Three", "**Four"), file="lessons/77_sample.py")
    assert told == ["77.yaml, line 1: concepts: the head of 77_sample.py says 4 concepts, and these are 3"]


def test_a_missing_lesson_is_told_once(sample: Path):
    (sample / "lessons" / "77_sample.py").unlink()
    assert found(sample) == [
        "77.yaml, line 1: module: there is no lesson 77_*.py; say with --lessons in which folder it is"
    ]


def test_a_right_option_that_its_length_betrays_is_told(sample: Path):
    def choices(right: str) -> str:
        option = '{{value: "{}", {}, why: "Ranks differ in what they hold here, for the reason {} and no other one."}}'
        wrong = [option.format(text * 3, "mistake: sample-twice", text) for text in ("abc", "def")]
        options = ", ".join([option.format(right, "right: true", "x"), *wrong])
        head = "use: card, kind: choice, concept: sums, cell: show-ring, stem: Which one?"
        return "".join(f"- {{id: sample-length-{i}, {head}, options: [{options}]}}\n" for i in range(4))

    path = sample / "questions" / "77.yaml"
    text = path.read_text(encoding="utf-8")
    for right, word in (("much longer than the others", "longest"), ("short", "shortest")):
        path.write_text(text + choices(right), encoding="utf-8")
        told = found(sample)
        assert len(told) == 1
        assert f"the right option is the {word} in" in told[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "77.yaml, line 1: has to be fields, each `name: value`, got nothing"),
        (b"- 1\n- 2\n", "77.yaml, line 1: has to be fields, each `name: value`, got a list of 2"),
        (b"\xff\xfe\x00", "77.yaml: cannot be read as UTF-8 text"),
        (b'module: "77"\nquestions:\n- {id: a\n', "77.yaml, line 4: no valid YAML"),
        (b"module: !!python/object/apply:os.system ['true']\n", "77.yaml, line 1: no valid YAML"),
        (b'module: "77"\n', "77.yaml, line 1: questions: is missing; write it"),
        (b'module: "77"\nquestions: []\n', "77.yaml, line 1: title: is empty; write it"),
    ],
)
def test_a_file_that_is_no_question_file_is_told(sample: Path, content: bytes, message: str):
    (sample / "questions" / "77.yaml").write_bytes(content)
    assert found(sample)[0].startswith(message)


def test_a_broken_file_hides_no_other(sample: Path):
    (sample / "questions" / "78.yaml").write_text("a: [", encoding="utf-8")
    told = plant(sample, ("    right: true\n", ""))
    assert [line.split(":")[0] for line in told] == ["77.yaml, line 5", "78.yaml, line 2"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_where_and_what(sample: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validate, "QUESTIONS", sample / "questions")  # the repository's own have their test above
    command = [str(sample / "questions"), "--lessons", str(sample / "lessons")]
    assert validate.main(["--lessons", str(sample / "lessons")]) == 0
    assert "nothing to change" in capsys.readouterr().out
    (sample / "questions" / "77.yaml").write_text("a: [", encoding="utf-8")
    assert validate.main(command) == 1
    assert "77.yaml, line 2: no valid YAML" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_told(tmp_path: Path):
    told = [str(problem) for problem in validate.check([SAMPLE / "questions", tmp_path / "gone"], [SAMPLE / "lessons"])]
    assert told == [f"{tmp_path / 'gone'}: is no folder; question files lie in one, NN.yaml each"]
