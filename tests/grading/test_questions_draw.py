"""What a learner sees of a question, and how answers to it are judged and explained."""

import itertools
import json
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from grading.bank import Bank
from grading.draw import AnswerError, Drawn, draw, variant_for
from grading.fill import VARIANTS, all_draws, variants
from grading.question import Question, key
from grading.template import FillError, evaluate, render
from grading.verdict import Part, explain, judge

SAMPLE = Path(__file__).parent / "sample" / "questions"


@pytest.fixture(scope="module")
def bank() -> Bank:
    return Bank.load(SAMPLE)


def keys(drawn: Drawn, *starts: str) -> list[str]:
    """The keys of the options whose texts begin like this."""
    return [next(option.key for option in drawn.options if option.text.startswith(start)) for start in starts]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_what_a_learner_sees_is_the_same_everywhere_and_always(bank: Bank):
    """Written down, since answers that learners have stored depend on it: on keys, variants and which is drawn."""
    question = bank.question("sample-choice")
    assert variants(question)[:2] == [{"ranks": 4, "size": 16}, {"ranks": 4, "size": 32}]
    assert variant_for(question.id, "ada", 0, 6) == 2
    assert [(option.key, option.text) for option in draw(question, 1, "ada").options] == [
        ("6e8e72", "8"),
        ("1ffeaa", "16, since both ends count"),
        ("138d3c", "32 on every rank"),
    ]


def test_numbers_differ_by_variant_and_an_attempt_draws_the_next(bank: Bank):
    question = bank.question("sample-choice")
    stems = [draw(question, variant).stem for variant in range(len(variants(question)))]
    assert len(set(stems)) == len(stems) == 6
    seen = [variant_for(question.id, "ada", attempt, 6) for attempt in range(12)]
    assert sorted(seen[:6]) == list(range(6))
    assert seen[:6] == seen[6:]
    assert len({variant_for(question.id, f"learner {i}", 0, 6) for i in range(40)}) == 6


def test_no_more_variants_are_kept_than_needed_and_a_seed_keeps_others(bank: Bank):
    many = replace(bank.question("sample-t1"), params={"n": tuple(range(100))})
    assert len(variants(many)) == VARIANTS
    assert variants(many) == variants(many)
    private = variants(replace(many, seed="of an instructor"))
    assert sum(values in variants(many) for values in private) <= 3
    assert all(values in all_draws(many) for values in private)


def test_options_are_in_an_order_of_the_learners_own(bank: Bank):
    question = bank.question("sample-choice")
    right = key(question.id, "{{ int(part) }}")
    places = Counter([o.key for o in draw(question, 0, f"learner {i}").options].index(right) for i in range(300))
    assert all(60 < places[place] < 140 for place in range(3)), "the right option has no preferred place"
    orders = {tuple(o.key for o in draw(question, variant, "ada").options) for variant in range(6)}
    assert len(orders) > 1


def test_an_order_is_not_shown_in_its_order(bank: Bank):
    shown = Counter(tuple(o.text for o in draw(bank.question("sample-order"), 0, f"l{i}").options) for i in range(120))
    assert len(shown) == 6
    assert shown[("cut", "add", "hand round")] < 40


def test_choices_of_a_trace_keep_their_order(bank: Bank):
    drawn = draw(bank.question("sample-trace"), 0, "ada")
    assert [int(option.text) for option in drawn.options] == sorted(int(option.text) for option in drawn.options)
    assert [row.text for row in drawn.rows] == ["rank 0", "rank 1", "rank 2"]


def test_what_is_shown_holds_no_verdict(bank: Bank):
    for question in bank.of("77"):
        shown = json.dumps(asdict(draw(question, 0, "ada")))
        assert not any(part.why in shown for part in explain(question, 0))
        assert "sample-twice" not in shown
        assert "sample-backwards" not in shown


def test_a_key_outlives_everything_but_its_own_text(bank: Bank):
    question = bank.question("sample-several")
    before = {option.key for option in draw(question).options}
    body = question.body
    options = [*reversed(body.options)]
    options[0] = replace(options[0], value="a reduction", why="Another explanation, which is of no importance to it.")
    after = {option.key for option in draw(replace(question, body=replace(body, options=tuple(options)))).options}
    assert len(before & after) == 2


@pytest.mark.parametrize("variant", [-1, 6, "0", None, True, 1.0])
def test_a_variant_that_there_is_not_is_refused(bank: Bank, variant):
    with pytest.raises(IndexError, match="sample-choice has the variants 0 to 5"):
        draw(bank.question("sample-choice"), variant)


# ---- judging ---------------------------------------------------------------------------------------------------------


def test_a_choice_explains_the_option_that_was_picked(bank: Bank):
    question = bank.question("sample-choice")
    for variant in range(6):
        drawn = draw(question, variant)
        verdicts = {option.key: judge(question, variant, option.key) for option in drawn.options}
        assert [verdict.right for verdict in verdicts.values()].count(True) == 1
        for picked, verdict in verdicts.items():
            assert [part.key for part in verdict.parts] == [picked]
            assert verdict.parts[0].text == drawn.text(picked)
            assert verdict.mistakes == (() if verdict.right else ("sample-twice",))
    wrong = judge(question, 0, key(question.id, "{{ int(2 * part) }}, since both ends count")).parts[0]
    assert (wrong.cell, wrong.why[:20]) == ("show-ring", "That would be so if ")
    assert judge(question, 0, key(question.id, "{{ int(part) }}")).parts[0].cell == "show-slices"


def test_several_need_exactly_the_right_ones_and_explain_all(bank: Bank):
    question = bank.question("sample-several")
    drawn = draw(question)
    right = set(keys(drawn, "an all-reduce", "a reduce and"))
    every = [option.key for option in drawn.options]
    for count in range(4):
        for picked in itertools.combinations(every, count):
            verdict = judge(question, 0, list(picked))
            assert verdict.right == (set(picked) == right)
            assert {part.key for part in verdict.parts} == set(every)
            assert {part.key for part in verdict.parts if part.right} == right
            assert verdict.mistakes == (("sample-backwards",) if set(picked) - right else ())
            assert judge(question, 0, picked[::-1]).right == verdict.right


@pytest.mark.parametrize(
    ("factor", "right", "mistake"),
    [
        (1, True, None),
        (1.019, True, None),
        (0.981, True, None),
        (1.021, False, None),
        (2, False, "sample-twice"),
        (2.03, False, "sample-twice"),
        (1e-3, False, "sample-backwards"),
        (0, False, None),
        (-1, False, None),
        (3, False, None),
    ],
)
def test_a_number_is_met_within_its_tolerance_or_tells_its_mistake(
    bank: Bank, factor: float, right: bool, mistake: str
):
    question = bank.question("sample-number")
    for variant, values in enumerate(variants(question)):
        expected = 2 * (values["ranks"] - 1) / values["ranks"] * 1000 * values["kilo"]
        verdict = judge(question, variant, factor * expected)
        assert verdict.right == right
        assert verdict.expected == expected
        assert verdict.mistakes == ((mistake,) if mistake else ())
        assert len(verdict.parts) == 1
        otherwise = verdict.parts[0].why.startswith("Count the messages")
        assert otherwise == (not right and mistake is None)


def test_a_number_without_tolerance_is_exact_up_to_rounding(bank: Bank):
    question = bank.question("sample-t7")
    assert judge(question, 0, 3).right
    assert judge(question, 0, math.nextafter(3, 4)).right
    assert not judge(question, 0, 3.0001).right
    assert judge(bank.question("sample-t6"), 0, 4.6).right  # tolerance_abs 0.1
    assert not judge(bank.question("sample-t6"), 0, 4.61).right


def test_an_order_is_explained_up_to_the_first_wrong_place(bank: Bank):
    question = bank.question("sample-order")
    cut, add, hand = keys(draw(question), "cut", "add", "hand")
    right = judge(question, 0, [cut, add, hand])
    assert right.right
    assert [part.text for part in right.parts] == ["cut", "add", "hand round"]
    assert all(part.right and part.mistake is None for part in right.parts)
    wrong = judge(question, 0, [cut, hand, add])
    assert not wrong.right
    assert [(part.text, part.right, part.mistake) for part in wrong.parts] == [
        ("cut", True, None),
        ("add", False, "sample-backwards"),  # what belongs there, and why
    ]
    assert wrong.mistakes == ("sample-backwards",)
    assert [part.text for part in judge(question, 0, [hand, add, cut]).parts] == ["cut"]


def test_a_trace_is_explained_up_to_the_first_wrong_row(bank: Bank):
    question = bank.question("sample-trace")
    for variant, values in enumerate(variants(question)):
        drawn, first = draw(question, variant), values["first"]
        rows = [row.key for row in drawn.rows]
        held = keys(drawn, str(first + 2), str(first), str(first + 1))
        right = judge(question, variant, dict(zip(rows, held, strict=True)))
        assert right.right
        assert right.parts[0].text == f"rank 0: {first + 2}"
        wrong = judge(question, variant, {**dict(zip(rows, held, strict=True)), rows[1]: held[0]})
        assert [(part.text, part.right) for part in wrong.parts] == [
            (f"rank 0: {first + 2}", True),
            (f"rank 1: {first}", False),
        ]
        assert wrong.mistakes == ("sample-backwards",)


def test_no_answer_is_wrong_and_opens_nothing(bank: Bank):
    for question in bank.of("77"):
        verdict = judge(question, 0, None)
        assert (verdict.right, verdict.parts, verdict.mistakes) == (False, (), ())


def test_explain_holds_everything(bank: Bank):
    assert [len(explain(question, 0)) for question in bank.of("77")][:5] == [3, 3, 4, 3, 3]
    number: tuple[Part, ...] = explain(bank.question("sample-number"), 0)
    assert [part.right for part in number] == [True, False, False, False]
    assert "bytes (" in number[0].text


HOSTILE = [
    "",
    "ffffff",
    3,
    -1.5,
    float("nan"),
    float("inf"),
    10**400,
    10**5000,
    True,
    [],
    ["a"],
    [["a"]],
    {},
    {"a": "b"},
]
HOSTILE += [{1: 2}, [None], "x" * 10_000, b"bytes", object(), {"a": {"b": {}}}]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: type(answer).__name__)
def test_what_cannot_be_an_answer_is_refused_with_few_words(bank: Bank, answer):
    for question in bank.of("77")[:5]:
        possible = (question.kind == "several" and answer == []) or (question.kind == "number" and answer in (3, -1.5))
        if possible:
            continue
        with pytest.raises(AnswerError) as raised:
            judge(question, 0, answer)
        assert len(str(raised.value)) < 250


def test_answers_of_another_shape_are_refused(bank: Bank):
    order, trace = bank.question("sample-order"), bank.question("sample-trace")
    cut, add, hand = keys(draw(order), "cut", "add", "hand")
    with pytest.raises(AnswerError, match="put all 3 in order; here are 2"):
        judge(order, 0, [cut, add])
    with pytest.raises(AnswerError, match="each option at most once"):
        judge(order, 0, [cut, add, hand, cut])
    rows = draw(trace).rows
    with pytest.raises(AnswerError, match="answer each of the 3 rows"):
        judge(trace, 0, {rows[0].key: draw(trace).options[0].key})
    with pytest.raises(AnswerError, match="rank 1: 'ffffff' is no option here"):
        judge(trace, 0, {row.key: "ffffff" if row.text == "rank 1" else draw(trace).options[0].key for row in rows})


def test_answers_survive_json(bank: Bank):
    for question in bank.of("77"):
        answer = right_answer(question)
        stored = json.loads(json.dumps(draw(question).checked(answer)))
        assert judge(question, 0, stored).right


def right_answer(question: Question):
    parts = [part for part in explain(question, 0) if part.right]
    if question.kind == "number":
        return judge(question, 0, 0).expected
    if question.kind == "trace":
        drawn = draw(question)
        return {p.key: next(o.key for o in drawn.options if p.text.endswith(f": {o.text}")) for p in parts}
    found = [part.key for part in parts]
    return found[0] if question.kind == "choice" else found


def test_the_right_answer_to_every_question_of_the_course_is_right():
    bank = Bank.load()
    for module in bank.modules:
        for question in bank.of(module):
            assert judge(question, 0, right_answer(question)).right, question.id


# ---- texts and expressions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "().__class__.__base__.__subclasses__()",
        "n.__class__",
        "cost.__dict__",
        "''.__class__.__mro__",
        "range.__globals__",
        "nbytes.__globals__['md']",
        "__import__('os')",
        "open('x')",
        "eval('1')",
        "self._TemplateReference__context",
    ],
)
def test_an_expression_reaches_nothing_but_its_names(expression: str):
    from grading.formulas import FORMULAS

    with pytest.raises(FillError):
        evaluate(expression, {**FORMULAS, "n": 1})
    with pytest.raises(FillError):
        render(f"{{{{ {expression} }}}}", {**FORMULAS, "n": 1})


def test_a_list_of_the_draw_cannot_be_changed():
    with pytest.raises(FillError):
        render("{{ work.append(1) }}", {"work": [1]})
