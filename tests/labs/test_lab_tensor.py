"""Lab 05: its runs, its Slurm file and its figure. Slurm is replaced by stand-ins that note what they are told."""

import copy
from pathlib import Path
from typing import Any

import pytest

import minidist as md
from labs.shared.drawing import read

ROOT = Path(__file__).parents[2]
LAB = ROOT / "labs" / "05_tensor"


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_under_torchrun_and_under_launch_and_the_figure(tmp_path, lab, python):
    """Two ranks by torchrun, one by launch: complete results, the same losses, and a figure of both."""
    run = (LAB / "run.py", "--task", "ranks", "--model", "tiny", "--batch", 4, "--steps", 3, "--out", tmp_path)
    by_torchrun = python(*run, "--job", "job-7", launcher="--standalone --nproc-per-node 2")
    assert by_torchrun.returncode == 0, by_torchrun.stderr
    by_launch = python(*run, "--ranks", 1)
    assert by_launch.returncode == 0, by_launch.stderr

    two, one = read(tmp_path, LAB.name)
    assert (two["ranks"], two["tp"], two["dp"], one["tp"]) == (2, 2, 1, 1)
    assert (two["job"], one["job"]) == ("job-7", None)
    for record in (two, one):
        assert record["status"] == "measured"
        assert len(record["hosts"]) == len(record["devices"]) == record["ranks"]
        assert len(record["step_s"]) == len(record["compute_s"]) == 3
        assert all(seconds > 0 for seconds in record["step_s"])
        assert record["tokens_per_s"] == pytest.approx(record["tokens_per_step"] / record["median_step_s"])
        assert {"python", "torch", "minidist", "cuda"} <= record["versions"].keys()
        assert "run.py --task ranks" in record["command"]
    assert (two["sums"], one["sums"]) == (6, 0)  # one layer: two forward, two back, and one at each end
    small = sum(md.cost.bytes_sent("all_reduce", nbytes, 2) for nbytes in (4 * (64 + 2), 2 * 4 * 64))  # of the loss
    assert two["sent_tp_bytes_per_rank"] == [6 * two["payload_bytes"] + small] * 2
    assert one["sent_tp_bytes_per_rank"] == [0]
    assert max(two["activation_bytes_per_rank"]) < one["activation_bytes_per_rank"][0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)

    figure = tmp_path / "tensor.png"
    drawn = python(LAB / "plot.py", tmp_path, "--out", figure)
    assert drawn.returncode == 0, drawn.stderr
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_replicas_of_a_cut_model_and_sequence_parallelism(lab):
    """Four ranks as 2 x 2: the losses of one process; with sequence parallelism, too, and fewer activations."""
    settings, measure = lab["settings"].Settings, lab["measure"].measure
    kind = {"model": "tiny", "batch": 4, "steps": 2, "warmup": 1}
    alone, *_ = launch_lab(measure, 1, settings(**kind))
    whole, *_ = launch_lab(measure, 4, settings(tp=2, **kind))
    tokens, *_ = launch_lab(measure, 4, settings(tp=2, sequence=True, **kind))
    assert (whole["tp"], whole["dp"]) == (2, 2)
    assert whole["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert tokens["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert tokens["sums"] == 0 < whole["sums"]
    assert max(tokens["activation_bytes_per_rank"]) < min(whole["activation_bytes_per_rank"])
    assert max(whole["sent_tp_bytes_per_rank"]) < min(whole["sent_bytes_per_rank"])  # gradients of replicas besides


def launch_lab(measure: Any, ranks: int, settings: Any) -> list[dict[str, Any]]:
    return md.launch(measure, ranks=ranks, args=(settings,))


@pytest.mark.parametrize("tp", [2, 4])
def test_model_alone_has_the_matrices_of_one_rank(tp, lab):
    """What is timed without messages computes what a rank of tp does."""
    config = lab["settings"].MODELS["tiny"]
    alone = lab["measure"].narrow(md.GPT(config), tp)
    shapes = {name: tuple(p.shape) for name, p in alone.named_parameters() if "embed" not in name}

    def of_a_rank(world: md.Comm) -> dict[str, tuple[int, ...]]:
        model = md.tensor_parallel(md.GPT(config), world)
        named = {name: tuple(p.shape) for name, p in model.named_parameters() if "embed" not in name}
        return named | {"head.weight": tuple(model.head.weight.shape)}

    assert shapes == md.launch(of_a_rank, ranks=tp)[0]


@pytest.mark.slow
def test_prelab_passes(tmp_path, python):
    done = python(LAB / "prelab.py", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed:") == 5
    assert (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_gradients_are_too_large(tmp_path, lab, monkeypatch, capsys):
    """Planted: gradients tp times too large. The pre-lab has to stop, and must leave no mark of having passed."""
    prelab = lab["prelab"]
    right = prelab.one_backward

    def too_large(world: Any, layers: int, sequence: bool) -> Any:
        gradient, sent = right(world, layers, sequence)
        return gradient * world.size, sent

    monkeypatch.setattr(prelab, "ranks_meet", lambda: "")
    monkeypatch.setattr(prelab, "one_backward", too_large)
    assert prelab.main(["--out", str(tmp_path)]) == 1
    assert "away from one process" in capsys.readouterr().out
    assert not (tmp_path / "prelab-passed").exists()


def test_prelab_fails_when_a_layer_sends_more(lab, monkeypatch):
    """Planted: one more sum in each layer, as an all-reduce after each of three matrices would be."""
    prelab = lab["prelab"]
    right = prelab.one_backward

    def one_more(world: Any, layers: int, sequence: bool) -> Any:
        gradient, sent = right(world, layers, sequence)
        return gradient, sent + layers * 1000

    monkeypatch.setattr(prelab, "one_backward", one_more)
    assert "expected" in prelab.bytes_agree()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 4 --tp 3", "--tp 3 does not divide 4 ranks"),
        ("--ranks 3", "8 heads and 704 hidden numbers cannot be cut over 3 ranks: use --tp 1, 2, 4, 8"),
        ("--ranks 4 --tp 1 --batch 6", "does not divide by 4 replicas: use 4 or 8"),
        ("--dim 100", "--dim 100: dim=100 must be a multiple of"),
        ("--tp 0", "--tp 0: must be at least 1"),
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
        axes = settings.axes(ranks)
        assert axes["dp"] * axes["tp"] == ranks
        tasks.add((settings.task, ranks, axes["tp"], settings.sequence))
    counts = {1, 2, 4, 8} | ({16} if nodes == 2 else set())
    assert tasks >= {("ranks", n, n, False) for n in counts}
    assert tasks >= {("sequence", n, n, on) for n in (2, 4, 8) for on in (False, True)}
    assert tasks >= {("layout", 8, n, False) for n in (1, 2, 4, 8)}
    assert ("width", 8, 8, False) in tasks


# ---- the figure ------------------------------------------------------------------------------------------------------


def record(task: str, tp: int, step_s: float, **changes: Any) -> dict[str, Any]:
    """A result as run.py writes it."""
    settings = {"task": task, "model": "laptop", "dtype": "float32", "batch": 8, "sequence": False}
    base = {
        "lab": "05_tensor",
        "time": "2026-01-01T00:00:00.000+00:00",
        "status": "measured",
        "settings": settings | {key: value for key, value in changes.items() if key in settings},
        "ranks": tp,
        "tp": tp,
        "dp": 1,
        "hosts": ["a"] * tp,
        "devices": ["CPU X"] * tp,
        "device_type": "cpu",
        "cores_of_host": {"a": 4},
        "layers": 2,
        "dim": 256,
        "payload_bytes": 1_000_000 // 1024 * 1024,
        "median_step_s": step_s,
        "median_compute_s": 0.75 * step_s,
        "exposed_s": 0.25 * step_s,
        "sent_tp_bytes_per_rank": [20e6 * (tp - 1) / tp] * tp,
        "activation_bytes_per_rank": [8e6 / tp] * tp,
    }
    return copy.deepcopy(base | {key: value for key, value in changes.items() if key not in settings})


def test_figure_shows_the_measured_numbers(lab, curve):
    ranks = [record("ranks", tp, step) for tp, step in ((1, 1.0), (2, 0.5), (4, 0.4), (8, 0.4))]
    width = [record("width", 2, 1.0, dim=128), record("width", 2, 1.0, dim=512, exposed_s=0.1)]
    figure = lab["plot"].draw(ranks + width)
    speed_up, waiting, _, _, traffic, activations = figure.axes
    assert curve(speed_up, "batch 8") == pytest.approx({1: 1, 2: 2, 4: 2.5, 8: 2.5})
    assert curve(waiting, "tp 2") == pytest.approx({128: 25, 512: 10})
    assert curve(traffic, "batch 8, width 256") == pytest.approx({2: 4, 4: 6, 8: 7})  # two layers and a half
    assert curve(activations, "batch 8, width 256") == pytest.approx({1: 8, 2: 4, 4: 2, 8: 1})
    for axis in (speed_up, waiting, traffic, activations):
        assert axis.get_xlabel()
        assert axis.get_ylabel()
    ringed = [
        text.get_text() for text in speed_up.get_legend().get_texts() if "more ranks than cores" in text.get_text()
    ]
    assert ringed, "8 ranks on 4 cores have to be marked"
    assert "MIXED" not in figure.get_suptitle()
    assert "CPU X with 4 cores" in figure.get_suptitle()


def test_formula_of_a_layer(lab):
    """Two ranks: four sums of the payload, each of which sends it once; with sequence parallelism a gathering more."""
    whole = record("ranks", 2, 1.0)
    assert lab["plot"].formula(whole) == 4 * whole["payload_bytes"]
    norms = 2 * 4 * 256
    assert lab["plot"].formula(record("ranks", 2, 1.0, sequence=True)) == 5 * whole["payload_bytes"] + norms
    assert lab["plot"].formula(record("ranks", 2, 1.0, dtype="bfloat16")) == 4 * whole["payload_bytes"]


def test_mixed_machines_are_labelled_and_never_joined(lab):
    here = [record("ranks", ranks, 1 / ranks) for ranks in (1, 2)]
    there = [record("ranks", n, 0.1 / n, device_type="cuda", devices=["GPU Y"] * n) for n in (1, 2)]
    figure = lab["plot"].draw(here + there)
    assert "MIXED MACHINES" in figure.get_suptitle()
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert any("CPU X" in label for label in labels)
    assert any("GPU Y" in label for label in labels)
    assert not any("CPU X" in label and "GPU Y" in label for label in labels)
    for line in figure.axes[0].lines:
        if "GPU Y" in line.get_label():
            assert list(line.get_ydata()) == pytest.approx([1, 2])  # joined with the CPU's it would start at 0.1
