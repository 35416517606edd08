"""The teaching machinery: `from grading import card, quiz, submit, ...` in a notebook.

Each function comes from the module of the same name and is loaded when it is first asked for, so that importing this
package costs nothing, and never brings in nbgrader.
"""

import importlib
import sys
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grading.card import card as card
    from grading.check import check as check
    from grading.check import hint as hint
    from grading.prediction import compare as compare
    from grading.prediction import predict as predict
    from grading.prediction import reveal as reveal
    from grading.progress import progress as progress
    from grading.quiz import quiz as quiz
    from grading.review import review as review
    from grading.submit import submit as submit

_HOME = MappingProxyType(
    {
        "card": "card",
        "check": "check",
        "hint": "check",
        "compare": "prediction",
        "predict": "prediction",
        "reveal": "prediction",
        "progress": "progress",
        "quiz": "quiz",
        "review": "review",
        "submit": "submit",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grading' has no attribute {name!r}")
    return getattr(importlib.import_module(f"grading.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


class _Facade(ModuleType):
    """Importing `grading.card` would put the module where the function of that name belongs; this keeps it out."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade
