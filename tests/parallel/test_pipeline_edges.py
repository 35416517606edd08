"""Stages that are not plain: shared weights, hooks, parts that are frozen later, odd outputs; and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minidist as md
from minidist.schedule import build
from minidist.staged import backward

F64 = torch.float64


# ---- a backward pass in two halves -----------------------------------------------------------------------------------


def shared_by_two_forks(x, w, b):
    """w is reached directly, and through its transpose further down."""
    return (x @ w.T).relu() @ w + b


def met_on_three_ways(x, w, b):
    s = w[0]
    return (x * s + s) * s @ (w * b)


def hooked_weight(x, w, b):
    b.register_hook(lambda grad: grad * 0.5)
    w.register_hook(lambda grad: grad * 3)
    return (x @ w + b).tanh() @ w


def hooked_once(x, w, b):
    b.register_hook(lambda grad: grad * 0.5)
    return x @ w + b


def hooked_inside(x, w, b):
    y = x @ w + b
    y.register_hook(lambda grad: -grad)
    return y.sin()


def hooked_on_the_way_to_a_weight(x, w, b):
    turned = w.T
    turned.register_hook(lambda grad: grad * 5)
    return (x @ turned).tanh() + b


FUNCTIONS = (
    shared_by_two_forks,
    met_on_three_ways,
    hooked_weight,
    hooked_once,
    hooked_inside,
    hooked_on_the_way_to_a_weight,
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_two_halves_are_the_whole(function):
    def gradients(split):
        draw = torch.Generator().manual_seed(0)
        x, w, b = (torch.randn(n, 4, generator=draw, dtype=F64).requires_grad_() for n in (3, 4, 1))
        out = function(x, w, b)
        if not split:
            (of_x,) = backward.backward([out], [torch.ones_like(out)], [x])
        else:
            (of_x,), rest = backward.input_gradient([out], [torch.ones_like(out)], [x])
            assert w.grad is None
            rest.run()
        return [of_x, w.grad, b.grad]

    torch.testing.assert_close(gradients(split=True), gradients(split=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("more", [0, 2], ids=["", "and an output from which no input can be reached"])
def test_hooks_after_a_gradient_was_added_are_called(more):
    """As those of data parallelism, beside a hook of the user's on the same weight."""
    x, w = (torch.ones(2, 2, dtype=F64, requires_grad=True) for _ in "xw")
    w.register_hook(lambda grad: grad * 3)
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    outputs = [x @ w, *([w * more] if more else [])]
    _, rest = backward.input_gradient(outputs, [torch.ones_like(out) for out in outputs], [x])
    rest.run()
    torch.testing.assert_close(w.grad, torch.full((2, 2), 3.0 * (2 + more), dtype=F64))
    torch.testing.assert_close(seen[-1], w.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_two_halves_of_a_recurrent_layer(kind):
    def gradients(split):
        torch.manual_seed(0)
        layer, x = kind(4, 4, num_layers=2).double(), torch.randn(5, 2, 4, dtype=F64, requires_grad=True)
        out = layer(x)[0]
        if split:
            (of_x,), rest = backward.input_gradient([out], [torch.ones_like(out)], [x])
            rest.run()
        else:
            (of_x,) = backward.backward([out], [torch.ones_like(out)], [x])
        return [of_x, *(p.grad for p in layer.parameters())]

    torch.testing.assert_close(gradients(split=True), gradients(split=False), rtol=1e-12, atol=1e-12)


# ---- what changes from step to step ----------------------------------------------------------------------------------


class Two(nn.Module):
    """Returns two tensors, or in evaluation their sum and nothing else."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, dtype=F64) for _ in "ab")

    def forward(self, x):
        return (self.a(x), self.b(x)) if self.training else self.a(x) + self.b(x)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4, dtype=F64)

    def forward(self, *parts):
        return self.last(parts[0] * parts[0] + 3 * parts[-1])


def pair():
    torch.manual_seed(0)
    return [Two(), Head()]


def frozen_later(world):
    """(this rank's gradients and losses, those of one process), a part of the stage frozen after the first step"""
    x = torch.randn(8, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = []
    for name in ("1f1b", "zb_h1"):
        parts, alone = pair(), pair()
        pipe = md.PipelineParallel([parts[world.rank]], build(name, 2, 2), world, F.mse_loss)
        for train_a, train_b in ((True, False), (False, True), (False, False), (True, True)):
            for stages in (parts, alone):
                stages[0].a.requires_grad_(train_a)
                stages[0].b.requires_grad_(train_b)
            loss = pipe.step(x, x)
            whole = F.mse_loss(alone[1](*alone[0](x)), x)
            whole.backward()
            found.append((loss, whole.item()))
        found += [(p.grad, q.grad) for p, q in zip(*(s[world.rank].parameters() for s in (parts, alone)), strict=True)]
        for stage in (*parts, *alone):
            stage.eval()
        found.append((pipe.evaluate(x, x), F.mse_loss(alone[1](alone[0](x)), x).item()))
    return found


def test_what_a_stage_trains_and_returns_may_change_between_steps():
    for found in md.launch(frozen_later, ranks=2):
        for ours, theirs in found:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Counts(nn.Module):
    """Passes on a buffer that it changes with every micro-batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        self.seen += 1
        return self.layer(x), self.seen


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, seen):
        self.seen.append(seen.item())
        return x


def buffers_sent(world):
    stage = (Counts() if world.rank == 0 else Notes()).requires_grad_()
    pipe = md.PipelineParallel([stage], build("gpipe", 2, 4), world, F.mse_loss)
    for _ in range(2):
        pipe.step(torch.ones(4, 1), torch.ones(4, 1))
    return stage.seen if world.rank else None


def test_a_buffer_is_sent_as_it_was():
    assert md.launch(buffers_sent, ranks=2)[1] == [1, 2, 3, 4, 5, 6, 7, 8]


def no_targets_and_no_hope(world):
    """A micro-batch without targets whose logits are -inf: the loss is that of the other."""
    bias = torch.tensor([0.0, 0.0, 0.0, -torch.inf], dtype=F64)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=F64) for _ in range(2)]
    stages = [layers[0], nn.Sequential(layers[1], Adds(bias))]
    x, y = torch.randn(4, 4, dtype=F64), torch.tensor([0, 1, -100, -100])
    pipe = md.PipelineParallel([stages[world.rank]], build("1f1b", 2, 2), world, F.cross_entropy)
    loss = pipe.step(x, y)
    whole = F.cross_entropy(layers[1](layers[0](x)) + bias, y)
    ours = [p.grad.clone() for p in stages[world.rank].parameters()]
    for layer in layers:
        layer.zero_grad()
    whole.backward()
    return (loss, *ours), (whole.item(), *(p.grad for p in stages[world.rank].parameters()))


class Adds(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return x + self.what


def test_a_micro_batch_without_targets_adds_nothing_whatever_its_logits():
    for ours, theirs in md.launch(no_targets_and_no_hope, ranks=2):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return self.what(self.layer(x))


def grows(x, calls=[]):  # noqa: B006  it is to remember
    calls.append(x)
    return x.repeat(1, len(calls))


def refused(world, fault):
    program, x, y, options, stage = build("gpipe", 2, 2), torch.ones(4, 1), torch.ones(4, 1), {}, nn.Linear(1, 1)
    if fault == "forward only":
        program = program.forward()
    elif fault == "rows":
        y = torch.ones(8, 1)
    elif fault in INPUTS:
        x = INPUTS[fault]
    elif fault == "tokens":
        options = {"tokens": -8}
    elif fault == "wrapped":
        (stage,) = (md.DataParallel(s, world) for s in md.split_stages(md.GPT(md.GPTConfig(layers=2)), 2)[:1])
    elif world.rank == 0 and fault in RETURNED:
        stage = Returns(RETURNED[fault])
    elif fault == "another length":
        stage = nn.Identity()
    pipe = md.PipelineParallel([stage], program, world, lambda out, target: out.mean())
    with torch.set_grad_enabled(fault != "gradients off"):
        for _ in range(2 if fault == "another length" else 1):
            pipe.step(x, y, **options)


INPUTS = {"no inputs": (), "inputs of two lengths": (torch.ones(8, 1), torch.ones(2, 1))}
RETURNED = {
    "none": lambda x: (x, None),
    "small numbers": lambda x: (x, torch.zeros(1, dtype=torch.int16)),
    "another length": grows,
}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("forward only", "this program has forward passes only: `evaluate` goes forward alone"),
        ("gradients off", "gradients are off: `evaluate` goes forward alone"),
        ("rows", "4 rows of inputs and 8 of targets"),
        ("no inputs", r"inputs of \[\] rows: give one tensor, or several"),
        ("inputs of two lengths", r"inputs of \[8, 2\] rows: give one tensor, or several that are as long"),
        ("tokens", "tokens=-8: how many the sum of losses is divided by"),
        ("wrapped", "is wrapped: give PipelineParallel the stage itself"),
        ("none", "stage 0 returned a NoneType: a stage returns a tensor, or several"),
        ("small numbers", "a stage cannot pass on torch.int16"),
        ("another length", "may depend on the shape of the batch alone"),
    ],
)
def test_what_cannot_work_says_what_to_change(fault, words):
    with pytest.raises(md.LaunchError, match=words):
        md.launch(refused, ranks=2, args=(fault,), timeout=20)
