"""The package's own code in a lesson, read from the file it runs from: never a copy that could grow old."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Source:
    """A piece of Python with the place it comes from; a notebook shows it highlighted, a terminal as text.

    folded: why it is not shown at once, and opens by a click or by `print`; "" shows it.
    """

    code: str
    file: str
    line: int
    folded: str = ""

    def __str__(self) -> str:
        return f"# {self.file}, line {self.line}\n{self.code}"

    def __repr__(self) -> str:
        return f"# {self.file}, line {self.line}: folded, {self.folded}" if self.folded else str(self)

    def _repr_markdown_(self) -> str:
        place, code = f"`{self.file}`, line {self.line}", f"```python\n{self.code}\n```"
        if self.folded:
            place = f"<code>{self.file}</code>, line {self.line}"  # markdown is not read inside a summary
            return f"<details><summary>{place}: folded, {self.folded}</summary>\n\n{code}\n\n</details>"
        return f"{place}\n\n{code}"


def show(thing: Callable | type | ModuleType, *methods: str, folded: str = "") -> Source:
    """The source of a function, class or module as it is on disk; of a class only the methods named, if any are.

    folded: as in `Source`. Raises TypeError for what has no Python source, AttributeError for a missing method.
    """
    parts = [getattr(thing, method) for method in methods] or [thing]
    line = inspect.getsourcelines(parts[0])[1]
    code = "\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts)
    path = Path(inspect.getsourcefile(thing) or "")
    inside = next(
        (parent for parent in path.parents if (parent / "__init__.py").exists() and parent.name == "minidist"), None
    )
    name = path.relative_to(inside.parent).as_posix() if inside else path.name
    return Source(code, name, max(line, 1), folded)
