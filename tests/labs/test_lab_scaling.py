"""Lab 03: its runs, its Slurm file and its figure. Slurm is replaced by stand-ins that note what they are told."""

import copy
from pathlib import Path
from typing import Any

import pytest

from labs.shared.drawing import read

ROOT = Path(__file__).parents[2]
LAB = ROOT / "labs" / "03_scaling"


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_run_under_torchrun_and_under_launch_and_the_figure(tmp_path, lab, python):
    """Two ranks by torchrun, one by launch: complete results, the same loss to begin with, and a figure of both."""
    run = (LAB / "run.py", "--task", "strong", "--model", "tiny", "--batch", 4, "--steps", 3, "--out", tmp_path)
    by_torchrun = python(*run, "--job", "job-7", launcher="--standalone --nproc-per-node 2")
    assert by_torchrun.returncode == 0, by_torchrun.stderr
    by_launch = python(*run, "--ranks", 1)
    assert by_launch.returncode == 0, by_launch.stderr

    two, one = read(tmp_path, LAB.name)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert (two["job"], one["job"]) == ("job-7", None)
    for record in (two, one):
        assert record["status"] == "measured"
        assert len(record["hosts"]) == len(record["devices"]) == record["ranks"]
        assert len(record["step_s"]) == len(record["compute_s"]) == 3
        assert all(seconds > 0 for seconds in record["step_s"])
        assert record["tokens_per_s"] == pytest.approx(record["tokens_per_step"] / record["median_step_s"])
        assert {"python", "torch", "minidist", "cuda"} <= record["versions"].keys()
        assert "run.py --task strong" in record["command"]
    assert two["sent_bytes_per_rank"] == [2 * (2 - 1) / 2 * 4 * two["parameters"]] * 2
    assert one["sent_bytes_per_rank"] == [0]
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-5)  # the same global batch, differently cut

    figure = tmp_path / "scaling.png"
    drawn = python(LAB / "plot.py", tmp_path, "--out", figure)
    assert drawn.returncode == 0, drawn.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_prelab_passes(tmp_path, python):
    done = python(LAB / "prelab.py", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed:") == 5
    assert (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_gradients_are_summed(tmp_path, lab, monkeypatch, capsys):
    """Planted: a sum where the average belongs. The pre-lab has to stop, and must leave no mark of having passed."""
    prelab = lab["prelab"]
    averaged = prelab.one_backward

    def summed(world: Any, mechanism: str) -> Any:
        gradient, sent = averaged(world, mechanism)
        return gradient * world.size, sent

    monkeypatch.setattr(prelab, "ranks_meet", lambda: "")
    monkeypatch.setattr(prelab, "one_backward", summed)
    assert prelab.main(["--out", str(tmp_path)]) == 1
    assert "away from one process" in capsys.readouterr().out
    assert not (tmp_path / "prelab-passed").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 4 --batch 10", "--batch 10 is the global batch and does not divide by 4 ranks: use 8 or 12"),
        ("--ranks 4 --batch 2", "does not divide by 4 ranks: use 4"),
        ("--batch 4 --batch-per-rank 1", "either --batch"),
        ("--task weak --batch 4", "--task weak keeps each rank's batch: give --batch-per-rank"),
        ("--task strong --batch-per-rank 4", "--task strong keeps the global batch: give --batch"),
        ("--bucket-mb 0", "--bucket-mb 0.0: must be greater than 0"),
        ("--warmup 0", "--warmup 0: must be at least 1"),
    ],
)
def test_impossible_runs_are_refused_before_anything_starts(arguments, message, refusal):
    assert message in refusal(arguments)


# ---- the Slurm file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_run_of_the_slurm_file_is_a_legal_one(legal_runs, nodes):
    tasks = set()
    for settings, ranks in legal_runs(nodes):
        assert settings.global_batch(ranks) >= ranks
        tasks.add((settings.task, ranks))
    counts = {1, 2, 4, 8} | ({16} if nodes == 2 else set())
    assert tasks >= {(task, ranks) for task in ("strong", "weak") for ranks in counts}
    assert tasks >= {(task, 8) for task in ("batch", "bucket", "overlap")}


# ---- the figure ------------------------------------------------------------------------------------------------------


def record(task: str, ranks: int, step_s: float, **changes: Any) -> dict[str, Any]:
    """A result as run.py writes it."""
    settings = {
        "task": task,
        "model": "laptop",
        "mechanism": "overlapped",
        "batch": 16,
        "batch_per_rank": 4,
        "bucket_mb": 25,
    }
    base = {
        "lab": "03_scaling",
        "time": "2026-01-01T00:00:00.000+00:00",
        "status": "measured",
        "settings": settings | {key: value for key, value in changes.items() if key in settings},
        "ranks": ranks,
        "hosts": ["a"] * ranks,
        "devices": ["CPU X"] * ranks,
        "device_type": "cpu",
        "cores_of_host": {"a": 4},
        "global_batch": 16,
        "parameters": 1_000_000,
        "median_step_s": step_s,
        "median_compute_s": 0.8 * step_s,
        "exposed_s": 0.2 * step_s,
        "tokens_per_s": 2048 / step_s,
        "sent_bytes_per_rank": [2 * (ranks - 1) / ranks * 4e6] * ranks,
    }
    return copy.deepcopy(base | {key: value for key, value in changes.items() if key not in settings})


def test_figure_shows_the_measured_numbers(lab, curve):
    strong = [record("strong", ranks, step) for ranks, step in ((1, 1.0), (2, 0.5), (4, 0.4), (8, 0.4))]
    weak = [record("weak", ranks, step) for ranks, step in ((1, 1.0), (2, 1.25))]
    figure = lab["plot"].draw(strong + weak)
    speed_up, efficiency, *_, traffic = figure.axes
    assert curve(speed_up, "overlapped") == pytest.approx({1: 1, 2: 2, 4: 2.5, 8: 2.5})
    assert curve(efficiency, "overlapped") == pytest.approx({1: 1, 2: 0.8})
    assert curve(traffic, "overlapped") == pytest.approx({1: 0, 2: 4, 4: 6, 8: 7})
    for axis in (speed_up, efficiency, traffic):
        assert axis.get_xlabel()
        assert axis.get_ylabel()
    ringed = [
        text.get_text() for text in speed_up.get_legend().get_texts() if "more ranks than cores" in text.get_text()
    ]
    assert ringed, "8 ranks on 4 cores have to be marked"
    assert "MIXED" not in figure.get_suptitle()
    assert "CPU X with 4 cores" in figure.get_suptitle()


def test_mixed_machines_are_labelled_and_never_joined(lab):
    here = [record("strong", ranks, 1 / ranks) for ranks in (1, 2)]
    there = [record("strong", n, 0.1 / n, device_type="cuda", devices=["GPU Y"] * n) for n in (1, 2)]
    figure = lab["plot"].draw(here + there)
    assert "MIXED MACHINES" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert any("CPU X" in label for label in labels)
    assert any("GPU Y" in label for label in labels)
    assert not any("CPU X" in label and "GPU Y" in label for label in labels)
    for line in figure.axes[0].lines:
        if "GPU Y" in line.get_label():
            assert list(line.get_ydata()) == pytest.approx([1, 2])  # joined with the CPU's it would start at 0.1
