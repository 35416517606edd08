"""Optimizers: torch's to the last bit, on whole parameters and on flat shards, with its schedulers and its state."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from minidist.optim import SGD, AdamW, adamw_, sgd_

SHAPES = [(33, 70), (1,), (5, 3, 2), (0, 4), (1027,)]


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    strided = nn.Parameter(torch.randn(7, 9, generator=generator).to(dtype).T)
    return [*made, strided, nn.Parameter(torch.ones(3, dtype=dtype))]  # the last one never gets a gradient


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params[:-1]:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype) * 10.0 ** (step % 3 - 2)


def check_equal(ours, theirs, dtype=torch.float32, steps=6):
    """Both optimizers on the same gradients: every parameter equal, bit for bit, after every step."""
    mine, reference = parameters(dtype), parameters(dtype)
    ours, theirs = ours(mine), theirs(reference)
    for step in range(steps):
        set_gradients(mine, step)
        set_gradients(reference, step)
        grads = [p.grad.clone() for p in mine[:-1]]
        ours.step()
        theirs.step()
        for index, (a, b) in enumerate(zip(mine, reference, strict=True)):
            assert torch.equal(a, b), f"parameter {index} after step {step}"
        assert all(torch.equal(p.grad, grad) for p, grad in zip(mine, grads, strict=False)), "a gradient was changed"


SETTINGS = [
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.02}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02, "nesterov": True}),
    (AdamW, torch.optim.AdamW, {}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3}),
    (AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
]


@pytest.mark.parametrize(("ours", "theirs", "settings"), SETTINGS)
def test_equals_torch_to_the_last_bit(ours, theirs, settings):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check_equal(lambda p: ours(p, **settings), lambda p: theirs(p, **settings), dtype)
    for dtype in (torch.float32, torch.float64):  # in bfloat16 torch's two implementations differ from one another
        check_equal(lambda p: ours(p, **settings), lambda p: theirs(p, **settings, foreach=True), dtype)


class EpsInsideTheRoot(AdamW):
    def _update(self, param, grad, state, group):
        state["exp_avg_sq"] = state.get("exp_avg_sq", torch.zeros_like(param)) + 1e-8
        state.setdefault("exp_avg", torch.zeros_like(param))
        state.setdefault("step", 0)
        super()._update(param, grad, state, group)


class CoupledDecay(AdamW):
    def _update(self, param, grad, state, group):
        super()._update(param, grad + 0.01 * param, state, {**group, "weight_decay": 0.0})


class NoBiasCorrection(AdamW):
    def _update(self, param, grad, state, group):
        super()._update(param, grad, state | {"step": 10_000} if state else state, group)


class GradientTwice(SGD):
    def _update(self, param, grad, state, group):
        super()._update(param, 2 * grad, state, group)


@pytest.mark.parametrize("fault", [EpsInsideTheRoot, CoupledDecay, NoBiasCorrection])
def test_that_check_notices(fault):
    with pytest.raises(AssertionError, match="after step"):
        check_equal(fault, torch.optim.AdamW)


def test_that_check_notices_a_doubled_gradient():
    with pytest.raises(AssertionError, match="after step"):
        check_equal(GradientTwice, torch.optim.SGD)


def test_torchs_fused_kernel_rounds_otherwise():
    with pytest.raises(AssertionError, match="after step"):
        check_equal(AdamW, lambda p: torch.optim.AdamW(p, fused=True))


@pytest.mark.parametrize("cuts", [[1000], [333, 1001], [0, 64, 1027]])
def test_a_flat_shard_is_updated_as_the_whole(cuts):
    """The functions on slices of one flat buffer, wherever it is cut, give what they give on all of it."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(1027, generator=generator) for _ in range(3))
    v = torch.rand(1027, generator=generator)
    whole = [x.clone() for x in (p, g, m, v)]
    adamw_(*whole, step=3, lr=0.1)
    sharded = [x.clone() for x in (p, g, m, v)]
    for shard in zip(*(x.tensor_split(cuts) for x in sharded), strict=True):
        adamw_(*shard, step=3, lr=0.1)
    assert all(torch.equal(a, b) for a, b in zip(whole, sharded, strict=True))
    whole, sharded = [x.clone() for x in (p, g, m)], [x.clone() for x in (p, g, m)]
    sgd_(*whole, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    for shard in zip(*(x.tensor_split(cuts) for x in sharded), strict=True):
        sgd_(*shard, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, sharded, strict=True))


@pytest.mark.parametrize(("ours", "theirs"), [(SGD, torch.optim.SGD), (AdamW, torch.optim.AdamW)])
def test_groups_and_schedulers(ours, theirs):
    def scheduled(make):
        class Scheduled:
            def __init__(self, params):
                self.optimizer = make([{"params": params[:2], "weight_decay": 0.5}, {"params": params[2:], "lr": 0.2}])
                self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=4)

            def step(self):
                self.optimizer.step()
                self.scheduler.step()

        return Scheduled

    check_equal(scheduled(ours), scheduled(theirs))
    one = scheduled(ours)([nn.Parameter(torch.ones(1)) for _ in range(3)])
    rates = []
    for _ in range(4):
        one.step()
        rates.append([group["lr"] for group in one.optimizer.param_groups])
    assert rates[-1] == pytest.approx([0, 0], abs=1e-12), "cosine over 4 steps ends at 0 after step 4"
    assert rates[1] == pytest.approx([0.0005, 0.1])


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [(SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (AdamW, torch.optim.AdamW, {})],
)
def test_state_moves_between_ours_and_torchs(ours, theirs, settings):
    """Three steps with one, its state_dict into the other, three more: as six with torch's."""
    reference = parameters(torch.float32)
    straight = theirs(reference, **settings)
    for step in range(6):
        set_gradients(reference, step)
        straight.step()
    back = [(ours, theirs)] if ours is AdamW else []  # torch's SGD wants settings that ours doesn't have
    for first, second in [(ours, ours), (theirs, ours), *back]:
        params = parameters(torch.float32)
        optimizer = first(params, **settings)
        for step in range(6):
            if step == 3:
                state, optimizer = optimizer.state_dict(), second(params, lr=99.0)
                optimizer.load_state_dict(state)
            set_gradients(params, step)
            optimizer.step()
        for a, b in zip(params, reference, strict=True):
            assert torch.equal(a, b), (first, second)


def test_zero_grad_and_closure():
    param = nn.Parameter(torch.ones(2))
    optimizer = SGD([param], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (3 * param).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    assert param.tolist() == [-0.5, -0.5]
    optimizer.zero_grad(set_to_none=False)
    assert param.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert param.grad is None
    optimizer.step()  # nothing to do
    assert param.tolist() == [-0.5, -0.5]


def test_errors_say_what_to_change():
    param = nn.Parameter(torch.ones(2))
    for make, message in [
        (lambda: SGD([param], lr=-1), "lr=-1 must be at least 0"),
        (lambda: SGD([param], momentum=-0.1), "momentum=-0.1"),
        (lambda: SGD([param], nesterov=True), "more for nesterov"),
        (lambda: AdamW([param], betas=(0.9, 1.0)), "below 1"),
        (lambda: AdamW([param], eps=-1e-8), "eps=-1e-08 must be at least 0"),
        (lambda: AdamW([param, param]), "listed twice"),
        (lambda: AdamW([{"params": [param]}, {"params": [param]}]), "listed twice"),
        (lambda: AdamW([{"params": [param], "momentum": 0.9}]), r"unknown settings \['momentum'\]"),
        (lambda: AdamW([]), "empty parameter list"),
        (lambda: sgd_(torch.ones(1), torch.ones(1), lr=0.1, momentum=0.9), "needs a momentum_buffer"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match=r"holds a tuple: pass module.parameters\(\)"):
        SGD(nn.Linear(2, 2).named_parameters())


def test_a_training_step_does_not_import_torchs_compiler():
    """Two seconds and more, which every new process of every world would spend before its first step."""
    program = """
import sys, torch
from minidist import optim
param = torch.nn.Parameter(torch.ones(2))
for make in (optim.SGD, optim.AdamW):
    optimizer = make([param])
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
