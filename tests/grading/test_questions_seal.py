"""Sealed questions: the same questions and verdicts, nothing of them to be found by searching, tests without any."""

import base64
import json
import re
import time
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from grading import seal as sealing
from grading.bank import Bank
from grading.draw import AnswerError, draw
from grading.fill import variants
from grading.misconceptions import load
from grading.question import Choice, Number, Question
from grading.seal import Sealed, SealError, Withheld, seal
from grading.verdict import explain, judge

SAMPLE = Path(__file__).parent / "sample" / "questions"
COURSE = ("00", "02", "03")


@pytest.fixture(scope="module")
def course() -> Bank:
    return Bank.load()


@pytest.fixture(scope="module")
def sample() -> Bank:
    return Bank.load(SAMPLE)


def answers(question: Question, variant: int) -> list[Any]:
    """Every answer that there is to a small question, or for a number one of each sort."""
    drawn = draw(question, variant)
    keys = [option.key for option in drawn.options]
    if question.kind == "choice":
        return keys
    if question.kind == "several":
        return [
            [key for key, taken in zip(keys, each, strict=True) if taken] for each in product([0, 1], repeat=len(keys))
        ]
    if question.kind == "order":
        return [list(each) for each in permutations(keys)][:24]
    if question.kind == "trace":
        rows = [row.key for row in drawn.rows]
        return [dict(zip(rows, each, strict=True)) for each in product(keys, repeat=len(rows))][:30]
    expected = judge(question, variant, 0).expected
    assert expected is not None
    return [0, expected, 2 * expected, expected / 1000, expected + 1e6]


def test_a_sealed_file_asks_and_judges_as_the_questions_do(sample: Bank):
    sealed = Sealed.load(seal(sample, "77", verdicts_for_tests=True))
    assert (sealed.module, sealed.title, len(sealed.concepts)) == ("77", "Sample", 3)
    assert sealed.ids() == tuple(question.id for question in sample.of("77"))
    assert sealed.ids("predict") == ("sample-number",)
    for question in sample.of("77"):
        assert sealed.variants(question.id) == len(variants(question))
        for variant in range(len(variants(question))):
            assert sealed.drawn(question.id, variant, "ada") == draw(question, variant, "ada")
            assert sealed.explain(question.id, variant) == explain(question, variant)
            for answer in [None, *answers(question, variant)]:
                assert sealed.judge(question.id, variant, answer) == judge(question, variant, answer)


@pytest.mark.parametrize("module", COURSE)
def test_the_courses_questions_survive_sealing(course: Bank, module: str):
    sealed = Sealed.load(seal(course, module, verdicts_for_tests=True))
    for question in course.of(module):
        for variant in range(len(variants(question))):
            assert sealed.drawn(question.id, variant, "ada") == draw(question, variant, "ada")
            assert sealed.explain(question.id, variant) == explain(question, variant)


def test_a_choice_opens_the_picked_option_and_no_other(sample: Bank, monkeypatch: pytest.MonkeyPatch):
    opened = []
    unlock = sealing._unlock
    monkeypatch.setattr(sealing, "_unlock", lambda key, blob: opened.append(blob) or unlock(key, blob))
    sealed = Sealed.load(seal(sample, "77", verdicts_for_tests=True))
    for option in sealed.drawn("sample-choice", 0).options:
        sealed.judge("sample-choice", 0, option.key)
    assert len(opened) == len(set(opened)) == 3


# ---- nothing is found by searching -----------------------------------------------------------------------------------


def searched(content: bytes) -> bytes:
    """All that a search of the file could find: its bytes, its JSON texts decoded, and every box decoded."""
    boxes = re.findall(rb'"([A-Za-z0-9+/=]{60,})"', content)
    assert boxes or b"boxes" not in content
    return b"\n".join([content, json.dumps(json.loads(content)).encode(), *map(base64.b64decode, boxes)])


@pytest.mark.parametrize("module", COURSE)
@pytest.mark.parametrize("verdicts_for_tests", [True, False])
def test_no_explanation_mistake_or_verdict_is_found(course: Bank, module: str, verdicts_for_tests: bool):
    content = searched(seal(course, module, verdicts_for_tests))
    for question in course.of(module):
        for variant in range(len(variants(question))):
            for part in explain(question, variant):
                assert part.why.encode() not in content
                for start in range(0, len(part.why) - 40, 40):
                    assert part.why[start : start + 40].encode() not in content
    for mistake in load():
        # The catalogue's ids are words too: as an id one stands in quotes.
        assert f'"{mistake}"'.encode() not in content
    for word in (b"right", b"true", b"false", b"mistake", b"why", b"value", b"within", b"missed"):
        assert b'"' + word + b'"' not in content


def test_what_is_searched_for_would_be_found(course: Bank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sealing, "_mask", lambda key, data: data)  # sealing that does nothing
    monkeypatch.setattr(sealing, "_pack", lambda entries: json.dumps(entries, ensure_ascii=False).encode())
    content = searched(seal(course, "00", verdicts_for_tests=True))
    part = explain(course.of("00")[0], 0)[0]
    assert part.why.encode() in content
    assert b'"mistake"' in content


def test_options_of_a_question_are_sealed_in_equal_sizes_and_a_neutral_order(course: Bank):
    firsts = []
    for module in COURSE:
        for name, question in json.loads(seal(course, module, verdicts_for_tests=True))["questions"].items():
            sizes = {len(box) for variant in question["variants"] for box in variant["boxes"].values()}
            assert len(sizes) == 1, name
            body = course.question(name).body
            for variant in question["variants"]:
                keys = [option["key"] for option in variant["options"]]
                assert keys == sorted(keys) or question["kind"] == "trace"
                assert list(variant["boxes"]) == sorted(variant["boxes"])
            if isinstance(body, Choice) and not body.several:
                right = [part.key for part in explain(course.question(name), 0) if part.right]
                firsts.append([option["key"] for option in question["variants"][0]["options"]].index(right[0]))
    assert all(firsts.count(place) < len(firsts) / 2 for place in range(4))


def test_equal_explanations_look_different_in_every_box(sample: Bank):
    content = json.loads(seal(sample, "77", verdicts_for_tests=True))
    boxes = [
        box
        for question in content["questions"].values()
        for variant in question["variants"]
        for box in variant["boxes"].values()
    ]
    assert len(boxes) == len(set(boxes)) > 30


# ---- tests without verdicts ------------------------------------------------------------------------------------------


def test_a_graded_test_ships_no_verdict(sample: Bank):
    content = seal(sample, "77", verdicts_for_tests=False)
    sealed = Sealed.load(content)
    for name in sealed.ids("test"):
        raw = json.loads(content)["questions"][name]
        assert "salt" not in raw
        assert all(set(variant) == {"stem", "options", "rows"} for variant in raw["variants"])
        assert sealed.withheld(name)
        question = sample.question(name)
        with pytest.raises(Withheld, match="come with the feedback"):
            sealed.judge(name, 0, answers(question, 0)[0])
        with pytest.raises(Withheld):
            sealed.explain(name, 0)
        assert sealed.drawn(name, 0, "ada") == draw(question, 0, "ada")
    for name in (*sealed.ids("card"), *sealed.ids("predict")):
        assert not sealed.withheld(name)
        assert sealed.explain(name, 0)


def test_an_answer_is_checked_where_the_verdict_is_withheld_too(sample: Bank):
    sealed = Sealed.load(seal(sample, "77", verdicts_for_tests=False))
    with pytest.raises(AnswerError):
        sealed.judge("sample-trace", 0, "all of them")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_same_questions_give_the_same_bytes_and_others_another_key(sample: Bank):
    first = seal(sample, "77", verdicts_for_tests=True)
    assert seal(sample, "77", verdicts_for_tests=True) == first
    module = sample.modules["77"]
    number = sample.question("sample-t1")
    assert isinstance(number.body, Number)
    changed = replace(number, body=replace(number.body, why=number.body.why + " So it is."))
    questions = tuple(changed if question.id == number.id else question for question in module.questions)
    second = seal(Bank({"77": replace(module, questions=questions)}), "77", verdicts_for_tests=True)
    differing = [
        name
        for name, question in json.loads(second)["questions"].items()
        if question != json.loads(first)["questions"][name]
    ]
    assert differing == ["sample-t1"]
    assert json.loads(first)["questions"]["sample-t1"]["salt"] != json.loads(second)["questions"]["sample-t1"]["salt"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"format": 1}', b"\xff\xfe", b"null", b'{"format": 1, "module": 3}']
)
def test_what_is_no_sealed_file_is_refused(content: bytes):
    with pytest.raises(SealError, match="make course"):
        Sealed.load(content)


def test_a_file_of_another_format_is_refused():
    with pytest.raises(SealError, match="format 2, not 1"):
        Sealed.load(b'{"format": 2}')


def test_a_changed_box_is_noticed(sample: Bank):
    content = json.loads(seal(sample, "77", verdicts_for_tests=True))
    boxes = content["questions"]["sample-choice"]["variants"][0]["boxes"]
    first, second = list(boxes)[:2]
    boxes[first] = boxes[second]  # copied over another one
    changed = bytearray(base64.b64decode(boxes[second]))
    changed[30] ^= 1
    boxes[second] = base64.b64encode(changed).decode()
    sealed = Sealed.load(json.dumps(content).encode())
    for key in (first, second):
        with pytest.raises(SealError, match="was changed"):
            sealed.judge("sample-choice", 0, key)


def test_an_unknown_question_is_named(sample: Bank):
    sealed = Sealed.load(seal(sample, "77", verdicts_for_tests=True))
    with pytest.raises(KeyError, match="module 77 has no question 'gone'; it has sample-choice"):
        sealed.variants("gone")
    with pytest.raises(IndexError):
        sealed.drawn("sample-choice", 6)
    with pytest.raises(IndexError):
        sealed.judge("sample-choice", -1, None)


def test_sealing_and_opening_are_quick(course: Bank):
    start = time.process_time()
    sealed = Sealed.load(seal(course, "03", verdicts_for_tests=True))
    assert time.process_time() - start < 5
    opened = []
    for name in sealed.ids("card")[:3]:  # the quickest, since the machine may be busy
        sealing._master.cache_clear()
        start = time.process_time()
        sealed.explain(name, 0)
        opened.append(time.process_time() - start)
    assert min(opened) < 0.05


def test_a_sealed_file_names_the_edition_of_its_questions(sample: Bank):
    own = Bank.load(SAMPLE, seed="of a course")
    content = seal(own, "77", verdicts_for_tests=False)
    assert Sealed.load(content).edition == own.edition
    assert Sealed.load(seal(sample, "77", verdicts_for_tests=False)).edition == Bank().edition != own.edition
    assert b"of a course" not in content
    old = {key: value for key, value in json.loads(content).items() if key != "edition"}
    assert Sealed.load(json.dumps(old).encode()).edition == ""
