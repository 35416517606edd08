"""Launching from a real notebook: functions by value, errors that point into the cell, interrupts, no leftovers."""

import nbformat
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
