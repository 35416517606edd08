"""The text form: a question as lines, an answer as a learner types it, a verdict as lines.

It stands in wherever widgets cannot run, and is what an exported page or a search sees of a card.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import string
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from grading.draw import AnswerError
from grading.formulas import quantity

if TYPE_CHECKING:
    from grading.draw import Drawn, Shown

LETTERS = string.ascii_lowercase
WIDTH = 100

# What a number may be typed in, by what is counted; one of them is the question's own unit.
BYTES: Mapping[str, float] = {
    "bytes": 1,
    "byte": 1,
    "B": 1,
    "kB": 1e3,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
SECONDS: Mapping[str, float] = {"s": 1, "second": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60}
SCALES = (BYTES, {f"{name}/s": size for name, size in BYTES.items()}, SECONDS)
EXAMPLES: Mapping[str, str] = {"bytes": "590592 or 590.6 kB", "bytes/s": "25 GB/s", "s": "0.25 or 250 ms"}
ANY_NUMBER = "0.5, 1200 or 1.2e3"
WHOLE = frozenset({"messages", "microbatches", "numbers", "ranks", "rounds", "slices", "stages", "steps", "tokens"})


def widgets_run() -> bool:
    """Whether a widget can be shown here: in a Jupyter kernel with ipywidgets, unless MINIDIST_TEXT=1 asks for text."""
    if os.environ.get("MINIDIST_TEXT") == "1" or importlib.util.find_spec("ipywidgets") is None:
        return False
    return getattr(shell(), "kernel", None) is not None


def shell() -> Any:
    """The IPython session that this code runs in, or None."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def cell_id() -> str:
    """The id of the notebook cell that runs, "" where it is not known."""
    try:
        return shell().kernel.get_parent()["metadata"]["cellId"]
    except (AttributeError, KeyError, TypeError):
        return ""


# ---- what a learner types --------------------------------------------------------------------------------------------


def in_full(name: object) -> str:
    """A module or an exercise as it is numbered, two digits first.

    >>> in_full("2"), in_full(2.3), in_full("02.3"), in_full("3.1-left"), in_full("other")
    ('02', '02.3', '02.3', '03.1-left', 'other')
    """
    return re.sub(r"^\d(?!\d)", lambda match: f"0{match[0]}", str(name).strip())


def number(typed: str, unit: str = "") -> float:
    """A number as a learner types it, in the question's unit.

    >>> number("590,592", "bytes"), number("590.6 kB", "bytes"), number("2 ms", "s"), number("500 MB", "GB")
    (590592.0, 590600.0, 0.002, 0.5)

    Raises AnswerError, saying what to type instead, also for what can be no amount of this unit.
    """
    match = re.fullmatch(r"\s*([-+]?[\d.,_]+(?:[eE][-+]?\d+)?)\s*([^\d\s].*?)?\s*", typed)
    wanted = f"{amount(unit)}, such as {example(unit)}"
    if match is None:
        raise AnswerError(f"{typed.strip()!r} is not a number: type {wanted}.")
    digits, word = match[1], match[2] or ""
    if "," in digits and not re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", digits):
        raise AnswerError(f"{digits!r} could be two numbers: use a point for decimals, as in {wanted}.")
    scales = next((each for each in SCALES if unit in each), {unit: 1.0})
    if word and word not in scales:
        known = ", ".join(name for name in scales if name) or "none"
        raise AnswerError(f"{word!r} is not a unit of this answer ({known}): type {wanted}.")
    try:
        value = float(digits.replace(",", "")) * scales[word or unit] / scales[unit]
    except ValueError:
        raise AnswerError(f"{typed.strip()!r} is not a number: type {wanted}.") from None
    return possible(value, unit, typed.strip())


def amount(unit: str) -> str:
    """What is asked for in a unit.

    >>> amount("bytes"), amount("steps"), amount("")
    ('a number in bytes, 0 or more', 'a whole number of steps, 0 or more', 'a number, 0 or more')
    """
    kind = f"a whole number of {unit}" if unit in WHOLE else f"a number{' in ' + unit if unit else ''}"
    return f"{kind}, 0 or more"


def possible(value: float, unit: str, typed: str) -> float:
    """The value, if there can be so much of this unit; else raises AnswerError. typed: how it is called there."""
    if not 0 <= value < math.inf or (unit in WHOLE and value != round(value)):
        raise AnswerError(f"{typed} cannot be the answer: type {amount(unit)}, such as {example(unit)}.")
    return value


def example(unit: str) -> str:
    """How an amount of this unit may be typed."""
    return "3" if unit in WHOLE else EXAMPLES.get(unit, ANY_NUMBER)


def parse(drawn: Drawn, typed: Any) -> Any:
    """What a learner passed as an answer, in the form that is stored: keys for letters, a float for a number.

    choice "b"; several "a, c"; number 1200 or "1.2 kB"; order "c a b"; trace "a c b", a letter for each row.
    Raises AnswerError, saying what to type instead.
    """
    if drawn.kind == "number":
        if isinstance(typed, bool):
            raise AnswerError(f"{typed} is not a number: {how_to_answer(drawn)}.")
        if isinstance(typed, int | float):
            return possible(float(typed), drawn.unit, f"{typed:.12g}")
        return number(str(typed), drawn.unit)
    letters = re.findall(r"[A-Za-z]+", " ".join(typed) if isinstance(typed, list | tuple) else str(typed))
    keys = dict(zip(LETTERS, (option.key for option in drawn.options), strict=False))
    unknown = [letter for letter in letters if letter.lower() not in keys]
    if unknown or not letters:
        what = repr(unknown[0]) if unknown else repr(typed)
        raise AnswerError(f"{what} is none of the options a to {LETTERS[len(keys) - 1]}: {how_to_answer(drawn)}.")
    chosen = [keys[letter.lower()] for letter in letters]
    wanted = {"choice": 1, "order": len(drawn.options), "trace": len(drawn.rows)}.get(drawn.kind)
    repeats = drawn.kind in ("order", "several") and len(set(chosen)) != len(chosen)
    if (wanted is not None and len(chosen) != wanted) or repeats:
        raise AnswerError(f"{typed!r} does not answer it: {how_to_answer(drawn)}.")
    if drawn.kind == "choice":
        return chosen[0]
    if drawn.kind == "trace":
        return {row.key: key for row, key in zip(drawn.rows, chosen, strict=True)}
    return sorted(chosen) if drawn.kind == "several" else chosen


def how_to_answer(drawn: Drawn) -> str:
    """What an answer of this kind looks like, typed."""
    letters = ", ".join(LETTERS[: len(drawn.options)])
    if drawn.kind == "choice":
        return f'give one letter of {letters}, such as "{LETTERS[len(drawn.options) - 1]}"'
    if drawn.kind == "several":
        return f'give every letter of {letters} that is right, such as "a, c"'
    if drawn.kind == "number":
        return f"give {amount(drawn.unit)}, such as {example(drawn.unit)}"
    if drawn.kind == "order":
        return f'give all of {letters} in order, such as "{" ".join(reversed(LETTERS[: len(drawn.options)]))}"'
    return f"give a letter of {letters} for each of the {len(drawn.rows)} rows, from top to bottom"


def how_to_fill(drawn: Drawn) -> str:
    """What completes an answer of this kind, in a form."""
    return {
        "choice": "pick one",
        "several": "tick every right one",
        "number": f"type {amount(drawn.unit)}",
        "order": "choose what stands at each place",
        "trace": "choose an answer for each row",
    }[drawn.kind]


# ---- what a learner reads --------------------------------------------------------------------------------------------


def plain(markdown: str) -> str:
    """Markdown without its marks, on one line: for a button or a terminal.

    >>> plain("**Each** rank calls `all_reduce`\\nonce")
    'Each rank calls all_reduce once'
    """
    text = re.sub(r"\*\*(.+?)\*\*|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])", lambda m: m[1] or m[2], markdown)
    return " ".join(text.replace("`", "").split())


def question(drawn: Drawn, number_in_test: int | None = None) -> str:
    """A question as text: stem, lettered options or rows, and what an answer looks like."""
    head = f"{number_in_test}. " if number_in_test else ""
    lines = [_fill(head + drawn.stem), *_lettered(drawn.options)]
    if drawn.rows:
        lines += ["  rows:", *(f"    {row.text}" for row in drawn.rows)]
    return "\n".join([*lines, f"To answer: {how_to_answer(drawn)}."])


def _lettered(options: tuple[Shown, ...]) -> list[str]:
    return [_fill(f"{letter}) {option.text}", "  ", "     ") for letter, option in zip(LETTERS, options, strict=False)]


def _fill(text: str, first: str = "", rest: str = "") -> str:
    """Prose wrapped; a stem with lines of its own (a table, code) keeps them."""
    if "\n" in text.strip():
        return textwrap.indent(text.strip(), first)
    return textwrap.fill(plain(text), WIDTH, initial_indent=first, subsequent_indent=rest)


def answer(drawn: Drawn, given: Any) -> str:
    """A stored answer in the words of the question.

    Keys that the question no longer has are shown as they are.
    """
    texts = {option.key: plain(option.text) for option in drawn.options}
    if drawn.kind == "number":
        return quantity(given, drawn.unit)
    if drawn.kind == "trace":
        rows = {row.key: plain(row.text) for row in drawn.rows}
        return "; ".join(f"{rows.get(row, row)}: {texts.get(key, key)}" for row, key in given.items())
    keys = [given] if isinstance(given, str) else given
    return ("; then " if drawn.kind == "order" else "; ").join(texts.get(key, key) for key in keys) or "none of them"


def plain_lines(markdown: str) -> str:
    """Markdown of several paragraphs as text for a terminal: marks, links and folds gone, wrapped."""
    unfolded = re.sub(r"</?(?:details|summary)>", "", markdown)
    unlinked = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", unfolded)
    blocks = ["" if block == "---" else block for block in map(str.strip, re.split(r"\n\s*\n|\n(?=- )", unlinked))]
    return "\n".join(_fill(plain(block), "", "  " if block.startswith("- ") else "") for block in blocks if block)
