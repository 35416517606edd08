"""YAML files written by people: a broken one is a message with its line, and so is a field that is there twice."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from grading.question import Place, Problem, QuestionError


def load(path: Path, name: str, items: str = "") -> tuple[Any, list[int]]:
    """The content of a file, and the line that each item of its list `items` begins on; "" is the file as a list.

    name: what errors call the file. Raises QuestionError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(Problem(Place(name), "", "", f"cannot be read as UTF-8 text: {error}")) from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        raw = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(name, mark.line + 1 if mark else 0)
        raise QuestionError(Problem(place, "", "", f"no valid YAML: {_reason(error)}")) from error
    finally:
        loader.dispose()
    if items and isinstance(node, yaml.MappingNode):
        node = next((value for key, value in node.value if key.value == items), None)
    listed = node.value if isinstance(node, yaml.SequenceNode) else []
    return raw, [item.start_mark.line + 1 for item in listed]


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, ten times as fast, where it was compiled


class _Loader(_Base):
    """YAML's safe loader, for which a field that is there twice is an error and not the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        names = [name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        for i, (name, _) in enumerate(node.value):
            if isinstance(name, yaml.ScalarNode) and name.value in names[:i]:
                text = f"{name.value!r} is there twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, text, name.start_mark)
        return super().construct_mapping(node, deep)


def _reason(error: yaml.YAMLError) -> str:
    reason = getattr(error, "problem", None) or str(error)
    if "mapping values are not allowed" in reason:
        return f"{reason}; a text with a colon in it goes into quotes, or on the line after `>-`"
    return reason
