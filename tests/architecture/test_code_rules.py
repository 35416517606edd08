"""Rules that a linter does not know, each with a planted violation that it must catch.

A rule is a function of one file's syntax tree that returns what is wrong, a line each.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import minidist

REPOSITORY = Path(minidist.__file__).parents[1]
PACKAGE = REPOSITORY / "minidist"
PURE = ("timeline.py", "plan/", "schedule/")  # the standard library is all they need
INNOCENT = ("models/", "optim.py", "data.py")  # they know nothing of ranks
MAY_READ_ENVIRONMENT = ("launch.py", "launcher/")
LONGEST_FILE = 400

Rule = Callable[[ast.Module], Iterator[str]]


def files(*roots: str, suffix: str = "*.py") -> list[Path]:
    found = [path for root in roots for path in sorted((REPOSITORY / root).rglob(suffix))]
    return [path for path in found if "__pycache__" not in path.parts]


def violations(rule: Rule, paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found += [f"{path.relative_to(REPOSITORY)}:{problem}" for problem in rule(tree)]
    return found


def package_files(*, only: tuple[str, ...] = ("",), but: tuple[str, ...] = ()) -> list[Path]:
    def chosen(path: Path) -> bool:
        name = path.relative_to(PACKAGE).as_posix()
        return name.startswith(only) and not (but and name.startswith(but))

    return [path for path in files("minidist") if chosen(path)]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, `from a import b` being a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def star_imports(tree: ast.Module) -> Iterator[str]:
    yield from (f"{line} {name}" for line, name in imported(tree) if name.endswith(".*"))


def relative_imports(tree: ast.Module) -> Iterator[str]:
    yield from (f"{line} {name}" for line, name in imported(tree) if name.startswith("."))


def environment_reads(tree: ast.Module) -> Iterator[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    yield from (f"{line} {name}" for line, name in imported(tree) if name in {f"os.{word}" for word in names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{node.lineno} .{node.attr}"


def outside_the_standard_library(tree: ast.Module) -> Iterator[str]:
    known = sys.stdlib_module_names | {"minidist"}
    yield from (f"{line} {name}" for line, name in imported(tree) if name.split(".")[0] not in known)


def knows_of_ranks(tree: ast.Module) -> Iterator[str]:
    ours = ("minidist.comm", "minidist.mesh", "torch.distributed", "torch.nn.parallel")
    yield from (f"{line} {name}" for line, name in imported(tree) if name.startswith(ours))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ours:
            yield f"{node.lineno} {ast.unparse(node)}"


def rebinding_of_module_names(tree: ast.Module) -> Iterator[str]:
    yield from (f"{node.lineno} global" for node in ast.walk(tree) if isinstance(node, ast.Global))


def imports_of_the_facade(tree: ast.Module) -> Iterator[str]:
    """Inside the package `import minidist` would import everything, and in a circle."""
    public = {f"minidist.{name}" for name in minidist.__all__} - {"minidist.algorithms", "minidist.viz"}
    yield from (f"{line} {name}" for line, name in imported(tree) if name == "minidist" or name in public)


def imports_from_above(tree: ast.Module) -> Iterator[str]:
    """The package knows nothing of what is built on it."""
    above = ("grading", "course", "labs", "benchmarks")
    yield from (f"{line} {name}" for line, name in imported(tree) if name.split(".")[0] in above)


RULES = {
    star_imports: "from os import *",
    relative_imports: "from .comm import Comm",
    environment_reads: "import os\nos.environ['RANK']",
    outside_the_standard_library: "def f():\n    import torch.nn",
    knows_of_ranks: "import torch\ntorch.distributed.all_reduce(x)",
    rebinding_of_module_names: "def f():\n    global count\n    count = 1",
    imports_of_the_facade: "import minidist as md",
    imports_from_above: "def f():\n    from grading.log import record",
}
MORE_PLANTED = [
    (environment_reads, "from os import environ as e"),
    (environment_reads, "import os\nos.getenv('RANK')"),
    (knows_of_ranks, "from torch.distributed import all_reduce"),
    (imports_of_the_facade, "from minidist import launch"),
]
WHERE = {
    star_imports: files("minidist", "grading", "course", "labs", "benchmarks", "tests"),
    relative_imports: files("minidist", "grading", "course", "labs", "benchmarks"),
    environment_reads: package_files(but=MAY_READ_ENVIRONMENT),
    outside_the_standard_library: package_files(only=PURE),
    knows_of_ranks: package_files(only=INNOCENT),
    rebinding_of_module_names: package_files(),
    imports_of_the_facade: package_files(but=("__init__.py", "launcher/zygote.py")),
    imports_from_above: package_files(),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule):
    assert WHERE[rule]
    assert violations(rule, WHERE[rule]) == []


@pytest.mark.parametrize(("rule", "planted"), [*RULES.items(), *MORE_PLANTED])
def test_rule_catches_its_violation(rule: Rule, planted: str):
    assert list(rule(ast.parse(planted)))


def test_no_file_is_too_long_to_read():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in files("minidist", "grading", "course")
    }
    lessons = {path for path in lengths if path.parent.name == "src"}  # read in sittings, not at once
    assert {str(path): n for path, n in lengths.items() if n > LONGEST_FILE and path not in lessons} == {}


@pytest.mark.parametrize("name", ["timeline", "plan", "schedule"])
def test_pure_parts_run_without_torch(name: str):
    """In a Python where importing torch fails. The facade, which needs torch, is not run on the way."""
    modules = [path for path in package_files(only=(f"{name}.py", f"{name}/"))]
    names = [path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".") for path in modules]
    code = f"""
import importlib, sys, types
sys.modules["torch"] = sys.modules["numpy"] = None
facade = types.ModuleType("minidist")
facade.__path__ = [{str(PACKAGE)!r}]
sys.modules["minidist"] = facade
for name in {names!r}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
