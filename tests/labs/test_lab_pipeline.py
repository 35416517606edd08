"""Lab 06: its runs, its Slurm file and its figure. Slurm is replaced by stand-ins that note what they are told."""

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
LAB = ROOT / "labs" / "06_pipeline"
SECONDS_A_RUN = 40  # what the sheet estimates


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_under_torchrun_and_under_launch_and_the_figure(tmp_path, lab, python):
    """Two ranks by torchrun, one by launch: complete results, the same losses, and a figure of both."""
    run = (LAB / "run.py", "--task", "stages", "--model", "tiny", "--steps", 3, "--out", tmp_path)
    by_torchrun = python(*run, "--job", "job-7", launcher="--standalone --nproc-per-node 2")
    assert by_torchrun.returncode == 0, by_torchrun.stderr
    by_launch = python(*run, "--ranks", 1)
    assert by_launch.returncode == 0, by_launch.stderr

    two, one = read(tmp_path, LAB.name)
    assert (two["ranks"], two["pp"], two["dp"], one["pp"]) == (2, 2, 1, 1)
    assert (two["job"], one["job"]) == ("job-7", None)
    for record in (two, one):
        assert record["status"] == "measured"
        assert len(record["hosts"]) == len(record["devices"]) == record["ranks"]
        assert len(record["step_s"]) == len(record["compute_s"]) == 3
        assert 0 < record["pipeline_s"] < max(record["step_s"])
        assert record["tokens_per_s"] == pytest.approx(record["tokens_per_step"] / record["median_step_s"])
        assert {"python", "torch", "minidist", "cuda"} <= record["versions"].keys()
        assert "run.py --task stages" in record["command"]
    assert (two["in_flight_per_rank"], one["in_flight_per_rank"]) == ([2, 1], [1])
    assert list(two["message_s"]) == ["0-1"]
    assert one["message_s"] == {}
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)

    figure = tmp_path / "pipeline.png"
    drawn = python(LAB / "plot.py", tmp_path, "--out", figure)
    assert drawn.returncode == 0, drawn.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_replicas_of_a_pipeline_and_other_schedules_learn_what_one_process_does(lab):
    """Four ranks as 2 x 2, in both orders, and a split schedule on two: the losses of one process."""
    settings = lab["settings"].Settings
    kind = {"model": "tiny", "size": 2, "steps": 2, "warmup": 1}
    alone = launch_lab(lab, 1, settings(microbatches=4, **kind))
    for ranks, more in (
        (4, {"pp": 2, "microbatches": 2}),
        (4, {"pp": 2, "microbatches": 2, "inner": "dp"}),
        (2, {"schedule": "zb_v", "microbatches": 4}),
    ):
        found = launch_lab(lab, ranks, settings(**kind, **more))
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["tokens_per_step"] == alone["tokens_per_step"]
        assert found["pp"] == 2
        assert len(found["activation_bytes_per_rank"]) == 2
        assert (max(found["costs_s"]["W"]) > 0) == (more.get("schedule") == "zb_v")


def launch_lab(lab: Any, ranks: int, settings: Any) -> dict[str, Any]:
    return md.launch(lab["measure"].measure, ranks=ranks, args=(settings,), check=False)[0]


def test_gpipe_is_measured_to_keep_more_than_1f1b_and_as_much_as_predicted(lab):
    settings = lab["settings"].Settings
    found = {
        name: launch_lab(lab, 2, settings(model="tiny", schedule=name, microbatches=6, steps=1, warmup=1))
        for name in ("gpipe", "1f1b")
    }
    assert found["gpipe"]["in_flight_per_rank"] == [6, 6]
    assert found["1f1b"]["in_flight_per_rank"] == [2, 1]
    for of in ("activation_bytes_per_rank", "predicted_activation_bytes_per_rank"):
        assert found["gpipe"][of][0] > 2 * found["1f1b"][of][0]
    for record in found.values():
        measured, predicted = record["activation_bytes_per_rank"][0], record["predicted_activation_bytes_per_rank"][0]
        assert predicted < measured < 1.5 * predicted


# ---- simulated beside measured ---------------------------------------------------------------------------------------


def simulated(name: str, **seconds: Any) -> tuple[md.schedule.Program, md.Timeline]:
    program = md.schedule.build(name, 4, 8, 2 if name in ("interleaved", "zb_v") else 1)
    return program, md.schedule.simulate(program, **seconds)


def test_figures_of_a_pipeline_from_the_facts_of_its_ranks(lab):
    """Three steps, of which the middle one is like the simulator's: medians are that step's."""
    program, timeline = simulated("zb_v", F=1.0, I=1.0, W=1.0)
    facts = [
        {
            "steps": [[(*s.action, f * s.start, f * s.end) for s in timeline.lane(rank)] for f in (0.5, 1.0, 8.0)],
            "messages": {f"{rank}-{rank + 1}": 0.0} if rank < 3 else {},
            "kept": {str(rank): 10, str(7 - rank): 20},
            "state": 100,
            "peak": 150,
        }
        for rank in range(4)
    ]
    found = lab["measure"].predicted_and_measured(program, facts)
    assert found["pipeline_s"] == pytest.approx(timeline.makespan) == found["simulated_s"]
    assert found["bubble"] == pytest.approx(timeline.bubble) == found["simulated_bubble"]
    assert found["bubble_rate"] == pytest.approx(0) == found["simulated_bubble_rate"]
    assert found["bubble"] > 0.05
    assert found["in_flight_per_rank"] == timeline.peak_in_flight
    assert found["predicted_activation_bytes_per_rank"] == [15 * count for count in timeline.peak_in_flight]
    assert found["activation_bytes_per_rank"] == [50] * 4


def test_the_gpu_is_waited_for_inside_an_action(lab, monkeypatch):
    """Otherwise the times would be those of handing kernels over."""
    order: list[str] = []
    monkeypatch.setattr(lab["measure"], "synchronize", lambda device: order.append("synchronize"))
    comm = md.Comm(None, [0], 0)
    waiting = lab["measure"].Waiting(comm)
    with waiting.compute("F0"):
        order.append("kernels")
    assert order == ["kernels", "synchronize"]
    assert [span.action for span in comm.recorder.spans] == ["F0"]
    assert waiting.size == 1


# ---- the pre-lab and refusals ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prelab_passes(tmp_path, python):
    done = python(LAB / "prelab.py", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed:") == 5
    assert (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_gradients_are_too_large(tmp_path, lab, monkeypatch, capsys):
    """Planted: gradients M times too large. The pre-lab has to stop, and must leave no mark of having passed."""
    prelab = lab["prelab"]
    right = prelab.one_step

    def too_large(world: Any, schedule: str) -> Any:
        grads, peak = right(world, schedule)
        return {name: grad * prelab.MICROBATCHES for name, grad in grads.items()}, peak

    monkeypatch.setattr(prelab, "ranks_meet", lambda: "")
    monkeypatch.setattr(prelab, "one_step", too_large)
    assert prelab.main(["--out", str(tmp_path)]) == 1
    assert "gpipe on 2 ranks is" in capsys.readouterr().out
    assert not (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_1f1b_keeps_what_gpipe_does(lab, monkeypatch):
    """Planted: all forward passes first, whatever the schedule."""
    prelab = lab["prelab"]
    right = prelab.one_step
    monkeypatch.setattr(prelab, "one_step", lambda world, _, *microbatches: right(world, "gpipe", *microbatches))
    assert "GPipe holds 0 bytes more than 1F1B" in prelab.memory_agrees()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 4 --pp 3", "--pp 3 does not divide 4 ranks"),
        (
            "--ranks 8 --schedule interleaved",
            "8 layers do not make 16 stages, 2 on each of 8 ranks: use --pp 4 or less",
        ),
        ("--ranks 4 --schedule interleaved --microbatches 6", "6 is no multiple of 4, take 4 or 8"),
        ("--microbatches 0", "--microbatches 0: must be at least 1"),
        ("--size 0", "--size 0: must be at least 1"),
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
        program = settings.program(ranks)
        md.schedule.validate(program)
        assert program.ranks * settings.axes(ranks)["dp"] == ranks
        tasks.add((settings.task, ranks, settings.schedule, program.ranks))
        if settings.task == "size":
            assert settings.size * settings.microbatches == 64
        if settings.task == "layout":
            assert settings.microbatches * settings.axes(ranks)["dp"] == 16
    assert tasks >= {("schedule", 8, name, 8) for name in lab["settings"].SCHEDULES}
    assert tasks >= {("stages", n, "1f1b", n) for n in (1, 2, 4, 8)}
    assert tasks >= {("layout", 8, "1f1b", pp) for pp in (1, 2, 4, 8)}
    expected = set(lab["settings"].TASKS) - {"free"} - ({"machines"} if nodes == 1 else set())
    assert {task for task, *_ in tasks} == expected


def test_gpu_minutes_of_the_sheet_are_those_of_the_slurm_file(tmp_path, submit, directives):
    (tmp_path / "prelab-passed").touch()
    sheet = (LAB / "sheet.md").read_text()
    printed = re.findall(r"^\*\*\d\. [\w ]+ \((\d+) GPU-minutes.*?--task (\w+)", sheet, re.M | re.S)
    alone, both = (submit(nodes)[1] for nodes in (1, 2))
    both = both[len(alone) :]  # the stand-in adds to one list
    runs = {n: Counter(words[words.index("--task") + 1] for words in calls) for n, calls in ((1, alone), (2, both))}
    expected = {task: math.ceil(8 * count * SECONDS_A_RUN / 60) for task, count in runs[1].items()}
    machines = math.ceil(16 * runs[2]["machines"] * SECONDS_A_RUN / 60)
    assert {task: int(minutes) for minutes, task in printed if minutes != "0"} == expected | {"machines": machines}
    assert f"All together {sum(expected.values())} GPU-minutes" in sheet
    hours, minutes, seconds = map(int, directives["time"].split(":"))
    assert sum(expected.values()) / 8 + machines / 16 < hours * 60 + minutes + seconds / 60


# ---- the figure ------------------------------------------------------------------------------------------------------


def record(task: str, pp: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """A result as run.py writes it."""
    settings = {"task": task, "model": "laptop", "schedule": "1f1b", "microbatches": 8, "size": 4, "inner": "pp"}
    base = {
        "lab": "06_pipeline",
        "time": "2026-01-01T00:00:00.000+00:00",
        "status": "measured",
        "settings": settings | {key: value for key, value in changes.items() if key in settings},
        "ranks": pp,
        "pp": pp,
        "dp": 1,
        "hosts": ["a"] * pp,
        "devices": ["CPU X"] * pp,
        "device_type": "cpu",
        "cores_of_host": {"a": 4},
        "stages": pp,
        "pipeline_s": seconds,
        "simulated_s": 0.9 * seconds,
        "bubble": 0.3,
        "simulated_bubble": 0.25,
        "median_step_s": 1.1 * seconds,
        "median_compute_s": 0.8 * seconds,
        "exposed_s": 0.3 * seconds,
        "activation_bytes_per_rank": [9e6] * pp,
        "predicted_activation_bytes_per_rank": [8e6] * pp,
    }
    return copy.deepcopy(base | {key: value for key, value in changes.items() if key not in settings})


def test_figure_shows_the_measured_numbers(lab, curve):
    records = [record("schedule", 4, 1.0, schedule=name) for name in ("gpipe", "1f1b", "zb_h1")]
    records += [record("microbatches", 4, 1.0, microbatches=m, bubble=1 / m) for m in (2, 4, 16)]
    records += [record("size", 4, s, microbatches=m, size=32 // m) for m, s in ((2, 1.2), (8, 1.0), (16, 1.5))]
    records += [record("stages", pp, s) for pp, s in ((1, 1.0), (2, 0.6), (8, 0.2))]
    records += [record("layout", 8, 0.5), record("layout", 2, 0.6, dp=4, microbatches=2)]
    figure = lab["plot"].draw(records)
    schedules, bubble, activations, size, speed_up, layouts = figure.axes
    assert sorted(bar.get_height() for bar in schedules.patches) == pytest.approx([900] * 3 + [1000] * 3)
    assert {text.get_text() for text in schedules.texts} == {"0.30", "0.25"}
    assert curve(bubble, "1f1b, pp 4") == pytest.approx({2: 0.5, 4: 0.25, 8: 0.3, 16: 1 / 16})
    assert curve(bubble, "formula, pp 4")[8] == pytest.approx(3 / 11)
    assert curve(activations, "zb_h1") == pytest.approx({8: 9})
    assert curve(size, "1f1b, pp 4, batch 32") == pytest.approx({2: 1200, 8: 1000, 16: 1500})
    assert [text.get_text() for text in size.texts] == ["least: M = 8"]
    assert curve(speed_up, "1f1b") == pytest.approx({1: 1, 2: 1 / 0.6, 8: 5})
    assert curve(speed_up, "bubble alone")[8] == pytest.approx(8 * 8 / 15)
    names = [label.get_text() for label in layouts.get_xticklabels()]
    assert any("dp 4 x pp 2" in name for name in names)
    for axis in figure.axes:
        assert axis.get_ylabel()
    assert "MIXED" not in figure.get_suptitle()
    assert "CPU X with 4 cores" in figure.get_suptitle()


def test_mixed_machines_are_labelled_and_never_joined(lab):
    here = [record("stages", pp, 1 / pp) for pp in (1, 2)]
    there = [record("stages", n, 0.1 / n, device_type="cuda", devices=["GPU Y"] * n) for n in (1, 2)]
    figure = lab["plot"].draw(here + there)
    assert "MIXED MACHINES" in figure.get_suptitle()
    axis = figure.axes[4]
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert any("CPU X" in label for label in labels)
    assert any("GPU Y" in label for label in labels)
    assert not any("CPU X" in label and "GPU Y" in label for label in labels)
    for line in axis.lines:
        if "GPU Y" in str(line.get_label()):
            assert list(line.get_ydata()) == pytest.approx([1, 2])  # joined with the CPU's it would start at 10
