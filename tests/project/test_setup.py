"""course/install.py: done at once when nothing changed, redone when it matters, recovering when cut short."""

import ast
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from course import install

REPOSITORY = Path(install.__file__).parents[1]


class Tree:
    """A small repository whose environment and pip are only noted down."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self.done, self.pip = root, [], 0
        for name in ("pyproject.toml", "constraints.txt"):
            (root / name).write_text("first\n")
        monkeypatch.setattr("venv.create", self.create)
        monkeypatch.setattr(subprocess, "call", self.call)

    def create(self, venv: str, *, with_pip: bool, symlinks: bool) -> None:
        assert with_pip
        assert os.listdir(venv) == ["minidist-unfinished"]  # nothing is left of an earlier one
        python = Path(install.python_of(venv))
        python.parent.mkdir(parents=True)
        python.touch()
        version = ".".join(map(str, sys.version_info[:3]))
        (Path(venv) / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
        self.done.append("create")

    def call(self, command: list[str], **_: object) -> int:
        if "install" not in command:
            return 0  # pip --version
        self.done.append("install")
        return self.pip

    def setup(self) -> list[str]:
        """Run the set-up; returns what it did."""
        self.done = []
        install.main(str(self.root))
        return self.done


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def test_nothing_is_done_twice(tree: Tree):
    assert tree.setup() == ["create", "install"]
    assert tree.setup() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_into_the_same_environment(tree: Tree, name: str):
    tree.setup()
    (tree.root / name).write_text("second\n")
    assert tree.setup() == ["install"]
    os.utime(tree.root / name)  # touched, as by a checkout, and not changed
    assert tree.setup() == []


@pytest.mark.parametrize("step", ["venv.create", "subprocess.call"])
def test_a_set_up_cut_short_starts_over(tree: Tree, monkeypatch: pytest.MonkeyPatch, step: str):
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            tree.setup()
    assert tree.setup() == ["create", "install"]
    assert tree.setup() == []


def test_a_failing_pip_is_reported_and_tried_again(tree: Tree):
    tree.pip = 1
    with pytest.raises(SystemExit, match="run the same command again"):
        tree.setup()
    tree.pip = 0
    assert tree.setup() == ["create", "install"]


def test_an_environment_of_another_python_or_without_its_python_is_made_anew(tree: Tree):
    tree.setup()
    cfg = tree.root / ".venv" / "pyvenv.cfg"
    cfg.write_text("version = 3.9.1\n")
    (tree.root / "constraints.txt").write_text("second\n")
    assert tree.setup() == ["create", "install"]
    os.remove(install.python_of(str(tree.root / ".venv")))  # as when the system's Python moved
    assert tree.setup() == ["create", "install"]


def test_two_set_ups_of_one_folder_wait_for_each_other(tree: Tree):
    if os.name == "nt":
        pytest.skip("folders cannot be locked on Windows")
    other = threading.Thread(target=install.main, args=(str(tree.root),))
    with install.only_one_at_a_time(str(tree.root)):
        other.start()
        time.sleep(0.3)
        assert tree.done == []
    other.join(timeout=10)
    assert tree.done == ["create", "install"]


def test_an_old_python_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch):
    source = Path(install.__file__).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))  # or the message would be a syntax error
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer.*\n.*make PYTHON="):
        install.main()


def make(*arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_make_says_when_there_is_no_python():
    run = make("setup", "PYTHON=python9.9")
    assert run.returncode != 0
    assert "Found no Python 3.11 or newer among: python9.9." in run.stdout


def test_make_runs_what_the_readme_says():
    assert "course" in make().stdout
    for target, part in {
        "test": '-m "not slow"',
        "test-all": "pytest --durations",
        "bench": "-m benchmarks --only data",
        "course": "course open",
        "check": "lint-imports",
        "notebooks": "course build",
    }.items():
        assert part in make("-n", target, "ONLY=data").stdout
    assert "not slow" not in make("-n", "test-all").stdout
    assert "PORT=9000" in make("-n", "course", "PORT=9000").stdout


def test_clean_keeps_the_learners_work(tmp_path: Path):
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for name in ("workspace/00_start.ipynb", ".venv/bin/python", "course/__pycache__/a.pyc", "build/a", "x.egg-info/a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    run = make("clean", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"Makefile", "workspace/00_start.ipynb"}
    assert "was kept" in run.stdout
