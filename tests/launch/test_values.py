"""What goes in and what comes back: functions and values of all kinds, and generators in a known state."""

import dataclasses
import enum
import importlib.util
import os
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch

import minidist as md
from minidist.launcher import payload


def round_trip(value):
    fd = os.memfd_create("value")
    try:
        payload.write(fd, payload.dump(value).pieces)
        return payload.read(fd)
    finally:
        os.close(fd)


DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_any_dtype_and_layout(dtype: torch.dtype):
    whole = (torch.arange(24) % 7).to(dtype).reshape(4, 6)
    for x in (whole, whole.t(), whole[1:, ::2], whole[0, 0], whole[:0], whole.expand(3, 4, 6)):
        y = round_trip(x)
        assert y.dtype == x.dtype
        assert torch.equal(y, x)
        y.zero_()  # writable, and its own


def test_tensors_that_are_more_than_numbers():
    layer = torch.nn.Linear(3, 2)
    layer.again = layer.weight  # type: ignore[assignment]  tied
    copy = round_trip(layer)
    assert copy.again is copy.weight
    assert isinstance(copy.weight, torch.nn.Parameter)
    loss = round_trip(layer(torch.ones(3)).sum())
    assert loss.requires_grad
    assert torch.equal(round_trip(torch.eye(3).to_sparse()).to_dense(), torch.eye(3))
    assert torch.equal(round_trip(torch.ones(2, dtype=torch.complex64).conj()), torch.ones(2, dtype=torch.complex64))
    view = torch.zeros(1_000_000)[:2]
    assert sum(map(len, payload.dump(view).pieces)) < 1000  # the view, not its storage


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int

    def moved(self) -> "Point":
        return Point(self.x + OFFSET)


OFFSET = 7


def test_functions_and_classes_of_a_file_that_ranks_cannot_import():
    offset = 10

    def work(world, point, scale):
        assert isinstance(point, Point)
        return point.moved(), point.x * scale + offset, Colour.RED

    moved, number, colour = md.launch(work, ranks=2, args=(Point(1), 3))[1]
    assert moved == Point(8)
    assert number == 13
    assert colour is Colour.RED


def test_a_module_that_is_only_here(tmp_path: Path):
    file = tmp_path / "only_here.py"
    file.write_text("def helper(x):\n    return twice(x) + 1\ndef twice(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("only_here", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["only_here"] = module
    try:
        spec.loader.exec_module(module)
        helper = module.helper
        assert md.launch(lambda world: helper(world.rank), ranks=2) == [1, 3]
    finally:
        del sys.modules["only_here"]


def test_modules_on_this_process_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "beside_me.py").write_text("VALUE = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_SETTING", "here")

    def work(world):
        import beside_me  # pyright: ignore[reportMissingImports]

        return beside_me.VALUE, os.getcwd(), os.environ["A_SETTING"], os.environ["WORLD_SIZE"]

    assert md.launch(work, ranks=2) == [(5, str(tmp_path), "here", "2")] * 2
    assert "WORLD_SIZE" not in os.environ


def test_large_arguments_and_results_do_not_disturb_one_another():
    big = torch.arange(3_000_000, dtype=torch.float64)

    def work(world, big):
        big += world.rank  # each rank's own
        return big, numpy.full(1_000_000, world.rank)

    results = md.launch(work, ranks=2, args=(big,))
    for rank, (tensor, array) in enumerate(results):
        assert torch.equal(tensor, big + rank)
        assert array.sum() == rank * 1_000_000
        tensor += 1
        array += 1
    assert big[0] == 0


def test_generators():
    def draw(world):
        own = torch.rand(1, generator=world.generator).item()
        return own, torch.rand(1).item(), random.random(), float(numpy.random.rand())

    first, second = md.launch(draw, ranks=3), md.launch(draw, ranks=3)
    assert first == second
    own, *shared = zip(*first, strict=True)
    assert len(set(own)) == 3
    assert [len(set(values)) for values in shared] == [1, 1, 1]
    other = md.launch(draw, ranks=1, seed=1)[0]
    assert other[0] not in own
    assert other[1] != first[0][1]
    torch.manual_seed(0)
    assert first[0][1] == torch.rand(1).item()


def test_the_inside_of_one_world_does_not_reach_the_next():
    def spoil(world):
        torch.set_default_dtype(torch.float64)
        os.environ["SPOILED"] = "yes"
        sys.path.clear()

    md.launch(spoil, ranks=1)
    assert md.launch(lambda world: (torch.ones(1).dtype, "SPOILED" in os.environ), ranks=1) == [(torch.float32, False)]
