"""The import contracts of pyproject.toml hold, and each of them fails when its violation is planted."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import minidist

REPOSITORY = Path(minidist.__file__).parents[1]
CONTRACTS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
PLANTED = {  # contract -> the file that breaks it, and how
    "one-way": ("timeline.py", "from minidist.comm import partition"),
    "siblings": ("parallel/planted.py", "from minidist.parallel import data"),
    "figures": ("viz/__init__.py", "from minidist.models import gpt"),
    "starting": ("launch.py", "from minidist import loss"),
    "launcher-is-ours": ("mesh.py", "from minidist.launcher import slots"),
}


def verdicts(root: Path) -> dict[str, str]:
    """KEPT or BROKEN for each contract, by name, of the package under root."""
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    found = dict(re.findall(r"^(.+?) (KEPT|BROKEN)\b", run.stdout, flags=re.MULTILINE))
    assert found, run.stdout + run.stderr
    return found


def copy_of_the_package(root: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "minidist", root / "minidist", ignore=ignore)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root / "minidist"


def test_every_contract_is_kept():
    assert verdicts(REPOSITORY) == {contract["name"]: "KEPT" for contract in CONTRACTS}


def test_every_contract_breaks_on_its_planted_import(tmp_path: Path):
    assert set(PLANTED) == {contract["id"] for contract in CONTRACTS}
    package = copy_of_the_package(tmp_path)
    for name, line in PLANTED.values():
        with open(package / name, "a") as file:
            file.write(f"\n{line}\n")
    assert verdicts(tmp_path) == {contract["name"]: "BROKEN" for contract in CONTRACTS}


def test_a_module_without_a_place_in_the_layers_is_noticed(tmp_path: Path):
    (copy_of_the_package(tmp_path) / "stray.py").touch()
    names = {contract["id"]: contract["name"] for contract in CONTRACTS}
    assert [name for name, verdict in verdicts(tmp_path).items() if verdict == "BROKEN"] == [names["one-way"]]
