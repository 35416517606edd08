"""What all labs share: numbers of a result, legends, and that the examples in docstrings hold."""

import doctest
import importlib
import sys
from pathlib import Path

import pytest

import minidist as md
from labs.shared.measuring import in_turns

LABS = Path(__file__).parents[2] / "labs"
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
