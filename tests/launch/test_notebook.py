"""Launching from a real notebook: functions by value, errors that point into the cell, interrupts, no leftovers."""

import asyncio
import time
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
    "factor = 3\n"
    "def work(world):\n"
    "    net = Net()\n"
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
    "md.launch(work, ranks=2)[1][0]",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each of CELLS showed: output, result and error."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(
        notebook, timeout=60, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [shown(cell) for cell in notebook.cells]


def shown(cell) -> str:
    parts = []
    for output in cell.outputs:
        data = output.get("data", {}).get("text/plain", "")
        parts += [output.get("text", ""), data, "\n".join(output.get("traceback", []))]
    return "\n".join(part for part in parts if part)


def test_functions_classes_and_globals_of_cells_travel(outputs: list[str]) -> None:
    assert "([0, 3], torch.Size([3]), True)" in outputs[1]
    assert {"[rank 0] hello from 0", "[rank 1] hello from 1"} <= set(outputs[1].splitlines())


def test_the_traceback_points_into_the_cell(outputs: list[str]) -> None:
    assert "rank 1 raised ValueError: boom" in outputs[2]
    assert "Cell In[3], line 3, in helper" in outputs[2]
    assert "raise ValueError('boom')" in outputs[2]
    assert "helper(world, torch.ones(2))" in outputs[2]
    assert "launcher" not in outputs[2]
    assert "Connection" not in outputs[2]


def test_the_deadlock_report_points_into_the_cell(outputs: list[str]) -> None:
    assert "deadlock after" in outputs[3]
    assert outputs[3].count("Cell In[4], line 4 in step:  world.barrier()  # rank 2 forgot") == 2
    assert "Look at rank 2: it returned, and ranks 0 and 1 still wait." in outputs[3]


def test_the_deadline_report_shows_the_line(outputs: list[str]) -> None:
    assert "no result after 1 s" in outputs[4]
    assert "Cell In[5], line 3 in endless" in outputs[4] or "Cell In[5], line 2 in endless" in outputs[4]


def test_the_next_launch_works(outputs: list[str]) -> None:
    assert outputs[5].splitlines()[-1] == "3"


SLEEPER = (
    "import subprocess, time, psutil\nimport minidist as md\n"
    "def sleeper(world):\n"
    "    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    "    open(f'ready{world.rank}', 'w').close()\n"
    "    time.sleep(300)  # until someone stops us\n"
    "md.launch(sleeper, ranks=2, timeout=400)"
)
AFTER = "psutil.Process().children(recursive=True), md.launch(lambda world: world.rank, ranks=2)"


def test_interrupting_a_cell(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (SLEEPER, AFTER)])
    client = NotebookClient(notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})

    async def interrupt() -> float:
        while len(list(tmp_path.glob("ready*"))) < 2:
            await asyncio.sleep(0.05)
        await client.km.interrupt_kernel()  # type: ignore[union-attr]
        return time.monotonic()

    async def run() -> tuple[float, bool]:
        async with client.async_setup_kernel():
            stopping = asyncio.create_task(interrupt())
            await client.async_execute_cell(notebook.cells[0], 0)
            took = time.monotonic() - await stopping
            sleeping = any(
                in_folder(process, tmp_path) and process.name() == "sleep" for process in psutil.process_iter()
            )
            await client.async_execute_cell(notebook.cells[1], 1)
            return took, sleeping

    took, sleeping = asyncio.run(run())
    assert took < 3
    assert not sleeping
    assert "KeyboardInterrupt: the launch was stopped, and so were its ranks." in shown(notebook.cells[0])
    assert "Cell In[1], line 6 in sleeper:  time.sleep(300)  # until someone stops us" in shown(notebook.cells[0])
    assert shown(notebook.cells[1]) == "([], [0, 1])"


def in_folder(process: psutil.Process, folder: Path) -> bool:
    """Whether a process runs in this folder."""
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
