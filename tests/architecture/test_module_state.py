"""No module of the package keeps mutable state: what a module or a class of it holds can never change.

Looked at in the running modules rather than in their text, so that it does not matter how a value was made.
"""

import __future__

import dataclasses
import enum
import functools
import importlib
import pkgutil
import re
import struct
import sys
import types
import typing
from _collections import _tuplegetter  # a namedtuple's field
from collections.abc import Iterator
from pathlib import PurePath

import pytest
import torch

import minidist

# The exceptions, each with its reason.
ALLOWED = {
    "minidist.launch._launcher": "a process keeps its one supervisor between launches; starting it is what takes long",
}

UNCHANGING = (
    *(bool, int, float, complex, str, bytes, range, slice, type(None), type(...), type(NotImplemented)),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType, type),
    *(types.GenericAlias, types.UnionType, typing.TypeVar, typing.ParamSpec, type(typing.Any), type(typing.NoReturn)),
    *(re.Pattern, struct.Struct, enum.Enum, PurePath, torch.dtype, torch.device, property, classmethod, staticmethod),
    *(types.MemberDescriptorType, types.GetSetDescriptorType, functools.cached_property, _tuplegetter),
    __future__._Feature,  # what `from __future__ import annotations` leaves
)


def can_change(value: object) -> bool:
    """Whether value, or anything it holds, can be changed in place."""
    if isinstance(value, tuple | frozenset):
        return any(can_change(item) for item in value)
    if isinstance(value, types.MappingProxyType):
        return any(can_change(item) for pair in value.items() for item in pair)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        return not frozen or any(can_change(getattr(value, field.name)) for field in dataclasses.fields(value))
    return not isinstance(value, UNCHANGING)


def state(module: types.ModuleType) -> Iterator[str]:
    """The names in module, and in the classes defined there, whose values can change."""
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from class_state(value)
        elif not name.startswith("__") and can_change(value):
            yield f"{module.__name__}.{name}"


def class_state(cls: type) -> Iterator[str]:
    """The same for a class; what enum, typing and namedtuple keep for themselves begins with an underscore."""
    own = issubclass(cls, enum.Enum) or hasattr(cls, "_fields")
    machinery = "_" if own else ("__", "_abc_", "_is_")
    for name, value in vars(cls).items():
        if not name.startswith(machinery) and can_change(value):
            yield f"{cls.__module__}.{cls.__qualname__}.{name}"


def modules() -> Iterator[types.ModuleType]:
    yield minidist
    for info in pkgutil.walk_packages(minidist.__path__, "minidist."):
        yield importlib.import_module(info.name)


def test_the_package_keeps_no_state():
    found = sorted(name for module in modules() for name in state(module))
    assert found == sorted(ALLOWED)  # what is not, or no longer, an exception


PLANTED = {
    "a list": "seen = []",
    "a dict made by a call": "seen = dict(a=1)",
    "a list in a tuple": "pairs = ((1, 2), [3])",
    "an alias of another's dict": "from os import environ as settings",
    "a counter": "import itertools\nnumbers = itertools.count()",
    "a lock": "import threading\nlock = threading.Lock()",
    "a cache": "import functools\n@functools.cache\ndef f(x): return x",
    "a tensor": "import torch\nzero = torch.zeros(1)",
    "a list in a class": "class A:\n    seen = []",
    "an object": "class A: pass\na = A()",
    "a dataclass that is not frozen": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 0\na = A()",
    "a frozen dataclass with a list": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n    x: object\na = A([])"
    ),
}
HARMLESS = """
import dataclasses, enum, re, typing
from types import MappingProxyType
import torch
NAMES = ("a", "b")
TABLE = MappingProxyType({"sum": torch.float32})
PATTERN = re.compile("x")
Number = int | float
T = typing.TypeVar("T")
class Kind(enum.Enum):
    A = 1
@dataclasses.dataclass(frozen=True)
class Link:
    alpha_s: float = 0.0
    names: tuple[str, ...] = ()
    extra: list[int] = dataclasses.field(default_factory=list)
    @property
    def twice(self): return 2 * self.alpha_s
FAST = Link(1e-6, ("x",), ())
class Started(typing.NamedTuple):
    works: int = 0
class Seen(typing.Protocol):
    def see(self) -> None: ...
class Net(torch.nn.Module):
    kind: Kind = Kind.A
"""


def run(source: str) -> types.ModuleType:
    module = types.ModuleType("planted")
    exec(source, module.__dict__)
    return module


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_planted_state_is_found(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "planted", types.ModuleType("planted"))
    assert list(state(run(source)))


def test_constants_are_no_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "planted", types.ModuleType("planted"))
    assert list(state(run(HARMLESS))) == []
