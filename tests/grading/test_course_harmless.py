"""What a learner wrote or displayed never runs in the browser of whoever looks at the graded notebook."""

import html
import re

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.notebooknode import NotebookNode

from grading.course.harmless import harmless

ATTACKS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<iframe src=x></iframe>",
]
LINKS = [
    "[x](javascript:alert(1))",
    "[x]( <JavaScript:alert(1)>)",
    "[x](java&#115;cript:alert(1))",
    "[x][y]\n\n[y]: javascript:alert(1)",
    "<javascript:alert(1)>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](data:text/html,<script>alert(1)</script>)",
]


def shown(*cells: NotebookNode) -> str:
    notebook = harmless(nbformat.v4.new_notebook(cells=list(cells)))
    exporter = HTMLExporter(template_name="classic", exclude_input_prompt=True)
    page, _ = exporter.from_notebook_node(notebook)
    return page.partition("<body")[2]


@pytest.mark.parametrize("attack", [*ATTACKS, *LINKS])
def test_in_a_text(attack: str):
    page = shown(nbformat.v4.new_markdown_cell(f"Because **n** - 1, see [there](https://x.org). {attack}"))
    assert "<strong>n</strong>" in page
    assert 'href="https://x.org"' in page
    for sign in ("<script>alert", "<img src", "<iframe"):
        assert sign not in page
    links = [html.unescape(link).strip().lower() for link in re.findall(r"""href=["']([^"']*)""", page)]
    assert [link for link in links if not link.startswith(("https:", "#"))] == []


@pytest.mark.parametrize(
    "picture",
    [
        "![a](https://x.org/a.png)",
        "!![a](https://x.org/a.png)",
        "![a][y]\n\n[y]: https://x.org/a.png",
        "![y]\n\n[y]: https://x.org/a.png",
        "![a [b](attachment:a.png)](https://x.org)",
        "![a\\](attachment:x)](https://x.org)",
        "![a`](attachment:x)`](https://x.org)",
    ],
)
def test_a_picture_is_one_of_its_own_and_none_is_fetched(picture: str):
    cell = nbformat.v4.new_markdown_cell(f"{picture}\n\n![mine](attachment:a.png)")
    cell["attachments"] = NotebookNode({"a.png": {"image/png": "iVBORw0KGgo="}})
    assert set(re.findall(r"""<img[^>]*src=["']([^"']*)""", shown(cell))) == {"data:image/png;base64,iVBORw0KGgo="}


@pytest.mark.parametrize(
    "kind", ["text/html", "text/latex", "text/markdown", "application/javascript", "image/svg+xml", "image/png"]
)
@pytest.mark.parametrize("attack", [*ATTACKS, '"><script>alert(1)</script>'])
def test_in_what_a_cell_displayed(kind: str, attack: str):
    data = NotebookNode({kind: attack, "text/plain": "a figure"})
    output = NotebookNode(
        output_type="display_data", data=data, metadata=NotebookNode({kind: {"width": f"1 {attack}"}})
    )
    page = shown(nbformat.v4.new_code_cell("show()", outputs=[output]))
    assert "a figure" in page
    for sign in ("<script>alert", "<img src=x", "<iframe"):
        assert sign not in page


def test_in_printed_text_and_errors():
    stream = NotebookNode(output_type="stream", name="stdout", text=ATTACKS[0])
    error = NotebookNode(output_type="error", ename="E", evalue=ATTACKS[1], traceback=[ATTACKS[1]])
    page = shown(nbformat.v4.new_code_cell(f"# {ATTACKS[0]}", outputs=[stream, error]))
    assert "<script>alert" not in page
    assert "<img src=x" not in page


def test_pictures_stay():
    data = NotebookNode({"image/png": "iVBORw0KGgo=\n"})
    output = NotebookNode(output_type="display_data", data=data, metadata=NotebookNode())
    assert "iVBORw0KGgo=" in shown(nbformat.v4.new_code_cell("plot()", outputs=[output]))


@pytest.mark.parametrize("kind", ["image/png", "image/jpeg"])
def test_a_pictures_size_is_no_way_in(kind: str):
    size = NotebookNode({kind: {"width": f"1>{ATTACKS[0]}", "height": f'"{ATTACKS[1]}', "alt": ATTACKS[1]}})
    output = NotebookNode(output_type="display_data", data=NotebookNode({kind: "iVBORw0KGgo="}), metadata=size)
    page = shown(nbformat.v4.new_code_cell("plot()", outputs=[output]))
    assert "iVBORw0KGgo=" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
