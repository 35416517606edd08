"""A prediction about the run that follows: committed to before it is compared with anything.

A measured cell runs whether or not its prediction is made; `compare` keeps the result back until it is, and then shows
it where it stands, without running anything again.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grading import shelf, text
from grading.card import explain, guarded
from grading.draw import AnswerError
from grading.form import form
from grading.formulas import quantity
from grading.log import Entry, log, record
from grading.style import Pane, button, frame, marked, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from grading.shelf import Asked

_waiting: dict[tuple[str, str], Callable[[], None]] = {}  # (question, what is kept back) -> what shows it
_asked_in: dict[str, str] = {}  # question -> the cell that asks for the prediction


def predict(question: str, answer: Any = None) -> None:
    """Ask for a prediction; with an answer, typed as the text form asks for it, commit to that one."""
    try:
        asked = shelf.ask(question)
    except shelf.ShelfError as error:
        print(error)
        return
    _asked_in[question] = text.cell_id()
    if answer is not None:
        _commit_in_text(asked, answer)
    elif text.widgets_run():
        show(_widget(asked), text.question(asked.drawn))
    else:
        made = committed(question)
        print(text.question(asked.drawn) if made is None else f"Committed: {text.answer(asked.drawn, made['answer'])}.")


def committed(question: str) -> Any:
    """The log's entry of this learner's prediction, None while it is open. The first one counts."""
    entries = (entry for entry in log().entries() if entry["kind"] == "predicted")
    return next((entry for entry in entries if entry.get("question") == question and _fits(entry)), None)


def _fits(entry: Entry) -> bool:
    """Whether a prediction is still one to the question, which an update may have changed."""
    variant = entry.get("variant")
    try:
        return isinstance(variant, int) and shelf.ask(entry["question"], variant=variant).fits(entry.get("answer"))
    except IndexError:
        return False


def commit(asked: Asked, answer: Any) -> str:
    """Log a prediction and show what waited for it; returns what kept it from being saved, if anything."""
    drawn, problem = asked.drawn, ""
    if committed(drawn.id) is None:
        problem = record(
            "predicted",
            module=drawn.module,
            concept=drawn.concept,
            question=drawn.id,
            variant=drawn.variant,
            answer=answer,
        )
    for kept in [kept for kept in _waiting if kept[0] == drawn.id]:
        _waiting.pop(kept)()
    return problem


def _commit_in_text(asked: Asked, typed: Any) -> None:
    made = committed(asked.drawn.id)
    if made is not None:
        print(f"Committed before: {text.answer(asked.drawn, made['answer'])}. It stays.")
        return
    try:
        answer = text.parse(asked.drawn, typed)
    except AnswerError as error:
        print(error)
        return
    print(f"Committed: {text.answer(asked.drawn, answer)}.")
    commit(asked, answer)


def _widget(asked: Asked) -> Any:
    made = committed(asked.drawn.id)
    controls = form(asked.drawn, made["answer"] if made else None)
    commits, status = button("Commit to this prediction"), Pane()

    def freeze(answer: Any, problem: str = "") -> None:
        controls.freeze()
        commits.layout.display = "none"
        said = f"**Committed:** {text.answer(asked.drawn, answer)}. The comparison stands below the run."
        status.write(f"{said}\n\n{problem}" if problem else said)

    def on_commit(_button: Any) -> None:
        answer = controls.read()
        if answer is None:
            status.write(f"Still open: {text.how_to_fill(asked.drawn)}.", mark="quiet")
            return
        problem = commit(asked, answer)
        freeze(committed(asked.drawn.id)["answer"], problem)  # the first, should another notebook have been quicker

    commits.on_click(guarded(status, on_commit))
    if made:
        freeze(made["answer"])
    return frame(
        marked(Pane(f"**Predict.** {shelf.linked(asked.drawn)}").widget, "stem"), controls.box, commits, status.widget
    )


# ---- the comparison --------------------------------------------------------------------------------------------------


def compare(question: str, measured: Any, title: str = "", axis: str = "", paced: bool = False) -> None:
    """Put a measured result beside the prediction about it, and beside what the formula gives.

    measured: a number in the question's unit, or any value where the question is not about a number. title, axis,
    paced: as in `minidist.viz.beside`. Until the prediction is made the result is kept back.
    """
    try:
        asked = shelf.ask(question)
    except shelf.ShelfError as error:
        print(error)
        return
    record("measured", module=asked.drawn.module, question=question, value=_plain(measured))

    here = text.cell_id()

    def comparison() -> tuple[str, Figure | None]:
        return _comparison(question, measured, title or asked.drawn.concept, axis, paced, here)

    _show_once_committed(asked, "comparison", comparison)


def reveal(question: str, thing: Figure | str) -> None:
    """Show a figure or a text about the run of a prediction that would give its result away: not before it is made."""
    try:
        asked = shelf.ask(question)
    except shelf.ShelfError as error:
        print(error)
        return
    if isinstance(thing, str):
        _show_once_committed(asked, thing, lambda: (f"```\n{thing}\n```", None))
    else:
        _show_once_committed(asked, thing.axes[0].get_title(), lambda: ("", thing))


def _show_once_committed(asked: Asked, name: str, content: Callable[[], tuple[str, Figure | None]]) -> None:
    """Show content, markdown and a figure, now or as soon as the prediction is made; name: what it is, for a rerun."""
    if committed(asked.drawn.id) is not None:
        _display(*content())
    elif not text.widgets_run():
        print(text.plain_lines(f"{_kept_back(asked)} Then run this cell again."))
    else:
        pane = Pane(f"{_kept_back(asked)} It then appears here.")

        def show_here() -> None:
            said, figure = content()
            pane.write(said, *([{"image/png": _png(figure), "text/plain": name}] if figure is not None else []))

        _waiting[asked.drawn.id, name] = show_here
        show(pane.widget, _kept_back(asked))


def _kept_back(asked: Asked) -> str:
    cell = _asked_in.get(asked.drawn.id)
    where = shelf.link(asked.drawn.module, cell) if cell else "above"
    return f"**Measured, and kept back** until you commit to your prediction: {where}."


def _comparison(
    question: str, measured: Any, title: str, axis: str, paced: bool, here: str
) -> tuple[str, Figure | None]:
    """What is said, in markdown, and the figure if the question is about a number."""
    made = committed(question)
    asked = shelf.ask(question, variant=made["variant"])
    judged = asked.judge(made["answer"])
    said = explain(asked, judged, made["answer"], here)
    if asked.drawn.kind == "number":
        said += f"\n\n{_three_numbers(asked, made['answer'], judged.expected, measured)}"
        if not judged.right:
            said += f"\n\n**How the number comes about.** {asked.explain()[0].why.strip()}"
    if asked.drawn.kind != "number":
        mine = text.answer(asked.drawn, made["answer"])
        return f"| your prediction | measured |\n|---|---|\n| {mine} | {measured} |\n\n{said}", None
    from minidist.viz import beside

    figure = beside(
        float(measured),
        predicted=judged.expected,
        prediction=made["answer"],
        unit=asked.drawn.unit,
        title=title,
        axis=axis,
        paced=paced,
    )
    return said, figure


def _three_numbers(asked: Asked, prediction: float, formula: float | None, measured: Any) -> str:
    """What the figure shows, for those who cannot see it."""
    unit = asked.drawn.unit
    shown = {"Your prediction": prediction, "by the formula": formula, "measured": float(measured)}
    return "; ".join(f"{name}: **{quantity(value, unit)}**" for name, value in shown.items() if value is not None) + "."


def _display(said: str, figure: Figure | None) -> None:
    if not text.widgets_run():
        print(said.strip("`\n") if said.startswith("```") else text.plain_lines(said))
        return
    from IPython.display import Markdown, display

    if figure is not None:
        display(figure)
    if said:
        display(Markdown(said))


def _png(figure: Figure) -> str:
    import io

    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=figure.get_facecolor())
    return base64.b64encode(file.getvalue()).decode()


def _plain(value: Any) -> Any:
    """The value as the log can hold it."""
    if isinstance(value, str | int | float | bool):
        return value
    return value.item() if hasattr(value, "item") else str(value)
