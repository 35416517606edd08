"""Sliders on a figure: whatever draws from plain values becomes something to play with."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minidist.viz.style import png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Option = Sequence[Any] | bool


class Explorer:
    """A figure, and one control for each argument of the function that draws it.

    draw(**values) -> Figure. options: argument -> its values in order, the first one to start from unless `start` says
    otherwise; or True / False for a checkbox. play: the argument that a play button runs through.
    Without ipywidgets, on a forge, or in an exported page it is its first figure.
    """

    def __init__(
        self,
        draw: Callable[..., Figure],
        options: Mapping[str, Option],
        start: Mapping[str, Any] | None = None,
        play: str | None = None,
    ) -> None:
        self.draw, self.options, self.play = draw, dict(options), play
        first = {name: option if isinstance(option, bool) else option[0] for name, option in self.options.items()}
        self.start = first | dict(start or {})

    def figure(self, **values: Any) -> Figure:
        """The figure for these values; those not named keep their starting value."""
        return self.draw(**{self._argument(name): value for name, value in (self.start | values).items()})

    @staticmethod
    def _argument(name: str) -> str:
        """A control is labelled with words and a unit; the function's argument is its first words joined.

        >>> Explorer._argument("bucket size [MB]")
        'bucket_size'
        """
        return name.split(" [")[0].replace(" ", "_")

    def widget(self, picture: bytes | None = None) -> Any:
        """The controls above the figure, as an ipywidgets box. Raises ImportError without ipywidgets."""
        import ipywidgets as widgets

        image = widgets.Image(
            value=png(self.figure()) if picture is None else picture,
            format="png",
            layout={"max_width": "98%", "width": "auto"},
        )
        controls = {name: self._control(widgets, name, option) for name, option in self.options.items()}

        def redraw(_change: Any) -> None:
            image.value = png(self.figure(**{name: control.value for name, control in controls.items()}))

        for control in controls.values():
            control.observe(redraw, names="value")
        boxes: list[Any] = list(controls.values())
        if self.play:
            target, steps = controls[self.play], list(controls[self.play].options)
            button = widgets.Play(min=0, max=len(steps) - 1, interval=900)
            button.observe(lambda change: setattr(target, "value", steps[change["new"]]), names="value")
            boxes.insert(0, button)
        # Stretched to the notebook's width the picture would be blurred and taller than the window.
        return widgets.VBox([*boxes, image], layout={"align_items": "flex-start", "overflow": "hidden"})

    def _control(self, widgets: Any, name: str, option: Option) -> Any:
        style, layout = {"description_width": "14em"}, {"width": "46em"}
        if isinstance(option, bool):
            return widgets.Checkbox(value=self.start[name], description=name, style=style, layout=layout, indent=True)
        return widgets.SelectionSlider(
            options=list(option),
            value=self.start[name],
            description=name,
            style=style,
            layout=layout,
            continuous_update=False,
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        picture = png(self.figure())
        static = {"image/png": b64encode(picture).decode(), "text/plain": f"explorer of {', '.join(self.options)}"}
        try:
            box = self.widget(picture)
        except ImportError:
            return static
        return dict(box._repr_mimebundle_()) | static
