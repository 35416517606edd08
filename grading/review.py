"""Review: three cards on what this learner missed before, with new numbers."""

from __future__ import annotations

from typing import Any

from grading import shelf
from grading.card import show_card
from grading.log import Entry, log, record
from grading.progress import follow
from grading.shelf import Asked, Questions
from grading.text import in_full

CARDS = 3


def review(module: str, answers: Any = None) -> None:
    """Show cards on concepts missed in this module or an earlier one, the latest miss first; a right answer ends it.

    answers: in the text form, one typed answer for each card, such as ["b", 1200, "a"].
    """
    module = in_full(module)
    record("opened", module=module)
    follow(module)
    try:
        cards = to_review(module)
    except shelf.ShelfError as error:
        print(error)
        return
    print(
        "Review, with new numbers: what you missed before."
        if cards
        else "Nothing to review: nothing was missed so far."
    )
    for place, asked in enumerate(cards):
        typed = answers[place] if answers is not None and place < len(answers) else None
        show_card(asked, typed, rest=True)  # a further call asks for other cards


def to_review(module: str) -> list[Asked]:
    """The cards that review(module) shows. Raises ShelfError."""
    sources = [source for source in shelf.modules() if source.module <= module]
    entries = log().entries()
    chosen: list[Asked] = []
    for concept in missed(entries, sources):
        used = {asked.drawn.id for asked in chosen}
        asked = _card_on(concept, sources, entries, used)
        if asked is not None:
            chosen.append(asked)
        if len(chosen) == CARDS:
            break
    return chosen


def missed(entries: list[Entry], sources: list[Questions]) -> list[str]:
    """Concepts whose latest answer, of a card or in a test, was wrong; the one missed last comes first."""
    concepts = {name: source.drawn(name, 0).concept for source in sources for name in source.ids()}
    latest: dict[str, bool] = {}
    for entry in entries:
        outcomes = entry.get("right") if entry["kind"] == "submitted" else {entry.get("question"): entry.get("right")}
        if entry["kind"] not in ("answered", "submitted") or not isinstance(outcomes, dict):
            continue
        for question, right in outcomes.items():
            if question in concepts:
                latest.pop(concepts[question], None)  # so that the order is that of the last answers
                latest[concepts[question]] = bool(right)
    return [concept for concept, right in reversed(latest.items()) if not right]


def _card_on(concept: str, sources: list[Questions], entries: list[Entry], used: set[str]) -> Asked | None:
    """A card on a concept, or else a test question whose verdict is here, drawn as it was not seen yet."""
    for use in ("card", "test"):
        for source in sources:
            for name in source.ids(use):
                if name in used or source.withheld(name) or source.drawn(name, 0).concept != concept:
                    continue
                seen = {entry.get("variant") for entry in entries if entry.get("question") == name}
                return shelf.asked(source, name, attempt=len(seen))
    return None
