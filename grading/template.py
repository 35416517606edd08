"""Texts and expressions of questions, filled in without ever running code from a question file.

Jinja's sandbox does it: arithmetic, comparisons, lists, calls of the names handed in, and nothing else.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, Undefined, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment


class FillError(ValueError):
    """A text or an expression cannot be filled in; the message says why."""


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    environment.globals.clear()  # only what is handed in
    return environment


@lru_cache(maxsize=4096)  # a question is filled in with several draws
def _text(text: str) -> Template:
    return _environment().from_string(text)


@lru_cache(maxsize=4096)
def _expression(expression: str) -> Callable[..., Any]:
    return _environment().compile_expression(expression, undefined_to_none=False)


def render(text: str, names: Mapping[str, Any]) -> str:
    """Text with every {{ expression }} replaced.

    >>> render("{{ n - 1 }} of {{ n }} ranks", {"n": 4})
    '3 of 4 ranks'
    >>> render("{{ size }}", {"n": 4})
    Traceback (most recent call last):
    ...
    grading.template.FillError: 'size' is undefined
    """
    try:
        return _text(text).render(names).strip()
    except Exception as error:  # a function that a question calls may raise anything
        raise FillError(_reason(error)) from error


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression.

    >>> evaluate("2 * (n - 1) / n", {"n": 4})
    1.5
    """
    try:
        value = _expression(expression)(names)
        if isinstance(value, Undefined):
            str(value)  # raises, with the name
        return value
    except Exception as error:  # a function that a question calls may raise anything
        raise FillError(_reason(error)) from error


def names_in(text: str) -> set[str]:
    """The names that a text needs to be filled in. Raises FillError for broken syntax.

    >>> sorted(names_in("{{ n - 1 }} of {{ nbytes(n) }}"))
    ['n', 'nbytes']
    """
    try:
        return meta.find_undeclared_variables(_environment().parse(text))
    except TemplateError as error:
        raise FillError(_reason(error)) from error


def _reason(error: Exception) -> str:
    name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"{name}{error}"
