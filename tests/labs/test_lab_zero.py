"""Lab 04: its runs, its Slurm file and its figure. Slurm is replaced by stand-ins that note what they are told."""

import copy
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import minidist as md
from labs.shared.drawing import read

ROOT = Path(__file__).parents[2]
LAB = ROOT / "labs" / "04_zero"
SECONDS_A_RUN = 40  # what the sheet estimates


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_under_torchrun_and_under_launch_and_the_figure(tmp_path, lab, python):
    """Two ranks by torchrun, four by launch: memory and traffic as the formulas say, and a figure of both."""
    run = (LAB / "run.py", "--task", "memory", "--model", "tiny", "--steps", 3, "--out", tmp_path)
    by_torchrun = python(*run, "--job", "job-7", "--stage", 2, launcher="--standalone --nproc-per-node 2")
    assert by_torchrun.returncode == 0, by_torchrun.stderr
    by_launch = python(*run, "--ranks", 4, "--shard", 2)
    assert by_launch.returncode == 0, by_launch.stderr

    two, four = read(tmp_path, LAB.name)
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
def test_ours_and_torchs_learn_the_same_and_keep_the_same(tmp_path, lab, python):
    for library in ("minidist", "torch"):
        done = python(LAB / "run.py", "--model", "tiny", "--library", library, "--ranks", 2, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
    ours, theirs = read(tmp_path, LAB.name)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert theirs["state_bytes"] == pytest.approx(theirs["predicted_state_bytes"], rel=0.02)
    assert theirs["sent_bytes_per_rank"] is None


@pytest.mark.slow
def test_prelab_passes(tmp_path, python):
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
def test_impossible_runs_are_refused_before_anything_starts(arguments, message, refusal):
    assert message in refusal(arguments)


# ---- the Slurm file and the sheet ------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_run_of_the_slurm_file_is_a_legal_one(lab, legal_runs, nodes):
    tasks = set()
    for settings, ranks in legal_runs(nodes):
        assert ranks % settings.shards(ranks) == 0
        tasks.add((settings.task, settings.stage, ranks))
    assert tasks >= {("memory", stage, ranks) for stage in range(4) for ranks in (1, 2, 4, 8)}
    assert tasks >= {("time", stage, 8) for stage in range(4)}
    assert (("hybrid", 3, 16) in tasks) == (nodes == 2)
    assert {task for task, *_ in tasks} == set(lab["settings"].TASKS) - {"free"}


def test_gpu_minutes_of_the_sheet_are_those_of_the_slurm_file(tmp_path, submit, directives):
    (tmp_path / "prelab-passed").touch()
    runs = Counter(words[words.index("--task") + 1] for words in submit(1)[1])
    sheet = (LAB / "sheet.md").read_text()
    printed = re.findall(r"^\*\*\d\. [\w ]+ \((\d+) GPU-minutes.*?--task (\w+)", sheet, re.M | re.S)
    expected = {task: math.ceil(8 * count * SECONDS_A_RUN / 60) for task, count in runs.items()}
    assert {task: int(minutes) for minutes, task in printed if minutes != "0"} == expected
    assert f"All together {sum(expected.values())} GPU-minutes" in sheet
    hours, minutes, seconds = map(int, directives["time"].split(":"))
    assert sum(expected.values()) / 8 < hours * 60 + minutes + seconds / 60


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


def test_figure_shows_the_measured_numbers(lab, curve):
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
