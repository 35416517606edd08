"""What the labs' tests share: a lab's scripts as modules, and Slurm replaced by stand-ins that note what they are told.

A test module names its lab as LAB, or has its tests take it as a parameter `folder`.
"""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import minidist as md

ROOT = Path(__file__).parents[2]
SCRIPTS = ("settings", "measure", "run", "plot", "prelab")

Submit = Callable[[int], tuple[subprocess.CompletedProcess[str], list[list[str]]]]


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """The lab that is tested."""
    return request.module.LAB


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[dict[str, ModuleType]]:
    """The lab's scripts as modules, importable by their short names during the test only."""
    monkeypatch.syspath_prepend(str(folder))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name: importlib.import_module(name) for name in SCRIPTS}
    yield modules
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.fixture
def refusal(
    lab: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], str]:
    """What run.py says to options that cannot be, without starting anything."""
    monkeypatch.setattr(md, "launch", lambda *_, **__: pytest.fail("a run was started"))

    def said(arguments: str) -> str:
        assert lab["run"].main(arguments.split()) == 2
        return capsys.readouterr().err

    return said


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script as a learner does, or with launcher="..." under torchrun."""

    def run(*arguments: object, launcher: str = "") -> subprocess.CompletedProcess[str]:
        head = [sys.executable, *(["-m", "torch.distributed.run", *launcher.split()] if launcher else [])]
        command = [*head, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)

    return run


@pytest.fixture
def directives(folder: Path) -> dict[str, str]:
    """The #SBATCH options of the lab's job.sbatch, all before the first command: sbatch reads no further."""
    text = (folder / "job.sbatch").read_text()
    found = _directives(text)
    assert len(found) == text.count("\n#SBATCH "), "a directive after the first command is ignored by sbatch"
    assert _directives("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n#SBATCH --time=1\n") == {"nodes": "1"}
    return found


def _directives(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH --").partition("=")
            found[option] = value
    return found


@pytest.fixture
def submit(tmp_path: Path, folder: Path) -> Submit:
    """Run job.sbatch on so many nodes, with its results in tmp_path, and say what each srun was told."""

    def run(nodes: int) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        for name, body in {
            "srun": f'printf "%s\\n" "$*" >> {tmp_path}/calls',
            "python": f'printf "%s\\n" "$*" > {tmp_path}/plotted',
        }.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RESULTS": str(tmp_path),
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NUM_NODES": str(nodes),
        }
        command = ["bash", folder / "job.sbatch"]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        calls = tmp_path / "calls"
        return done, [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    return run


@pytest.fixture
def legal_runs(tmp_path: Path, submit: Submit, lab: dict[str, ModuleType], folder: Path):
    """The runs of job.sbatch on so many nodes, as (settings, ranks): each fits what Slurm gives it."""

    def runs(nodes: int) -> list[tuple[object, int]]:
        (tmp_path / "prelab-passed").touch()
        done, calls = submit(nodes)
        assert done.returncode == 0, done.stderr
        found = []
        for words in calls:
            split = words.index("python")
            srun = dict(word.removeprefix("--").split("=") for word in words[:split])
            ranks = int(srun["ntasks"])
            assert int(srun["nodes"]) * int(srun["ntasks-per-node"]) >= ranks
            assert int(srun["nodes"]) == (2 if ranks > 8 else 1)
            assert Path(words[split + 1]) == (folder / "run.py").relative_to(ROOT)
            options = lab["run"].parse(words[split + 2 :])
            assert options.ranks == (1 if ranks == 1 else None)
            assert (options.backend, options.job) == ("nccl", "123456")
            found.append((lab["run"].settings_of(options), ranks))
        assert "plot.py" in (tmp_path / "plotted").read_text()
        return found

    return runs


@pytest.fixture
def curve() -> Callable[..., dict[float, float]]:
    """The numbers of the one line of a panel whose label begins so."""

    def points(axis, label: str) -> dict[float, float]:
        [line] = [line for line in axis.lines if line.get_label().startswith(label)]
        return dict(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))

    return points
