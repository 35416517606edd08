"""Lab 04: its runs, its Slurm file and its figure. Slurm is replaced by stand-ins that note what they are told."""

import copy
import doctest
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import minidist as md

ROOT = Path(__file__).parents[2]
LAB = ROOT / "labs" / "04_zero"
SCRIPTS = ("settings", "measure", "run", "plot", "prelab")
SECONDS_A_RUN = 40  # what the sheet estimates


@pytest.fixture
def lab(monkeypatch) -> Iterator[dict[str, ModuleType]]:
    """The lab's scripts as modules, importable by their short names during the test only."""
    monkeypatch.syspath_prepend(str(LAB))
    for name in SCRIPTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    modules = {name: importlib.import_module(name) for name in SCRIPTS}
    yield modules
    for name in SCRIPTS:
        sys.modules.pop(name, None)


def python(*arguments: object, launcher: str = "") -> subprocess.CompletedProcess[str]:
    head = [sys.executable, *(["-m", "torch.distributed.run", *launcher.split()] if launcher else [])]
    return subprocess.run(
        [*head, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_under_torchrun_and_under_launch_and_the_figure(tmp_path, lab):
    """Two ranks by torchrun, four by launch: memory and traffic as the formulas say, and a figure of both."""
    run = (LAB / "run.py", "--task", "memory", "--model", "tiny", "--steps", 3, "--out", tmp_path)
    by_torchrun = python(*run, "--job", "job-7", "--stage", 2, launcher="--standalone --nproc-per-node 2")
    assert by_torchrun.returncode == 0, by_torchrun.stderr
    by_launch = python(*run, "--ranks", 4, "--shard", 2)
    assert by_launch.returncode == 0, by_launch.stderr

    two, four = lab["plot"].read(tmp_path)
    assert (two["ranks"], four["ranks"]) == (2, 4)
    assert (two["job"], four["job"]) == ("job-7", None)
    for record in (two, four):
        assert record["status"] == "measured"
        assert len(record["hosts"]) == len(record["devices"]) == record["ranks"]
        assert len(record["step_s"]) == len(record["compute_s"]) == 3
        assert all(seconds > 0 for seconds in record["step_s"])
        assert record["state_bytes"] == pytest.approx(record["predicted_state_bytes"], rel=0.02)
        assert record["peak_bytes"] > record["state_bytes"]
        assert {"python", "torch", "minidist", "cuda"} <= record["versions"].keys()
        assert "run.py --task memory" in record["command"]
    parameters = two["parameters"]
    assert two["predicted_state_bytes"] == (4 + 12 / 2) * parameters
    assert four["predicted_state_bytes"] == 16 / 2 * parameters
    assert two["sent_bytes_per_rank"] == pytest.approx([4 * md.zero_traffic(parameters, 2, 2)] * 2, rel=0.01)
    slices = 4 * md.zero_traffic(parameters, 2, 3) + 2 * (2 - 1) / 2 * 4 * parameters / 2  # of the replicas' slice
    assert four["sent_bytes_per_rank"] == pytest.approx([slices] * 4, rel=0.01)

    figure = tmp_path / "zero.png"
    drawn = python(LAB / "plot.py", tmp_path, "--out", figure)
    assert drawn.returncode == 0, drawn.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ours_and_torchs_learn_the_same_and_keep_the_same(tmp_path, lab):
    for library in ("minidist", "torch"):
        done = python(LAB / "run.py", "--model", "tiny", "--library", library, "--ranks", 2, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
    ours, theirs = lab["plot"].read(tmp_path)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert theirs["state_bytes"] == pytest.approx(theirs["predicted_state_bytes"], rel=0.02)
    assert theirs["sent_bytes_per_rank"] is None


@pytest.mark.slow
def test_prelab_passes(tmp_path):
    done = python(LAB / "prelab.py", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed:") == 5
    assert (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_a_stage_keeps_too_much(tmp_path, lab, monkeypatch, capsys):
    """Planted: stage 3 keeps what stage 2 does. The pre-lab has to stop, and must leave no mark of having passed."""
    prelab = lab["prelab"]
    trained = prelab.train
    monkeypatch.setattr(prelab, "stages_agree", lambda: "")
    monkeypatch.setattr(prelab, "train", lambda world, stage: trained(world, min(stage, 2)))
    assert prelab.main(["--out", str(tmp_path)]) == 1
    assert re.search(r"stage 3: \d+ bytes of params, \d+ expected", capsys.readouterr().out)
    assert not (tmp_path / "prelab-passed").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 4 --shard 3", "--shard 3 does not divide 4 ranks: use one of [1, 2, 4]"),
        ("--stage 0 --shard 2", "stage 0 cuts nothing; use stage 1, 2 or 3"),
        ("--library torch --stage 1", "compared are DistributedDataParallel (stage 0) and fully_shard"),
        ("--library torch --precision bfloat16", "leave out --shard and --precision"),
        ("--batch-per-rank 6 --micro-batches 4", "--batch-per-rank 6 does not divide by --micro-batches 4"),
        ("--warmup 0", "--warmup 0: must be at least 1"),
    ],
)
def test_impossible_runs_are_refused_before_anything_starts(arguments, message, lab, monkeypatch, capsys):
    monkeypatch.setattr(lab["run"].md, "launch", lambda *_, **__: pytest.fail("a run was started"))
    assert lab["run"].main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_missing_gpus_block_a_task_and_do_not_fail_it(tmp_path, lab, monkeypatch, capsys):
    monkeypatch.setattr(lab["run"].torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(lab["run"].md, "launch", lambda *_, **__: pytest.fail("a run was started"))
    assert lab["run"].main(["--backend", "nccl", "--ranks", "8", "--task", "batch", "--out", str(tmp_path)]) == 0
    assert "blocked: 8 GPU(s) needed here, 2 found" in capsys.readouterr().out
    [record] = lab["plot"].read(tmp_path)
    assert (record["status"], record["ranks"]) == ("blocked", 8)
    axis = lab["plot"].draw([record]).axes[2]
    assert "8 GPU(s) needed here, 2 found" in axis.texts[0].get_text()


@pytest.mark.parametrize("name", ["settings", "run", "plot"])
def test_doctests(name, lab):
    result = doctest.testmod(lab[name])
    assert result.attempted > 0
    assert result.failed == 0


# ---- the Slurm file and the sheet ------------------------------------------------------------------------------------


def submit(folder: Path, nodes: int) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run job.sbatch where srun and python are stand-ins; returns what each srun was told."""
    for name, body in {
        "srun": f'printf "%s\\n" "$*" >> {folder}/calls',
        "python": f'printf "%s\\n" "$*" > {folder}/plotted',
    }.items():
        stand_in = folder / name
        stand_in.write_text(f"#!/bin/bash\n{body}\n")
        stand_in.chmod(0o755)
    env = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "RESULTS": str(folder),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NUM_NODES": str(nodes),
    }
    done = subprocess.run(
        ["bash", LAB / "job.sbatch"], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    calls = folder / "calls"
    return done, [shlex.split(line) for line in calls.read_text().splitlines()] if calls.exists() else []


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_run_of_the_slurm_file_is_a_legal_one(tmp_path, lab, nodes):
    (tmp_path / "prelab-passed").touch()
    done, calls = submit(tmp_path, nodes)
    assert done.returncode == 0, done.stderr
    tasks = set()
    for words in calls:
        split = words.index("python")
        srun = dict(word.removeprefix("--").split("=") for word in words[:split])
        ranks = int(srun["ntasks"])
        assert int(srun["nodes"]) * int(srun["ntasks-per-node"]) >= ranks
        assert int(srun["nodes"]) == (2 if ranks > 8 else 1)
        assert Path(words[split + 1]) == Path("labs/04_zero/run.py")
        options = lab["run"].parse(words[split + 2 :])
        settings = lab["run"].settings_of(options)
        assert ranks % settings.shards(ranks) == 0
        assert options.ranks == (1 if ranks == 1 else None)
        assert (options.backend, options.job) == ("nccl", "123456")
        tasks.add((settings.task, settings.stage, ranks))
    assert tasks >= {("memory", stage, ranks) for stage in range(4) for ranks in (1, 2, 4, 8)}
    assert tasks >= {("time", stage, 8) for stage in range(4)}
    assert (("hybrid", 3, 16) in tasks) == (nodes == 2)
    assert {task for task, *_ in tasks} == set(lab["settings"].TASKS) - {"free"}
    assert "plot.py" in (tmp_path / "plotted").read_text()


def test_gpu_minutes_of_the_sheet_are_those_of_the_slurm_file(tmp_path, lab):
    (tmp_path / "prelab-passed").touch()
    runs = Counter(words[words.index("--task") + 1] for words in submit(tmp_path, nodes=1)[1])
    sheet = (LAB / "sheet.md").read_text()
    printed = re.findall(r"^\*\*\d\. [\w ]+ \((\d+) GPU-minutes.*?--task (\w+)", sheet, re.M | re.S)
    expected = {task: math.ceil(8 * count * SECONDS_A_RUN / 60) for task, count in runs.items()}
    assert {task: int(minutes) for minutes, task in printed if minutes != "0"} == expected
    assert f"All together {sum(expected.values())} GPU-minutes" in sheet


def test_slurm_job_stops_without_the_prelab(tmp_path):
    done, calls = submit(tmp_path, nodes=1)
    assert done.returncode == 1
    assert "Run the pre-lab first" in done.stderr
    assert calls == []


def test_slurm_directives_come_before_the_first_command():
    lines = (LAB / "job.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", "\n".join(lines[:first]), re.M))
    assert len(options) == sum(line.startswith("#SBATCH") for line in lines)
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    hours, minutes, seconds = map(int, options["time"].split(":"))
    needed = 40  # the sheet's minutes on 8 GPUs, and some
    assert needed < hours * 60 + minutes + seconds / 60 <= 120


# ---- the figure ------------------------------------------------------------------------------------------------------


def record(task: str, ranks: int, **changes: Any) -> dict[str, Any]:
    """A result as run.py writes it."""
    settings = {
        "task": task,
        "model": "laptop",
        "library": "minidist",
        "stage": 3,
        "batch_per_rank": 4,
        "micro_batches": 1,
        "precision": "float32",
        "shard": None,
    }
    base = {
        "lab": "04_zero",
        "time": "2026-01-01T00:00:00.000+00:00",
        "status": "measured",
        "settings": settings | {key: value for key, value in changes.items() if key in settings},
        "ranks": ranks,
        "hosts": ["a"] * ranks,
        "devices": ["CPU X"] * ranks,
        "device_type": "cpu",
        "cores_of_host": {"a": 4},
        "parameters": 1_000_000,
        "state_bytes": 16_000_000 / ranks,
        "median_step_s": 0.5,
        "median_compute_s": 0.4,
        "exposed_s": 0.1,
        "sent_bytes_per_rank": [12_000_000 * (ranks - 1) / ranks] * ranks,
    }
    return copy.deepcopy(base | {key: value for key, value in changes.items() if key not in settings})


def curve(axis: Any, label: str) -> dict[float, float]:
    [line] = [line for line in axis.lines if line.get_label().startswith(label)]
    return dict(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))


def test_figure_shows_the_measured_numbers(lab):
    records = [record("memory", n) for n in (1, 2, 4, 8)]
    records += [record("batch", 2, batch_per_rank=b, exposed_s=0.5 / b) for b in (1, 2)]
    records += [record("accumulation", 2, micro_batches=m, sent_bytes_per_rank=[6e6 * m] * 2) for m in (1, 4)]
    records += [record("hybrid", 4, shard=s, median_step_s=0.1 * s) for s in (2, 4)]
    figure = lab["plot"].draw(records)
    memory, _, batch, parts, traffic, hybrid = figure.axes
    assert curve(memory, "stage 3") == pytest.approx({1: 16, 2: 8, 4: 4, 8: 2})
    assert curve(batch, "stage 3") == pytest.approx({1: 1, 2: 0.5})
    assert curve(parts, "stage 3") == pytest.approx({1: 6, 4: 24})
    assert curve(hybrid, "4 ranks") == pytest.approx({2: 200, 4: 400})
    assert curve(traffic, "3 (n-1)/n")[8] == pytest.approx(4 * 3 * 7 / 8)
    assert [line for line in memory.lines if list(line.get_ydata())[:2] == [16, 8] and line.get_linestyle() == ":"]
    for axis in (memory, batch, parts, traffic, hybrid):
        assert axis.get_xlabel()
        assert axis.get_ylabel()
    assert "MIXED" not in figure.get_suptitle()
    assert "CPU X with 4 cores" in figure.get_suptitle()


def test_mixed_machines_are_labelled_and_never_joined(lab):
    here = [record("hybrid", 4, shard=s) for s in (2, 4)]
    there = [record("hybrid", 4, shard=s, device_type="cuda", devices=["GPU Y"] * 4) for s in (2, 4)]
    figure = lab["plot"].draw(here + there)
    assert "MIXED MACHINES" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.axes[5].get_legend().get_texts()]
    assert any("CPU X" in label for label in labels)
    assert any("GPU Y" in label for label in labels)
    assert not any("CPU X" in label and "GPU Y" in label for label in labels)


def test_empty_folder_is_explained(tmp_path, lab, capsys):
    (tmp_path / "other.json").write_text(json.dumps({"lab": "another"}))
    assert lab["plot"].main([str(tmp_path)]) == 2
    assert "no result of lab 04" in capsys.readouterr().err
