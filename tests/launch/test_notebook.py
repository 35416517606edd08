"""Launching from a real notebook: functions by value, errors that point into the cell, interrupts, no leftovers."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

CELLS = [
    "import torch\nimport minidist as md\nassert not torch.cuda.is_initialized()\n"
    "torch.randn(2000, 2000) @ torch.randn(2000, 2000);",
    "class Net(torch.nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(3, 3)\n"
    "    def forward(self, x):\n        return self.layer(x)\n"
    "import pickle\nfactor = 3\n"
    "def work(world):\n"
    "    net = Net()\n"
    "    assert type(pickle.loads(pickle.dumps(net))) is Net  # as torch.save does\n"
    "    torch.randn(2000, 2000) @ torch.randn(2000, 2000)\n"
    "    print('hello from', world.rank)\n"
    "    return world.rank * factor, net(torch.ones(3)).shape, net\n"
    "values = md.launch(work, ranks=2)\n"
    "[v[0] for v in values], values[1][1], isinstance(values[0][2], Net)",
    "def helper(world, x):\n    if world.rank == 1:\n        raise ValueError('boom')\n    world.all_reduce(x)\n"
    "def failing(world):\n    helper(world, torch.ones(2))\n"
    "md.launch(failing, ranks=2)",
    "class Trainer:\n    def step(self, world):\n        if world.rank != 2:\n"
    "            world.barrier()  # rank 2 forgot\n"
    "def stuck(world):\n    def inner():\n        Trainer().step(world)\n    inner()\n"
    "md.launch(stuck, ranks=3)",
    "def endless(world):\n    while True:\n        pass  # round and round\nmd.launch(endless, ranks=2, timeout=1)",
    "import subprocess, time\n"
    "def sleeper(world):\n"
    "    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "    open(f'ready{world.rank}', 'w').close()\n"
    "    time.sleep(300)  # until someone stops us\n"
    "md.launch(sleeper, ranks=2, timeout=400)",
    "import psutil\npsutil.Process().children(recursive=True), md.launch(work, ranks=2)[1][0]",
]
INTERRUPTED = 5  # the cell that is stopped


@dataclass(frozen=True)
class Run:
    """What each of CELLS showed (output, result and error), how long the interrupted cell took to end, and whether a
    process that its ranks had started was there after that."""

    shown: list[str]
    seconds: float
    leftover: bool


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return asyncio.run(run_cells(tmp_path_factory.mktemp("notebook")))


async def run_cells(folder: Path) -> Run:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = NotebookClient(notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": str(folder)}})

    async def interrupt() -> float:
        while len(list(folder.glob("ready*"))) < 2:
            await asyncio.sleep(0.05)
        await client.km.interrupt_kernel()  # type: ignore[union-attr]
        return time.monotonic()

    async with client.async_setup_kernel():
        seconds, leftover = 0.0, False
        for number, cell in enumerate(notebook.cells):
            stopping = asyncio.create_task(interrupt()) if number == INTERRUPTED else None
            await client.async_execute_cell(cell, number)
            if stopping:
                seconds = time.monotonic() - await stopping
                leftover = any(in_folder(p, folder) and p.name() == "sleep" for p in psutil.process_iter())
    return Run([shown(cell) for cell in notebook.cells], seconds, leftover)


def shown(cell) -> str:
    parts = []
    for output in cell.outputs:
        data = output.get("data", {}).get("text/plain", "")
        parts += [output.get("text", ""), data, "\n".join(output.get("traceback", []))]
    return "\n".join(part for part in parts if part)


def test_functions_classes_and_globals_of_cells_travel(run: Run):
    assert "([0, 3], torch.Size([3]), True)" in run.shown[1]
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(run.shown[1].splitlines())


def test_the_traceback_points_into_the_cell(run: Run):
    assert "rank 1 raised ValueError: boom" in run.shown[2]
    assert "Cell In[3], line 3, in helper" in run.shown[2]
    assert "raise ValueError('boom')" in run.shown[2]
    assert "helper(world, torch.ones(2))" in run.shown[2]
    assert "launcher" not in run.shown[2]
    assert "Connection" not in run.shown[2]


def test_the_deadlock_report_points_into_the_cell(run: Run):
    assert "deadlock after" in run.shown[3]
    assert run.shown[3].count("Cell In[4], line 4 in step:  world.barrier()  # rank 2 forgot") == 2
    assert "Look at rank 2: it returned, and ranks 0 and 1 still wait." in run.shown[3]


def test_the_deadline_report_shows_the_line(run: Run):
    assert "no result after 1 s" in run.shown[4]
    assert "Cell In[5], line 3 in endless" in run.shown[4] or "Cell In[5], line 2 in endless" in run.shown[4]


def test_interrupting_a_cell(run: Run):
    assert run.seconds < 3
    assert not run.leftover
    assert "KeyboardInterrupt: the launch was stopped, and so were its ranks." in run.shown[5]
    assert "Cell In[6], line 5 in sleeper:  time.sleep(300)  # until someone stops us" in run.shown[5]


def test_nothing_is_left_and_the_next_launch_works(run: Run):
    assert run.shown[6].splitlines()[-1] == "([], 3)"


def in_folder(process: psutil.Process, folder: Path) -> bool:
    """Whether a process runs in this folder."""
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
