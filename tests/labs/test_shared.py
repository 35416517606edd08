"""What all labs share: numbers of a result, legends, and that the examples in docstrings hold."""

import doctest
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minidist as md
from labs.shared.drawing import read, save
from labs.shared.measuring import in_turns

LABS = Path(__file__).parents[2] / "labs"
each_lab = pytest.mark.parametrize(
    "folder", sorted(path.parent for path in LABS.glob("*/run.py")), ids=lambda path: path.name
)
WITH_EXAMPLES = [path for path in sorted(LABS.glob("*/*.py")) if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(LABS)))
def test_doctests(path, monkeypatch):
    scripts = [each.stem for each in path.parent.glob("*.py")]
    monkeypatch.syspath_prepend(str(path.parent))
    for name in scripts:
        monkeypatch.delitem(sys.modules, name, raising=False)
    result = doctest.testmod(importlib.import_module(path.stem))
    for name in scripts:
        sys.modules.pop(name, None)
    assert result.attempted > 0
    assert result.failed == 0


class Count:
    steps, warmup = 3, 2


def test_steps_are_taken_in_turns_and_the_slowest_rank_counts():
    def measure(world):
        import time

        order = []

        def step():
            order.append("step")
            time.sleep(0.05 * world.rank)

        return in_turns(step, lambda: order.append("alone"), Count, world), order

    for times, order in md.launch(measure, ranks=2):
        assert order == ["step", "alone"] * 5
        assert len(times["step_s"]) == len(times["compute_s"]) == 3
        assert min(times["step_s"]) >= 0.05 > max(times["compute_s"])


@each_lab
def test_slurm_directives(directives, folder):
    assert directives["ntasks-per-node"] == directives["gpus-per-node"] == "8"
    assert f"gpus_per_node={directives['gpus-per-node']}\n" in (folder / "job.sbatch").read_text()
    hours, minutes, seconds = map(int, directives["time"].split(":"))
    assert 0 < hours * 60 + minutes + seconds / 60 <= 120
    assert {"job-name", "nodes", "cpus-per-task", "output"} <= directives.keys()
    assert subprocess.run(["bash", "-n", folder / "job.sbatch"], check=False).returncode == 0


@each_lab
def test_slurm_job_stops_without_the_prelab(submit, folder):
    done, calls = submit(1)
    assert done.returncode == 1
    assert "Run the pre-lab first" in done.stderr
    assert calls == []


@each_lab
def test_empty_folder_is_explained(tmp_path, lab, folder, capsys):
    (tmp_path / "other.json").write_text(json.dumps({"lab": "another"}))
    assert save(folder.name, lab["plot"].draw, "x.png", "", [str(tmp_path)]) == 2
    assert f"no result of lab {folder.name[:2]}" in capsys.readouterr().err


@each_lab
def test_missing_gpus_block_a_task_and_do_not_fail_it(tmp_path, lab, folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(md, "launch", lambda *_, **__: pytest.fail("a run was started"))
    task = lab["settings"].TASKS[2]
    assert lab["run"].main(["--backend", "nccl", "--ranks", "8", "--task", task, "--out", str(tmp_path)]) == 0
    assert "blocked: 8 GPU(s) needed here, 2 found" in capsys.readouterr().out
    [record] = read(tmp_path, folder.name)
    assert (record["status"], record["ranks"]) == ("blocked", 8)
    shown = [text.get_text() for axis in lab["plot"].draw([record]).axes for text in axis.texts]
    assert shown.count("blocked: 8 GPU(s) needed here, 2 found") >= 1
