"""The files that describe this repository agree with each other and with what is installed."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from course import install

REPOSITORY = Path(install.__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    """constraints.txt as name -> version; every line has to be of that form."""
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line) for line in lines]
    assert None not in found, "constraints are NAME==VERSION, without local parts, addresses or markers"
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def requirements() -> list[Requirement]:
    return [
        Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS["course"], *EXTRAS["grading"], *EXTRAS["test"]]
    ]


def installed_for_this_project() -> dict[str, str]:
    """Everything in this environment that the package, the course or the tests need, at any depth."""
    found: dict[str, str] = {}
    waiting = requirements()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        extras = ["", *requirement.extras]
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not asked for
        if name in found and not requirement.extras:
            continue
        found[name] = distribution.version
        for line in distribution.requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(needed)
    return found


def test_constraints_are_what_is_installed_and_fit_the_ranges():
    pinned = pins()
    assert pinned["torch"] == "2.13.0"
    for requirement in requirements():
        assert Version(pinned[canonicalize_name(requirement.name)]) in requirement.specifier, str(requirement)
    here = {name: str(Version(version).public) for name, version in installed_for_this_project().items()}
    # CUDA builds of torch bring packages of their own, at the versions that torch itself names.
    here = {name: version for name, version in here.items() if not name.startswith(("nvidia-", "cuda-", "triton"))}
    assert here.keys() <= pinned.keys()
    assert {name: pinned[name] for name in here} == here


def test_the_pinned_versions_install_on_the_oldest_python_that_is_promised():
    oldest = PROJECT["requires-python"].removeprefix(">=") + ".0"
    for name in installed_for_this_project():
        wanted = importlib.metadata.metadata(name)["Requires-Python"] or ""
        assert SpecifierSet(wanted).contains(oldest), f"{name} {pins()[name]} needs Python {wanted}: pin an older one"


def test_the_conda_environment_installs_the_same_through_the_same_file():
    environment = yaml.safe_load(read("environment.yml"))
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-c constraints.txt", "-e .[course,grading,test]"]
    source = read("course/install.py")
    assert '"-c", "constraints.txt"' in source
    assert '"-e", ".[course,grading,test]"' in source
    assert f"python{PROJECT['requires-python']}" in environment["dependencies"]
    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, install.OLDEST))


def test_hooks_are_local_and_run_the_checks():
    repos = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    hooks = {hook["id"]: hook for hook in repos[0]["hooks"]}
    assert set(hooks) == {"ruff-format", "ruff-check", "pyright", "notebooks"}
    assert all(hook["language"] == "system" for hook in hooks.values())
    assert all(hook["entry"].startswith(".venv/bin/python -m ") for hook in hooks.values())


def test_ci_calls_both_test_sets_and_stops_at_a_failure():
    script = read(".ci/run")
    assert script.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in script
    assert re.findall(r"^make (\S+)", script, flags=re.MULTILINE) == ["test-all"]
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
    assert subprocess.run(["bash", "-n", ".ci/run"], cwd=REPOSITORY, check=False).returncode == 0


def test_licence_and_citation():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in read("LICENSE")
    assert "APPENDIX: How to apply the Apache License" in read("LICENSE")
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["license"] == PROJECT["license"]
    assert citation["version"] == PROJECT["version"]


def test_the_readme_names_commands_that_exist_and_what_was_not_tested():
    readme = read("README.md")
    targets = set(re.findall(r"^([a-z-]+):.*##", read("Makefile"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^|`|\s)make ([a-z-]+)(?=[`\s])", readme)) - {"alone", "and"}
    assert {"course", "test", "test-all"} <= named <= targets
    untested = re.search(r"Not tested:.*", readme)
    assert untested
    paragraph = readme[untested.start() :].split("\n\n")[0]
    for word in ("conda", "Windows", "macOS", "Slurm", "parsing only"):
        assert word in paragraph


def test_the_readmes_program_runs():
    (program,) = re.findall(r"```python\n(.*?)```", read("README.md"), flags=re.DOTALL)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    losses = ast.literal_eval(run.stdout)
    assert len(losses) == 4
    assert all(4 < loss < 8 for loss in losses)  # about ln 256 on each rank: nothing is learnt yet


def documents() -> list[Path]:
    return [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_and_named_files_exist(path: Path):
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []
    if path.name == "README.md":
        assert [name for name in re.findall(r"`(minidist/[\w/.]+)`", text) if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("folder", ["docs/decisions"])
def test_every_decision_is_listed_and_follows_the_template(folder: str):
    index = read(f"{folder}/index.md")
    parts = re.findall(r"\*\*(.+?)\*\*", read(f"{folder}/template.md"))
    for path in sorted((REPOSITORY / folder).glob("[0-9]*.md")):
        assert path.name in index
        assert re.findall(r"^\*\*(.+?)\*\*", path.read_text(encoding="utf-8"), flags=re.MULTILINE) == parts
