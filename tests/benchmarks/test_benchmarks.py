"""The benchmarks run, and what they write is complete. Nothing here asserts a speed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.alternate import alternate
from benchmarks.pipeline import agree
from benchmarks.row import compare

ROOT = Path(__file__).parents[2]
GROUPS = ("data_parallel", "zero", "tensor", "pipeline", "collectives", "launch", "optimizer", "checked")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::FutureWarning", "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def check_records(records: list[dict]) -> None:
    """What a script that reads the results relies on."""
    assert isinstance(records, list)
    assert records
    for record in records:
        assert isinstance(record["name"], str)
        for number in ("ours", "theirs", "ratio", "bar"):
            assert isinstance(record[number], float), number
            assert record[number] > 0, number
        assert record["ratio"] == pytest.approx(record["ours"] / record["theirs"])
        assert record["verdict"] in ("pass", "miss", "unclear", "info")
        assert record["unit"] == ("B" if record["name"].endswith("peak memory") else "s")
        assert record["samples"] >= 1
        assert all(low <= high for low, high in record["spread"].values())
        assert {"processor", "cores", "memory_gib", "system"} <= record["machine"].keys()
        assert {"python", "torch", "minidist"} <= record["versions"].keys()
        assert "benchmarks" in record["command"]
        assert record["quick"] in (True, False)
    names = [record["name"] for record in records]
    assert len(set(names)) == len(names)


def test_quick_run_prints_a_line_a_row_and_writes_them(tmp_path):
    out = tmp_path / "results.json"
    done = run("--quick", "--output", str(out))
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())
    check_records(records)
    names = [record["name"] for record in records]
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in names)
    assert {name.partition("/")[0] for name in names} == {*GROUPS, "import"}
    for mechanism in ("naive", "bucketed", "overlapped", "one process"):
        assert f"data_parallel/2 ranks/{mechanism}" in names
    for stage in ("stage 0", "stage 1", "stage 2", "stage 3", "peak memory"):
        assert f"zero/2 ranks/{stage}" in names
    for schedule in ("gpipe", "1f1b", "interleaved", "zb_h1 vs 1f1b"):
        assert f"pipeline/2 ranks/{schedule}" in names
    assert "pipeline/simulate/limit" in names
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for way in ("Comm", "ring"):
            assert f"collectives/{op}/2 ranks/1 KB/{way}" in names
    assert all(record["quick"] for record in records)


def test_reference_result_is_a_full_run():
    records = json.loads((ROOT / "benchmarks" / "results" / "reference.json").read_text())
    check_records(records)
    assert not any(record["quick"] for record in records)
    for ranks in (2, 4):
        [row] = [row for row in records if row["name"] == f"data_parallel/{ranks} ranks/overlapped"]
        assert row["samples"] >= 10
        assert row["bar"] == 1.02


def test_list_and_only(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(GROUPS)
    with pytest.raises(SystemExit):
        main(["--only", "nonsense"])
    assert "data_parallel" in capsys.readouterr().err


def test_a_slower_contender_misses_and_a_noisy_one_is_unclear():
    theirs = [1.00, 1.01, 0.99, 1.00, 1.02, 0.98, 1.00, 1.01]
    assert compare("x", [0.9 * t for t in theirs], theirs, 1.02, "").verdict == "pass"
    assert compare("x", [1.1 * t for t in theirs], theirs, 1.02, "").verdict == "miss"
    wild = [0.5, 1.6, 0.7, 1.5, 0.6, 1.4, 1.1, 0.9]
    assert compare("x", wild, theirs, 1.02, "").verdict == "unclear"
    assert compare("x", [9.0] * 8, theirs, 1.02, "", judged=False).verdict == "info"
    with pytest.raises(ValueError, match="8 samples"):
        compare("x", theirs, theirs[1:], 1.02, "")


def test_shared_noise_does_not_move_the_ratio():
    """A burst of foreign load that hits both of a pair leaves the ratio where it was."""
    calm = [1.0] * 12
    bursts = [1.0, 1.0, 7.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 9.0, 1.0, 1.0]
    row = compare("x", [0.95 * s for s in bursts], [c * s for c, s in zip(calm, bursts, strict=True)], 1.02, "")
    assert row.ratio == pytest.approx(0.95)
    assert row.verdict == "pass"


def test_pipelines_that_find_other_gradients_or_another_loss_are_not_timed():
    """Planted: a gradient a hundredth too large, and a loss; ours has to be torch's before anything is timed."""

    def stage(gradient: float) -> torch.nn.Linear:
        linear = torch.nn.Linear(2, 2)
        for p in linear.parameters():
            p.grad = torch.full_like(p, gradient)
        return linear

    agree(lambda: 1.0, [stage(1.0)], lambda: 1.0, [stage(1.0)])
    agree(lambda: 1.0, [stage(1.0)], lambda: None, [stage(1.0)])  # torch's other ranks have no loss
    with pytest.raises(AssertionError, match="weight"):
        agree(lambda: 1.0, [stage(1.01)], lambda: 1.0, [stage(1.0)])
    with pytest.raises(AssertionError, match="Scalars"):
        agree(lambda: 1.01, [stage(1.0)], lambda: 1.0, [stage(1.0)])


def test_contenders_take_turns_and_every_step_is_timed():
    """Each round runs each contender once, none always first; a planted sleep shows where it was planted."""

    class Alone:
        """As much of a Comm as alternate uses, for a world of one."""

        def barrier(self) -> None: ...

        def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
            return x

    order: list[str] = []
    steps = {"fast": lambda: order.append("fast"), "slow": lambda: (order.append("slow"), time.sleep(0.02))}
    seconds = alternate(steps, Alone(), rounds=4, warmup=2)  # pyright: ignore[reportArgumentType]
    assert len(order) == 12
    assert all(set(order[turn : turn + 2]) == {"fast", "slow"} for turn in range(0, 12, 2))
    assert set(order[::2]) == {"fast", "slow"}
    assert [len(taken) for taken in seconds.values()] == [4, 4]
    assert min(seconds["slow"]) >= 0.02
    assert min(seconds["fast"]) < 0.02
