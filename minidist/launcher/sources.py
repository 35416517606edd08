"""Lines of code as the user knows them: their text, and the cell they are in."""

import linecache
import os
import sys
from collections.abc import Iterable


def line(file: str, number: int) -> str:
    """The text of a line; empty if it is not known."""
    return linecache.getline(file, number)


def not_on_disk(files: Iterable[str]) -> dict[str, str]:
    """The text of those files that other processes could not read: notebook cells, what came on stdin or with -c."""
    texts = {file: "".join(linecache.getlines(file)) for file in files if not os.path.exists(file)}
    return {file: text for file, text in texts.items() if text}


def name(file: str) -> str:
    """A file as the user knows it: "Cell In[3]" for a notebook cell, else a path from here if that is shorter."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    if cell is not None:
        return " ".join(cell)
    if file.startswith("<"):
        return file
    near = os.path.relpath(file)
    return near if len(near) < len(file) else file
