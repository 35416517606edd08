"""Fields of a YAML mapping, taken one by one, with errors that name the field and say what to write."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class FieldError(ValueError):
    """A field is not what it should be: which one, and what to write."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field, self.text = field, text


class Fields:
    """A YAML mapping whose fields are taken one by one; `done` complains of those that nobody knows."""

    def __init__(self, raw: object, where: str = "") -> None:
        self.where = where
        if not isinstance(raw, Mapping):
            raise FieldError(where, f"has to be fields, each `name: value`, got {short(raw)}")
        self.left, self.known = dict(raw), []

    def take(self, name: str, needed: bool = True) -> object:
        """The raw value of a field, None where it is left out."""
        self.known.append(name)
        value = self.left.pop(name, None)
        if value is None and needed:
            like = difflib.get_close_matches(name, map(str, self.left), 1)
            raise self.error(name, "is missing; write it" + (f" (is {like[0]!r} meant for it?)" if like else ""))
        return value

    def text(self, name: str) -> str:
        """A text that has to be there."""
        return self.as_text(name, self.take(name))

    def maybe(self, name: str) -> str | None:
        """A text, None where it is left out."""
        value = self.take(name, needed=False)
        return None if value is None else self.as_text(name, value)

    def as_text(self, name: str, value: object) -> str:
        """A YAML value as a text: a number is one too, but yes, no, true and dates have to be in quotes."""
        if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
            return str(value)
        raise self.error(name, f"has to be a text, got {short(value)}; put it in quotes")

    def number(self, name: str) -> float | None:
        """A number, None where it is left out."""
        value = self.take(name, needed=False)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            hint = "; YAML takes 1.0e-3 for a number, and 1e-3 for a text" if isinstance(value, str) else ""
            raise self.error(name, f"has to be a number, got {short(value)}{hint}")
        return value

    def flag(self, name: str) -> bool:
        """true or false; left out it is false."""
        value = self.take(name, needed=False)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, f"has to be true or false, got {short(value)}")
        return bool(value)

    def listed(self, name: str, needed: bool = True) -> Sequence[Any]:
        """A list, empty where it is left out and need not be there."""
        value = self.take(name, needed)
        if value is not None and not isinstance(value, list):
            raise self.error(name, f"has to be a list, got {short(value)}")
        return value or []

    def texts(self, name: str, needed: bool = True) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self.as_text(f"{name}[{i}]", value) for i, value in enumerate(self.listed(name, needed)))

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Names with values, empty where left out."""
        value = self.take(name, needed=False)
        if value is not None and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise self.error(name, f"has to be names with values, got {short(value)}")
        return value or {}

    def each(self, name: str, make: Callable[["Fields"], T], needed: bool = True) -> tuple[T, ...]:
        """A list of mappings, each made into a thing."""
        return tuple(
            make_at(f"{self._path(name)}[{i}]", value, make) for i, value in enumerate(self.listed(name, needed))
        )

    def done(self) -> None:
        """Raise FieldError for a field that was not taken."""
        for name in self.left:
            like = difflib.get_close_matches(str(name), self.known, 1)
            hint = f"{like[0]!r} is one" if like else f"there are {', '.join(self.known)}"
            raise self.error(str(name), f"is no field here; {hint}")

    def error(self, name: str, text: str) -> FieldError:
        """An error about a field of this mapping."""
        return FieldError(self._path(name), text)

    def _path(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


def make_at(where: str, raw: object, make: Callable[[Fields], T]) -> T:
    """What `make` makes of the mapping `raw`, all of whose fields it has to take; where: its name in errors."""
    fields = Fields(raw, where)
    try:
        made = make(fields)
    except FieldError:
        raise
    except ValueError as error:  # from a dataclass that checks itself: it knows the field, not where it is
        name, text = str(error).split(": ", 1)
        raise fields.error(name, text) from error
    fields.done()
    return made


def short(value: object) -> str:
    """A YAML value in few words."""
    if isinstance(value, Mapping):
        return "names with values"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "nothing" if value is None else f"{value!r:.40}"
