"""Checks of dataclass fields, with errors that name the field."""

from typing import Any


def positive(thing: Any, *fields: str) -> None:
    """Raise ValueError unless each of these fields is greater than 0."""
    for name in fields:
        value = getattr(thing, name)
        if not value > 0:
            raise ValueError(f"{type(thing).__name__}: {name} must be greater than 0, got {value!r}")


def not_negative(thing: Any, *fields: str) -> None:
    """Raise ValueError unless each of these fields is 0 or greater."""
    for name in fields:
        value = getattr(thing, name)
        if not value >= 0:
            raise ValueError(f"{type(thing).__name__}: {name} must be 0 or greater, got {value!r}")


def whole(thing: Any, *fields: str) -> None:
    """Raise ValueError unless each of these fields is a whole number from 1."""
    for name in fields:
        value = getattr(thing, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(thing).__name__}: {name} must be a whole number from 1, got {value!r}")
