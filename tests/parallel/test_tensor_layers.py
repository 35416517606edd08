"""The layers by hand-computed numbers, and what a region does when a model is not as plain as GPT."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import autograd
from minidist.sharded import layers as sharded
from minidist.sharded.roles import Between, Column, Enter, Inside, Row


def cut(module, world, plan, **options):
    return md.tensor_parallel(module, world, plan, **options)


def linear(weight, bias=None):
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


# ---- C15: biases -----------------------------------------------------------------------------------------------------


def row_bias(world, sequence=False):
    """W = [[1, 2], [3, 4]], b = [10, 20], x = [1, 1]."""
    module = cut(nn.Sequential(linear([[1.0, 2.0], [3.0, 4.0]], [10.0, 20.0])), world, {"0": Row()}, sequence=sequence)
    x = torch.ones(1, 2)[:, md.partition(2, world.size)[world.rank]]
    out = module(x)
    out.sum().backward()
    return out.flatten().tolist(), module[0].bias.grad.tolist()


def bias_before_the_sum(world):
    def forward(layer, x):
        return layer.border.leave(nn.functional.linear(x, layer.weight, layer.bias))

    with mock.patch.object(sharded.RowLinear, "forward", forward):
        return row_bias(world)


def column_bias(world):
    module = cut(nn.Sequential(linear([[1.0], [2.0], [3.0], [4.0]], [10.0, 20.0, 30.0, 40.0])), world, {"0": Column()})
    module(torch.ones(1, 1)).square().sum().backward()
    return module[0].bias.tolist(), md.full_grads(module)["0.bias"].tolist()


# ---- C14: norms between regions --------------------------------------------------------------------------------------


def norm_grads(world):
    """LayerNorm(3) on 4 tokens, two a rank, L = sum(out * arange(12))."""
    module = nn.Sequential(nn.LayerNorm(3), linear([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    module = cut(module, world, {"0": Between(), "1": Column()}, sequence=True)
    mine = md.partition(4, world.size)[world.rank]
    tokens, weight = torch.arange(12.0).view(4, 3) ** 2, torch.arange(12.0).view(4, 3)
    (module[0](tokens[mine]) * weight[mine]).sum().backward()
    return module[0].bias.grad.tolist()


def averaged_norms(world):
    average = lambda border, p, label: p.register_hook(lambda grad: border.comm.all_reduce(grad.clone(), op="mean"))
    with mock.patch.object(sharded.Border, "sum_grad", average):
        return norm_grads(world)


# ---- C16: key heads that several ranks hold --------------------------------------------------------------------------


class Grouped(nn.Module):
    """Four query heads on one or two key heads, with biases."""

    def __init__(self, groups):
        super().__init__()
        draw = torch.Generator().manual_seed(4)
        self.q, self.k, self.out = nn.Linear(6, 8), nn.Linear(6, 2 * groups), nn.Linear(8, 6)
        for p in self.parameters():
            nn.init.normal_(p, generator=draw)

    def forward(self, x):
        q, k = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.q, self.k))  # [T, heads, 2]
        return self.out((q * k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)).flatten(-2))


def grouped(world, groups):
    """The largest difference from dense, of the output and of whole gradients; and of which shape k's weight is."""
    plan = {"": Enter(), "q": Column(heads=4), "k": Column(heads=groups, repeat=True), "out": Row()}
    x, found = torch.linspace(-1, 1, 30).view(5, 6).double(), []
    for cut_up in (False, True):
        module = Grouped(groups).double()
        if cut_up:
            cut(module, world, plan)
        out = module(x)
        (out**2).sum().backward()
        grads = md.full_grads(module) if cut_up else {n: p.grad for n, p in module.named_parameters()}
        found.append([out.detach(), *grads.values()])
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True)), len(module.k.weight)


# ---- regions ---------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """What GPT is not: the input used beside the columns, one column twice, one behind a dropout, one of two frozen."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(6, 4, bias=i == 0) for i in range(3))
        self.out = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(2)
        for p in self.parameters():
            nn.init.normal_(p, generator=draw)
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        a = self.norm(self.a(x).unflatten(-1, (-1, 2))).flatten(-2)
        hidden = a * self.b(x) + self.a(x) + self.c(2 * x)
        return self.out(hidden) + x.square()


ODD = {"": Enter(), "a": Column(), "b": Column(), "c": Column(), "out": Row(), "norm": Inside()}


def odd(world=None, hooks=False, needs=True, times=1, recompute=False):
    """Gradients of everything, whole: in one process, or cut."""
    module = Odd().double()
    if world is not None:
        module = cut(module, world, ODD)
    if hooks:
        module.register_full_backward_hook(lambda *_: None)
        module.register_full_backward_hook(lambda *_: None)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6).requires_grad_(needs)
    run = (lambda x: checkpoint(module, x, use_reentrant=False)) if recompute else module
    loss = (run(x) ** 2 * torch.arange(30.0).view(5, 6)).sum()
    for _ in range(times):
        loss.backward(retain_graph=True)
    grads = {n: p.grad for n, p in module.named_parameters()} if world is None else md.full_grads(module)
    return {**{n: g for n, g in grads.items() if g is not None}, **({"x": x.grad} if needs else {})}


WAYS = {
    "plain": {},
    "hooks": {"hooks": True},
    "no input gradient": {"needs": False},
    "twice": {"times": 2},
    "recomputed": {"recompute": True},
}


def two_graphs(world):
    """Forward, forward, backward, backward; and a backward pass that failed midway leaves nothing behind."""
    module = cut(nn.Sequential(linear([[1.0], [2.0]]), linear([[3.0, 5.0]])), world, {"0": Column(), "1": Row()})
    x = [torch.full((1, 1), float(k), requires_grad=True) for k in (1, 2)]
    outs = [module(each) for each in x]
    outs[0].backward()
    outs[1].backward()
    first = [each.grad.item() for each in x], md.full_grads(module)["0.weight"].flatten().tolist()

    def fail(grad):
        raise KeyError("midway")

    module.zero_grad()
    out = module(x[0])
    hidden = out.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(KeyError):
        out.backward(retain_graph=True)
    hidden.remove()
    out.backward()
    return first, md.full_grads(module)["0.weight"].flatten().tolist()


def mlp(world):
    """C10: column, GELU, row; the plain pairs, and the overlapped entry, against dense: dX and both dW."""
    draw = torch.Generator().manual_seed(0)
    w1, w2, x = (torch.randn(*s, generator=draw, dtype=torch.float64) for s in ((8, 3), (3, 8), (5, 3)))
    found = []
    for way in ("dense", "pairs", "plan"):
        leaves = [t.clone().requires_grad_() for t in (x, w1, w2)]
        if way == "dense":
            out = nn.functional.gelu(leaves[0] @ leaves[1].t()) @ leaves[2].t()
        elif way == "pairs":
            part = md.partition(8, world.size)[world.rank]
            hidden = nn.functional.gelu(autograd.copy(leaves[0], world) @ leaves[1][part].t())
            out = autograd.reduce(hidden @ leaves[2][:, part].t(), world)
        else:
            module = nn.Sequential(nn.Linear(3, 8, bias=False), nn.GELU(), nn.Linear(8, 3, bias=False)).double()
            module[0].weight.data, module[2].weight.data = w1, w2
            out = cut(module, world, {"0": Column(), "2": Row()})(leaves[0])
        (out**3).sum().backward()
        if way == "plan":
            grads = [leaves[0].grad, *md.full_grads(module).values()]
        elif way == "pairs":  # a leaf that is used in slices has gradient zero elsewhere
            grads = [leaves[0].grad, *(world.all_reduce(leaf.grad) for leaf in leaves[1:])]
        else:
            grads = [leaf.grad for leaf in leaves]
        found.append([out.detach(), *grads])
    return max((a - b).abs().max().item() for other in found[1:] for a, b in zip(found[0], other, strict=True))


def layers(world):
    return {
        "mlp": mlp(world),
        "odd": {name: odd(world, **options) for name, options in WAYS.items()},
        "row bias": row_bias(world),
        "column bias": column_bias(world),
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_layers_equal_dense(ranks):
    dense = {name: odd(**options) for name, options in WAYS.items()}
    biases = []
    for found in md.launch(layers, ranks=ranks) if ranks < 4 else md.launch(mlp_only, ranks=ranks):
        assert found["mlp"] <= 1e-12
        for name, reference in dense.items() if ranks < 4 else ():
            assert found["odd"][name].keys() == reference.keys()
            for key in reference:
                torch.testing.assert_close(found["odd"][name][key], reference[key], rtol=1e-10, atol=1e-10)
        if ranks < 4:
            assert found["row bias"] == ([13.0, 27.0], [1.0, 1.0])
            biases.append(found["column bias"])
    if ranks == 2:
        assert [number for mine, _ in biases for number in mine] == [10, 20, 30, 40]
        assert biases[0][1] == biases[1][1] == [22, 44, 66, 88]


def mlp_only(world):
    return {"mlp": mlp(world)}


def test_key_heads_that_several_ranks_hold():
    for found in md.launch(lambda world: [grouped(world, groups) for groups in (1, 2, 4)], ranks=4):
        assert all(apart <= 1e-12 for apart, _ in found), found
        assert [rows for _, rows in found] == [2, 2, 2]


def numbers(world):
    return {
        "norm": norm_grads(world),
        "averaged": averaged_norms(world),
        "row": row_bias(world, sequence=True),
        "wrong row": bias_before_the_sum(world),
        "graphs": two_graphs(world),
    }


def test_oracles():
    everywhere = md.launch(numbers, ranks=2)
    for found in everywhere:
        assert found["norm"] == pytest.approx([18, 22, 26])
        assert found["averaged"] == pytest.approx([9, 11, 13])  # the fault
        assert found["wrong row"][0] == [23, 47]  # the fault
        first, after_failure = found["graphs"]
        assert first == ([13.0, 13.0], [9.0, 15.0])
        assert after_failure == [3.0, 5.0]
    # With sequence parallelism the one token is the first rank's; the bias' gradient is everyone's.
    assert [found["row"] for found in everywhere] == [
        ([13.0, 27.0], [1.0, 1.0]),
        ([], [1.0, 1.0]),
    ]
