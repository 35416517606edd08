"""The controls of one question, by kind: what they hold is an answer as it is stored, or None while it is open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grading import text
from grading.draw import AnswerError
from grading.style import marked

if TYPE_CHECKING:
    from grading.draw import Drawn, Shown

OPEN = "choose"


@dataclass(frozen=True)
class Form:
    """Controls and how to read them. Every control is reached with Tab and worked with arrows, space or typing.

    read() returns the answer, None while it is not complete, and raises AnswerError where the text typed is none.
    """

    controls: tuple[Any, ...]
    box: Any
    read: Callable[[], Any]

    def on_change(self, call: Callable[[Any], None]) -> None:
        """Have call(change) made after each change that the learner makes."""
        for control in self.controls:
            control.observe(call, names="value")

    def freeze(self) -> None:
        """Keep what is answered from being changed; it stays readable."""
        for control in self.controls:
            control.disabled = True


def form(drawn: Drawn, answer: Any = None) -> Form:
    """The form of a question, filled in with an earlier answer where it still fits the question."""
    build = {"choice": _choice, "several": _several, "number": _number, "order": _order, "trace": _trace}
    return build[drawn.kind](drawn, answer)


def _choice(drawn: Drawn, answer: Any) -> Form:
    import ipywidgets as widgets

    known = {option.key for option in drawn.options}
    radio = widgets.RadioButtons(
        options=[(text.plain(option.text), option.key) for option in drawn.options],
        value=answer if isinstance(answer, str) and answer in known else None,
        layout={"width": "100%"},
    )
    return Form((radio,), radio, lambda: radio.value)


def _several(drawn: Drawn, answer: Any) -> Form:
    import ipywidgets as widgets

    before = answer if isinstance(answer, list) else []
    boxes = {
        option.key: widgets.Checkbox(option.key in before, description=text.plain(option.text), indent=False)
        for option in drawn.options
    }
    touched = [answer is not None]

    def read() -> list[str] | None:
        chosen = sorted(key for key, box in boxes.items() if box.value)
        return chosen if chosen or touched[0] else None

    for box in boxes.values():
        box.observe(lambda _change: touched.__setitem__(0, True), names="value")
    return Form(tuple(boxes.values()), marked(widgets.VBox(list(boxes.values())), "group"), read)


def _number(drawn: Drawn, answer: Any) -> Form:
    import ipywidgets as widgets

    field = widgets.Text(
        value=f"{answer:.12g}" if isinstance(answer, int | float) else "",
        placeholder=f"such as {text.example(drawn.unit)}",
        description="Your number",
        style={"description_width": "initial"},
        layout={"width": "24em"},
        continuous_update=False,
    )
    unit = widgets.Label(drawn.unit)
    box = widgets.HBox([field, unit])
    return Form((field,), box, lambda: text.number(field.value, drawn.unit) if field.value.strip() else None)


def _order(drawn: Drawn, answer: Any) -> Form:
    import ipywidgets as widgets

    before = answer if isinstance(answer, list) and len(answer) == len(drawn.options) else []
    labels = [f"{place + 1}." for place in range(len(drawn.options))]
    places = _menus(labels, drawn.options, before or [""] * len(labels))

    def read() -> list[str] | None:
        keys = [menu.value for menu in places]
        if "" in keys:
            return None
        if len(set(keys)) < len(keys):
            raise AnswerError("One of them is there twice: give each a place of its own.")
        return keys

    return Form(tuple(places), marked(widgets.VBox(places), "group"), read)


def _trace(drawn: Drawn, answer: Any) -> Form:
    import ipywidgets as widgets

    before = answer if isinstance(answer, dict) else {}
    labels = [text.plain(row.text) for row in drawn.rows]
    menus = _menus(labels, drawn.options, [before.get(row.key, "") for row in drawn.rows])

    def read() -> dict[str, str] | None:
        keys = {row.key: menu.value for row, menu in zip(drawn.rows, menus, strict=True)}
        return None if "" in keys.values() else keys

    return Form(tuple(menus), marked(widgets.VBox(menus), "group"), read)


def _menus(labels: list[str], options: tuple[Shown, ...], values: list[str]) -> list[Any]:
    """A menu of the options for each label; "" is open."""
    import ipywidgets as widgets

    known = {option.key for option in options}
    return [
        widgets.Dropdown(
            options=[(OPEN, ""), *((text.plain(option.text), option.key) for option in options)],
            value=value if value in known else "",
            description=label,
            style={"description_width": f"{min(max(map(len, labels)), 60) * 0.52 + 0.5:.1f}em"},
            layout={"width": "auto", "max_width": "100%"},
        )
        for label, value in zip(labels, values, strict=True)
    ]
