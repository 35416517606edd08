"""How cards look: JupyterLab's own colours, so that they read in its light and its dark theme alike."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

# The values behind the commas are for notebook tools that do not set JupyterLab's variables. What is right or wrong is
# said in words; the border repeats it, solid or dashed.
CSS = """
.minidist-card { border: 1px solid var(--jp-border-color1, #bdbdbd); 
  border-left: 4px solid var(--jp-brand-color1, #1976d2);
  padding: 6px 16px 10px; margin: 6px 2px; max-width: 780px; box-sizing: border-box; overflow: hidden;
  color: var(--jp-content-font-color1, inherit); background: var(--jp-layout-color1, transparent); }
.minidist-card .jupyter-widgets { overflow: visible; }
.minidist-card .jp-RenderedMarkdown { padding-right: 0; }
.minidist-card .jp-RenderedMarkdown p { max-width: 72ch; }
.minidist-card button.jupyter-button { height: auto; min-height: 32px; line-height: 1.4; white-space: normal;
  padding: 5px 14px; color: var(--jp-ui-font-color1, #000); background: var(--jp-layout-color2, #eee);
  border: 1px solid var(--jp-border-color1, #bdbdbd); border-radius: 3px; box-shadow: none; }
.minidist-card button.jupyter-button:hover:enabled { border-color: var(--jp-brand-color1, #1976d2); }
.minidist-card button.minidist-option { text-align: left; background: var(--jp-layout-color1, #fff); }
.minidist-card button.minidist-picked { background: var(--jp-layout-color2, #eee); font-weight: 600; }
.minidist-card :is(button, input, select):focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2);
  outline-offset: 1px; }
.minidist-card .widget-radio-box { width: 100%; }
.minidist-card .widget-radio-box label, .minidist-card .widget-checkbox label { white-space: normal; height: auto;
  line-height: 1.4; margin: 2px 0; align-items: flex-start; overflow: visible; max-width: 100%; width: auto; }
.minidist-card .widget-radio-box input { flex: none; margin: 0 6px 0 2px; }
.minidist-card .widget-dropdown > label { text-align: left; }
.minidist-card .minidist-next { border-top: 1px solid var(--jp-border-color2, #e0e0e0); margin-top: 10px;
  padding-top: 4px; }
.minidist-card .widget-checkbox, .minidist-card .widget-radio { width: 100%; height: auto; }
.minidist-card select { height: auto; padding: 4px; appearance: auto; background-image: none !important; }
.minidist-card .minidist-right { border-left: 4px solid var(--jp-success-color1, #388e3c); padding-left: 10px; }
.minidist-card .minidist-wrong { border-left: 4px dashed var(--jp-warn-color1, #c75000); padding-left: 10px; }
.minidist-card .minidist-quiet { color: var(--jp-ui-font-color2, #616161); }
"""

AGAIN = "What you answered is kept. To see it here again, run the first code cell of this notebook, and then this cell."
# Of two neighbouring outputs the first is the widget or, without its kernel, JupyterLab's "model not found".
WHEN_GONE = """.jp-OutputArea-child:has(.minidist-live) + .jp-OutputArea-child:has(.minidist-again),
.jp-OutputArea-child:has(+ .jp-OutputArea-child .minidist-again):not(:has(.minidist-live)):has(> .jupyter-widgets) {
  display: none; }
"""


def frame(*children: Any) -> Any:
    """The box of one card, with its style sheet."""
    import ipywidgets as widgets

    sheet = widgets.HTML(f"<style>{CSS}</style>", layout={"display": "none"})
    return marked(widgets.VBox([sheet, *children]), "card")


def marked(widget: Any, *names: str) -> Any:
    """The widget, with the style sheet's classes minidist-NAME."""
    for name in names:
        widget.add_class(f"minidist-{name}")
    return widget


class Pane:
    """A place for prose in a card. It can be written from any thread, and shows nothing while it is empty.

    The notebook's own renderer draws it, so that code, formulas and links to cells work as in a markdown cell.
    """

    def __init__(self, markdown: str = "") -> None:
        import ipywidgets as widgets

        self.widget = widgets.Output()
        self.write(markdown)

    def write(self, markdown: str, *more: dict[str, str], mark: str = "") -> None:
        """Replace what is shown: markdown, then more MIME bundles (a figure). mark: "right", "wrong" or "quiet"."""
        for name in ("right", "wrong", "quiet"):
            (self.widget.add_class if name == mark else self.widget.remove_class)(f"minidist-{name}")
        bundles = [{"text/markdown": markdown, "text/plain": markdown}] if markdown else []
        self.widget.outputs = tuple(
            {"output_type": "display_data", "data": bundle, "metadata": {}} for bundle in [*bundles, *more]
        )
        self.widget.layout.display = "block" if self.widget.outputs else "none"


def button(description: str) -> Any:
    """A button as wide as its words."""
    import ipywidgets as widgets

    return widgets.Button(description=description, layout={"width": "auto", "align_self": "flex-start"})


def option(description: str) -> Any:
    """A button as wide as the card, with its words at the left: one of several answers."""
    import ipywidgets as widgets

    return marked(widgets.Button(description=description, layout={"width": "100%"}), "option")


def show(box: Any, text: str) -> None:
    """Display a card: the widget, with the text that exported pages and searches see, and what a reopened lesson shows.

    Widgets live in the kernel, and a saved lesson has none of them. The second output takes the place of a widget that
    is gone; while there is one it is hidden, and names the controls for those who hear them.
    """
    from IPython.core.formatters import format_display_data
    from IPython.display import display

    data, _ = format_display_data(marked(box, "live"))
    display({**data, "text/plain": text}, raw=True)
    display({"text/html": beside(), "text/plain": AGAIN}, raw=True)


@cache
def beside() -> str:
    """HTML for the output beside a widget: a note, when it is shown, and the names of the widget's controls."""
    script = Path(__file__).with_name("names.js").read_text(encoding="utf-8")
    return f'<div class="minidist-again">{AGAIN}</div>\n<style>\n{WHEN_GONE}</style>\n<script>\n{script}</script>'
