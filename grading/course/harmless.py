"""A graded notebook that can be opened: nothing of a learner's runs in the browser of whoever looks at it.

Formgrader and feedback pages show a notebook's HTML as it is. So texts lose tags that do more than format, and of what
cells displayed only text and pictures stay, without what would move the cursor of a terminal.
"""

import re

from nbconvert.preprocessors.sanitize import SanitizeHTML
from nbformat.notebooknode import NotebookNode

from grading.course.plain import plain

PICTURES = ("image/png", "image/jpeg")
TAGS = [
    "a",
    "abbr",
    "b",
    "blockquote",
    "br",
    "code",
    "em",
    "hr",
    "i",
    "li",
    "ol",
    "p",
    "pre",
    "strong",
    "sub",
    "sup",
    "ul",
]
# A markdown link to anything but a page, a mail address, a heading or a picture of its own.
STRANGE_LINK = re.compile(r"\]([(:])(?!\s*<?\s*(?:https?://|mailto:|#|attachment:))", re.IGNORECASE)
# A picture that is not plainly one of its own: it would be fetched from elsewhere, and becomes a link.
STRANGE_PICTURE = re.compile(r"!+(?=\[)(?!\[[^\[\]\\`<]*\]\(attachment:)", re.IGNORECASE)
BASE64 = re.compile(r"[A-Za-z0-9+/=\s]*")


def harmless(notebook: NotebookNode) -> NotebookNode:
    """The notebook, changed in place."""
    sanitizer = SanitizeHTML(tags=TAGS)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_output(output) for output in cell.outputs]
        else:
            text = STRANGE_PICTURE.sub("", sanitizer.sanitize_html_tags(cell.source))
            cell.source = STRANGE_LINK.sub(r"] \1", text)
    return notebook


def _output(output: NotebookNode) -> NotebookNode:
    if output.output_type == "stream":
        output.text = plain(output.text, colours=True)
    if output.output_type == "error":
        output.ename, output.evalue = plain(output.ename), plain(output.evalue)
        output.traceback = [plain(line, colours=True) for line in output.traceback]
    if output.output_type not in ("display_data", "execute_result"):
        return output
    output.data = NotebookNode({kind: data for kind, data in output.data.items() if _is_harmless(kind, data)})
    if "text/plain" in output.data:
        output.data["text/plain"] = plain(output.data["text/plain"], colours=True)
    output.metadata = NotebookNode()
    return output


def _is_harmless(kind: str, data: object) -> bool:
    return isinstance(data, str) and (kind == "text/plain" or is_picture(kind, data))


def is_picture(kind: str, data: object) -> bool:
    """Whether this is a picture in base64, and no text made to look like one."""
    return kind in PICTURES and isinstance(data, str) and BASE64.fullmatch(data) is not None
