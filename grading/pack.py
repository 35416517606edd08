"""A learner's function as bytes, with the lines it was written in, so that a report can show them."""

import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import cloudpickle


def pack(function: Callable[..., Any]) -> bytes:
    """Pickle a function by value, together with its source and that of the functions of its file that it uses.

    Only ranks open it. Raises TypeError, saying what to change, where it cannot be pickled.
    """
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__"
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((function, lines_of(function)))
    except Exception as error:
        name = getattr(function, "__name__", "the function")
        raise TypeError(
            f"{name} cannot be sent to ranks: {error}. It uses something that exists in this process only, such as an "
            "open file, a lock or a running generator: create that inside the function."
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def lines_of(function: Any) -> dict[str, tuple[int, list[str]]]:
    """For a function and those of its file that it uses, by name: the number of its first line, and its lines."""
    found: dict[str, tuple[int, list[str]]] = {}
    todo = [function]
    while todo:
        each = inspect.unwrap(todo.pop())
        if not isinstance(each, FunctionType) or each.__qualname__ in found or each.__module__ != function.__module__:
            continue
        try:
            lines, first = inspect.getsourcelines(each)
        except (OSError, TypeError, IndexError, SyntaxError):
            lines, first = [], 0
        found[each.__qualname__] = (first, [line.rstrip("\n") for line in lines])
        todo += [each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__]
    return found


def _names(code: Any) -> set[str]:
    inner = (const for const in code.co_consts if hasattr(const, "co_names"))
    return set(code.co_names).union(*(_names(const) for const in inner))
