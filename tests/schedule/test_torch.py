"""torch.distributed.pipelining reads our programs, agrees with their order, and runs them."""

import contextlib
import io
import itertools
import re

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

import minidist as md
from minidist.schedule import SCHEDULES, Program, build

SIZES = list(itertools.product(range(2, 6), range(1, 13)))  # P, M


def torchs(name, ranks, microbatches, v=None):
    with contextlib.redirect_stdout(io.StringIO()):
        rows = get_schedule_ops(name, ranks, microbatches, v)
    cells = [",".join(str(action) for action in row if action is not None) for row in rows]
    return [re.findall(r"\d+[FBIW]\d+", row) for row in cells]  # also of a pair, such as (0F3;3B1)OVERLAP_F_B


def ours(program):
    return [[str(action) for action in row] for row in program]


def test_gpipe_and_interleaved_are_torchs():
    for p, m in SIZES:
        assert ours(build("gpipe", p, m)) == torchs("GPipe", p, m)
        if m % p == 0:
            for v in (2, 3):
                assert ours(build("interleaved", p, m, v)) == torchs("Interleaved1F1B", p, m, v)


def test_1f1b_is_torchs_but_for_the_last_rank():
    """torch has the last rank run one forward pass ahead."""
    for p, m in SIZES:
        if m >= p:
            assert ours(build("1f1b", p, m))[:-1] == torchs("1F1B", p, m)[:-1]


def test_the_vees_are_torchs():
    for p, m in SIZES:
        if m >= 2 * p:
            assert ours(build("zb_v", p, m, 2)) == torchs("ZBVZeroBubble", p, m, 2)
            assert ours(build("dualpipe_v", p, m, 2)) == torchs("DualPipeV", p, m, 2)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_torchs_validator_accepts_ours(name):
    v = SCHEDULES[name].stages_per_rank or 2
    for p, m in SIZES:
        if name != "interleaved" or m % p == 0:
            program = build(name, p, m, v)
            actions = {r: [schedules._Action.from_str(str(a)) for a in row] for r, row in enumerate(program)}
            homes = schedules._validate_schedule(actions, p, program.stages, m)
            assert homes == program.homes


def test_torchs_validator_refuses_what_ours_refuses():
    broken = Program.of([row[1:] for row in build("1f1b", 2, 4)])
    actions = {r: [schedules._Action.from_str(str(a)) for a in row] for r, row in enumerate(broken)}
    with pytest.raises(AssertionError):
        schedules._validate_schedule(actions, 2, 2, 4)
    with pytest.raises(ValueError, match="needs F and then B"):
        md.schedule.validate(broken)


D, ROWS = 4, 8


def parts_of(stages):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(D, D), nn.Tanh()).double() for _ in range(stages)]


def data():
    draw = torch.Generator().manual_seed(1)
    return torch.rand(2, ROWS, D, generator=draw, dtype=torch.float64)


def both_runtimes(world, program, path):
    """This rank's gradients: of torch's runtime, and of ours."""
    mine = program.stages_of(world.rank)
    x, target = data()
    mse = nn.functional.mse_loss
    theirs = parts_of(program.stages)
    stages = [PipelineStage(theirs[s], s, program.stages, torch.device("cpu")) for s in mine]
    with contextlib.redirect_stdout(io.StringIO()):
        runtime = schedules._PipelineScheduleRuntime(stages, program.microbatches, loss_fn=mse)
        runtime._load_csv(path)
        arguments = (x,) if 0 in mine else ()
        answers = {"target": target} if program.stages - 1 in mine else {}
        runtime.step(*arguments, **answers)
    own = parts_of(program.stages)
    md.PipelineParallel([own[s] for s in mine], program, world, mse).step(x, target)
    grads = lambda parts: [p.grad for s in mine for p in parts[s].parameters()]
    return grads(theirs), grads(own)


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb_h1", 1), ("interleaved", 2), ("zb_v", 2)])
def test_torchs_runtime_runs_our_program(name, v, tmp_path):
    program = build(name, 2, 4, v)
    path = tmp_path / "program.csv"
    path.write_text(str(program))
    for theirs, own in md.launch(both_runtimes, ranks=2, args=(program, str(path)), check=False, timeout=60):
        for a, b in zip(theirs, own, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
