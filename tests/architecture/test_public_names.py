"""The facade, and that lessons, labs and benchmarks use nothing of the package but what it makes public."""

import ast
import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

import course
import minidist
from minidist import viz

REPOSITORY = Path(minidist.__file__).parents[1]
ROOTS = ("course", "grading", "labs", "benchmarks")
OUTSIDE = [path for root in ROOTS for path in sorted((REPOSITORY / root).rglob("*.py"))]
DOCUMENTED = ("os._exit", "sys._getframe")  # public in spite of their names
OF_NAMED_TUPLES = ("_replace", "_asdict", "_make", "_fields")  # these, too


def re_exports(module_file: str) -> set[str]:
    """The names a package makes public in its __init__: `from a import b as b`."""
    tree = ast.parse(Path(module_file).read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names if alias.asname == alias.name}


PUBLIC: Mapping[str, set[str]] = MappingProxyType(
    {
        "minidist": {*minidist.__all__, "viz"},
        "minidist.viz": re_exports(viz.__file__),
        "minidist.schedule": re_exports(minidist.schedule.__file__),
    }
)


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Imports of and reaches into the package that go past its public names, and other objects' private attributes."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in PUBLIC:
                    aliases[alias.asname or alias.name] = alias.name
                elif alias.name.startswith("minidist."):
                    yield f"{node.lineno} import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "minidist":
            for alias in node.names:
                if alias.name not in PUBLIC.get(node.module or "", set()):
                    yield f"{node.lineno} from {node.module} import {alias.name}"
                elif f"{node.module}.{alias.name}" in PUBLIC:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = aliases.get(ast.unparse(node.value))
            if module and node.attr not in PUBLIC[module]:
                yield f"{node.lineno} {ast.unparse(node)}"
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            private = node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in OF_NAMED_TUPLES
            if private and not own and ast.unparse(node) not in DOCUMENTED:
                yield f"{node.lineno} {ast.unparse(node)}"


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_only_public_names_are_used_outside(path: Path):
    assert list(private_uses(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import minidist.comm.comm",
        "from minidist.comm.comm import Comm",
        "from minidist import comm",
        "import minidist as md\nmd.launcher",
        "import minidist\nminidist.comm.comm",
        "from minidist import viz\nviz.charts",
        "from minidist.viz import charts",
        "from minidist.viz.charts import beside",
        "import minidist as md\nmd.launch._launcher",
        "import torch\ntorch._C",
    ],
)
def test_a_private_use_is_noticed(planted: str):
    assert list(private_uses(ast.parse(planted)))


def test_public_uses_are_let_through():
    source = "import minidist as md\nfrom minidist import viz, launch\nmd.launch(f)\nviz.timeline(t)\nself._x\n"
    assert list(private_uses(ast.parse(source))) == []


def test_the_facade_is_complete_explicit_and_small():
    assert len(minidist.__all__) == len(set(minidist.__all__)) <= 60
    assert set(minidist.__all__) == re_exports(minidist.__file__)
    assert all(hasattr(minidist, name) for name in minidist.__all__)


def undocumented(module: object, names: list[str] | set[str]) -> list[str]:
    """Public classes, their public methods, and functions that have no docstring, of their own or inherited."""
    found = []
    for name in sorted(names):
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("minidist"):
            methods = {f"{name}.{key}": each for key, each in vars(value).items() if inspect.isfunction(each)}
            found += [key for key, each in methods.items() if "._" not in key and not inspect.getdoc(each)]
        speaks = inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)
        documented = value.__doc__ and not value.__doc__.startswith(f"{name}(")  # a dataclass gets its signature
        if speaks and not documented:
            found.append(name)
    return found


def test_every_public_name_says_what_it_is():
    assert undocumented(minidist, minidist.__all__) == []
    assert undocumented(viz, PUBLIC["minidist.viz"]) == []


def test_a_missing_docstring_is_noticed():
    class Module:
        @staticmethod
        def bare():
            pass

    assert undocumented(Module, {"bare"}) == ["bare"]


def modules() -> Iterator[str]:
    for package in (minidist, course):
        yield package.__name__
        yield from (info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))


@pytest.mark.parametrize("name", [name for name in modules() if not name.endswith("__main__")])
def test_doctests(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
