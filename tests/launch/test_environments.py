"""Which world the environment describes: pure functions over dicts, and real torchrun."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidist.launcher import environment
from minidist.launcher.environment import resolve

TORCHRUN = {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "77", "SLURM_NODEID": "1"}


def test_torchrun():
    here = resolve(TORCHRUN)
    assert here.notes == ()
    assert (here.rank, here.size, here.local_rank, here.local_size) == (4, 8, 0, 4)
    assert here.master == "node1:1234"
    assert environment.place(here, None, gpus=4) == ("nccl", "cuda:0")
    assert environment.place(here, None, gpus=2) == ("gloo", "cpu")
    assert environment.place(here, "gloo", gpus=4) == ("gloo", "cpu")
    with pytest.raises(ValueError, match="each of the 4 ranks, and this machine has 2 GPUs"):
        environment.place(here, "nccl", gpus=2)


def test_slurm():
    here = resolve(SLURM)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.source) == (3, 4, 1, 2, "slurm")
    assert re.fullmatch(r"gpu07:2\d{4}", here.master)
    assert environment.place(here, None, gpus=2) == ("nccl", "cuda:1")
    bound = resolve({**SLURM, "SLURM_GPUS_PER_TASK": "1"})  # each task sees one GPU, its own
    assert environment.place(bound, None, gpus=1) == ("nccl", "cuda:0")
    assert resolve({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "9"}).master == "head:9"
    assert len({resolve({**SLURM, "SLURM_JOB_ID": str(job)}).master for job in range(50)}) == 50


def test_torchrun_wins_with_a_note():
    here = resolve({**SLURM, **TORCHRUN})
    assert (here.rank, here.size, here.source) == (4, 8, "torchrun")
    assert "torchrun says rank 4 of 8, Slurm says 3 of 4: torchrun's is used" in here.table()
    assert resolve({**SLURM, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "4"}).notes == ()


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}]
)
def test_a_world_of_one_has_a_hint(env: dict[str, str]):
    here = resolve(env)
    assert here.alone
    assert "a world of one" in here.table()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "half set: RANK without WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, "half set: LOCAL_RANK without RANK, WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 and WORLD_SIZE=8 do not fit"),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, "WORLD_SIZE must be a whole number, and is 'many'"),
        ({**TORCHRUN, "MASTER_PORT": "auto"}, "MASTER_PORT must be a whole number, and is 'auto'"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "half set: SLURM_PROCID without SLURM_LOCALID"),
    ],
)
def test_half_set_or_impossible(env: dict[str, str], message: str):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        resolve(env)


def test_no_local_rank_has_a_note():
    here = resolve({"RANK": "1", "WORLD_SIZE": "2"})
    assert here.local_rank == 1
    assert "LOCAL_RANK is not set" in here.table()
    assert "without MASTER_ADDR and MASTER_PORT: taken as for ranks on one machine" in here.table()
    assert "without MASTER_PORT: " in resolve({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}).table()


SCRIPT = """
import sys, torch, minidist as md
def work(world, x):
    return world.rank, world.size, world.all_reduce(torch.tensor(x)).item(), torch.rand(1).item()
first = md.launch(work, args=(1.0,))
again = md.launch(work, ranks=2, args=(2.0,), seed=0)
world = md.world_from_env()
assert world.all_reduce(torch.ones(1)).item() == 2
try:
    md.launch(work, ranks=3, args=(1.0,))
except ValueError as error:
    refused = str(error)
print(f"<{first} {again} {refused}>", flush=True)
"""


def test_under_torchrun(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert re.search(
            rf"<\[\({rank}, 2, 2.0, (\S+)\)\] \[\({rank}, 2, 4.0, \1\)\] ranks=3, but torchrun", done.stdout
        )
    assert done.stderr.count("found by      torchrun") == 1
    assert "destroy_process_group" not in done.stderr  # torch's warning when a group is left behind
