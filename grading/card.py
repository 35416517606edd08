"""A concept card: one question, and every answer explains itself where it was picked."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grading import shelf, text
from grading.draw import AnswerError
from grading.form import form
from grading.log import log, record
from grading.style import Pane, button, frame, marked, option, show

if TYPE_CHECKING:
    from grading.shelf import Asked
    from grading.verdict import Part, Verdict


def card(question: str, answer: Any = None, rest: bool = False) -> None:
    """Show a card; with an answer, typed as the text form asks for it, print what there is to say about that answer.

    rest: of an order or a trace, print also what follows on the first wrong place or row.

    >>> card("dp-traffic")             # doctest: +SKIP
    >>> card("dp-traffic", "b")        # doctest: +SKIP
    """
    try:
        asked = shelf.ask(question)
    except shelf.ShelfError as error:
        print(error)
        return
    show_card(asked, answer, rest)


def show_card(asked: Asked, answer: Any = None, rest: bool = False) -> None:
    """A card on a question that is at hand already."""
    if answer is not None:
        _answer_in_text(asked, answer, rest)
    elif text.widgets_run():
        show(card_widget(asked), text.question(asked.drawn))
    else:
        print(text.question(asked.drawn))


def _answer_in_text(asked: Asked, typed: Any, rest: bool) -> None:
    try:
        answer = text.parse(asked.drawn, typed)
    except AnswerError as error:
        print(error)
        return
    judged = asked.judge(answer)
    if not rest or judged.right or answer not in earlier(asked):  # the same wrong answer, to read on, is no attempt
        judged, _ = answered(asked, answer)
    follows = after_it(asked, judged)
    if follows and not rest:
        follows = f"\n\n{_builds_on_it(asked)}: the same call with `rest=True`."
    print(text.plain_lines(explain(asked, judged, answer) + follows))


def answered(asked: Asked, answer: Any) -> tuple[Verdict, str]:
    """Judge an answer and log it; returns the verdict and what kept it from being saved, if anything."""
    judged, drawn = asked.judge(answer), asked.drawn
    problem = record(
        "answered",
        module=drawn.module,
        concept=drawn.concept,
        question=drawn.id,
        use=drawn.use,
        variant=drawn.variant,
        answer=answer,
        right=judged.right,
        mistakes=list(judged.mistakes),
    )
    return judged, problem


def earlier(asked: Asked) -> list[Any]:
    """This learner's answers to this very draw, oldest first; those that no longer fit it are left out."""
    drawn = asked.drawn
    answers = [
        entry.get("answer")
        for entry in log().entries()
        if entry["kind"] == "answered" and (entry.get("question"), entry.get("variant")) == (drawn.id, drawn.variant)
    ]
    return [answer for answer in answers if asked.fits(answer)]


# ---- the widget ------------------------------------------------------------------------------------------------------


def card_widget(asked: Asked) -> Any:
    """The card as an ipywidgets box, with the explanations of earlier answers open."""
    status = Pane()
    body = _options(asked, status) if asked.drawn.kind == "choice" else _checked(asked, status)
    return frame(marked(Pane(shelf.linked(asked.drawn)).widget, "stem"), *body, status.widget)


def _options(asked: Asked, status: Pane) -> list[Any]:
    """One button an option; its explanation opens below it."""
    before, widgets = earlier(asked), []
    for shown in asked.drawn.options:
        pick, pane = option(text.plain(shown.text)), Pane()

        def open_up(judged: Verdict, key: str = shown.key, pick: Any = pick, pane: Pane = pane) -> None:
            marked(pick, "picked")
            pane.write(explain(asked, judged, key), mark="right" if judged.right else "wrong")

        def picked(_button: Any, key: str = shown.key, open_up: Callable[[Verdict], None] = open_up) -> None:
            judged, problem = answered(asked, key)
            open_up(judged)
            status.write(problem, mark="quiet")

        pick.on_click(guarded(status, picked))
        if shown.key in before:
            open_up(asked.judge(shown.key))
        widgets += [pick, pane.widget]
    return widgets


def _checked(asked: Asked, status: Pane) -> list[Any]:
    """A form and a button that checks it."""
    before, said = earlier(asked), Pane()
    controls = form(asked.drawn, before[-1] if before else None)

    def tell(judged: Verdict, answer: Any) -> None:
        said.write(explain(asked, judged, answer) + after_it(asked, judged), mark="right" if judged.right else "wrong")

    def check(_button: Any) -> None:
        answer = controls.read()
        if answer is None:
            status.write(f"Not complete yet: {text.how_to_fill(asked.drawn)}.", mark="quiet")
            return
        judged, problem = answered(asked, answer)
        tell(judged, answer)
        status.write(problem, mark="quiet")

    checks = button("Check")
    checks.on_click(guarded(status, check))
    if before:
        tell(asked.judge(before[-1]), before[-1])
    return [controls.box, checks, said.widget]


def guarded(status: Pane, call: Callable[[Any], None]) -> Callable[[Any], None]:
    """A callback whose failure is read in the card: elsewhere nobody would see it."""

    @functools.wraps(call)
    def guard(widget: Any) -> None:
        try:
            call(widget)
        except AnswerError as error:
            status.write(str(error), mark="quiet")
        except Exception as error:
            status.write(f"This did not work ({type(error).__name__}: {error}). Run the cell again.", mark="quiet")

    return guard


def explain(asked: Asked, judged: Verdict, answer: Any, here: str = "") -> str:
    """A verdict as markdown, with links to the cells that show why; here: the cell it stands in, which needs none."""
    if asked.drawn.kind in ("choice", "number"):
        reasons = " ".join(reason(asked, part, here) for part in judged.parts)
        return f"**{outcome(judged)}** {reasons}".strip()
    return f"**{outcome(judged)}**\n\n{explain_parts(asked, judged.parts, answer)}"


def after_it(asked: Asked, judged: Verdict) -> str:
    """What follows on the first wrong place or row, folded: a learner may first want to try again from there."""
    if judged.right or asked.drawn.kind not in ("order", "trace"):
        return ""
    rest = asked.explain()[len(judged.parts) :]
    lines = [f"- **{part.text}**: {reason(asked, part)}" for part in rest]
    if not lines:
        return ""
    return f"\n\n<details><summary>{_builds_on_it(asked)}</summary>\n\n" + "\n".join(lines) + "\n\n</details>"


def _builds_on_it(asked: Asked) -> str:
    what = "row" if asked.drawn.kind == "trace" else "place"
    return f"What comes after this {what} builds on it. Correct it and check again, or see what follows"


def explain_parts(asked: Asked, parts: tuple[Part, ...], answer: Any = None) -> str:
    """Explanations as a markdown list, one for each option, place or row."""
    return "\n".join(f"- **{part.text}**: {about(asked, part, answer)} {reason(asked, part)}" for part in parts)


def outcome(judged: Verdict) -> str:
    return "Right." if judged.right else "Not right."


def about(asked: Asked, part: Part, answer: Any) -> str:
    """Whether one part is right and, of an option, whether it was chosen."""
    said = "right" if part.right else "not right"
    if asked.drawn.kind == "order":
        said = "at its place" if part.right else "belongs here"
    if asked.drawn.kind == "several" and answer is not None:
        said += ", and you chose it" if part.key in answer else ", and you did not choose it"
    return f"{said}."


def reason(asked: Asked, part: Part, here: str = "") -> str:
    """Why, and where to see it."""
    see = f" See {shelf.link(asked.drawn.module, part.cell)}." if part.cell and part.cell != here else ""
    return f"{part.why.strip()}{see}"
