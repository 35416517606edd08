"""Tensor parallelism: the ranks hold slices of each layer's matrices, and compute with them on the same tokens.

A *region* begins where a tensor enters column-parallel layers and ends behind a row-parallel one. Inside, each rank has
its share of the columns: of heads in attention, of hidden numbers in the feed-forward pair. Between regions all ranks
have the same tensor. y = (x A) B with A cut by columns and B by rows is a sum over the ranks, so one all-reduce a
region is needed going forward, at its end, and one going back, at its beginning:

    x: [B, S, D]    A: [D, F/tp]    x A: [B, S, F/tp]    B: [F/tp, D]    x A B: [B, S, D] {+tp}  -all-reduce->  [B, S, D]

With `sequence=True` the same plan has other boundaries. Between regions each rank has t = T/tp of the T = B S tokens:

    x: [T/tp, D]  -all-gather->  [B, S, D]  ...  [B, S, D] {+tp}  -reduce-scatter->  [T/tp, D]

which moves the same bytes, and norms, dropouts and what they save for the backward pass are a tp-th.

The model is plain torch and knows nothing of this. A plan says, for the names of its modules, which role each has.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053); Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models (arXiv 2205.05198), 4.2.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist import autograd
from minidist.comm.comm import Comm
from minidist.comm.partition import lengths, partition
from minidist.entry import Entry
from minidist.models.gpt import GPT, GPTConfig
from minidist.replicas import broadcast_tensors, check_same_module

# ---- the plan: which role a module has -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """A module whose first argument enters a region, once for all column-parallel layers in it."""


@dataclass(frozen=True)
class Column:
    """nn.Linear with its outputs cut, by whole heads if it has some: W [D, F/tp].

    repeat: with more ranks than heads, ranks may hold the same head (keys and values that several queries share).
    """

    heads: int | None = None
    repeat: bool = False


@dataclass(frozen=True)
class Row:
    """nn.Linear with its inputs cut: W [F/tp, D]. Its output is summed over the ranks; a bias is added once."""


@dataclass(frozen=True)
class Vocab:
    """nn.Embedding with its rows cut, or the nn.Linear that ends in logits: [V/tp, D].

    Where tp does not divide V the last ranks have fewer rows, and the logits they lack are -inf.
    """


@dataclass(frozen=True)
class Between:
    """A norm or dropout between regions. With sequence parallelism it sees this rank's tokens only."""


@dataclass(frozen=True)
class Inside:
    """A dropout inside a region, on this rank's slice, along dim, of a larger tensor."""

    dim: int = -1


Role = Enter | Column | Row | Vocab | Between | Inside
Plan = Mapping[str, Role]


def gpt_plan(config: GPTConfig) -> Plan:
    """The plan of `GPT`: a star stands for any one part of a module's name."""
    kv = Column(heads=config.query_groups, repeat=True)
    return {
        "embed": Vocab(),
        "blocks.*.attn_norm": Between(),
        "blocks.*.attn": Enter(),
        "blocks.*.attn.q": Column(heads=config.heads),
        "blocks.*.attn.k": kv,
        "blocks.*.attn.v": kv,
        "blocks.*.attn.out": Row(),
        "blocks.*.mlp_norm": Between(),
        "blocks.*.mlp": Enter(),
        **({"blocks.*.mlp.gate": Column()} if config.mlp == "swiglu" else {}),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "blocks.*.dropout": Between(),
        "norm": Between(),
        "head": Vocab(),
    }


def tensor_parallel(
    module: nn.Module, comm: Comm, plan: Plan | None = None, sequence: bool = False, seed: int | None = None
) -> nn.Module:
    """Cut `module` over the ranks of comm, in place, and return it. Collective: every rank passes the whole module.

    ...
    """
    if plan is None:
        if not isinstance(module, GPT):
            raise ValueError("...")
        plan = gpt_plan(module.config)
    named = dict(module.named_modules())
    roles = {name: role for pattern, role in plan.items() for name in named if _matches(name, pattern)}
    border = Border(comm, sequence)
    check_same_module(module, comm)
    broadcast_tensors([*module.parameters(), *module.buffers()], comm)
    cutter = {}
    def cut(layer, attr, dim, parts):
        p = getattr(layer, attr)
        if p is None: return
        if p not in cutter:
            part = parts
            new = nn.Parameter(p.detach().narrow(dim, part.start, part.stop-part.start).clone(), p.requires_grad)
            cutter[p] = new
        setattr(layer, attr, cutter[p])
    regions = {}
    for name, role in roles.items():
        if isinstance(role, Enter):
            regions[name] = Region(border, named[name])
    for name, role in roles.items():
        layer = named[name]
        if isinstance(role, (Column, Vocab)) and isinstance(layer, nn.Linear):
            above = [r for r in regions if name.startswith(r + ".")]
            region = regions[max(above, key=len)] if above else Region(border)
            shared = None
            if isinstance(role, Column):
                n = role.heads or layer.out_features
                if role.repeat and n < comm.size:
                    copies = comm.size // n
                    shared = comm.subgroups([list(range(i*copies, (i+1)*copies)) for i in range(n)], name="shared heads")
                    k = layer.out_features // n
                    i = comm.rank // copies
                    part = slice(i*k, (i+1)*k)
                else:
                    part = partition(layer.out_features, comm.size)[comm.rank]
                layer.__class__ = ColumnLinear
            else:
                part = partition(layer.out_features, comm.size)[comm.rank]
                layer.missing = lengths(layer.out_features, comm.size)[0] - (part.stop-part.start)
                layer.__class__ = VocabLinear
            layer.region = region
            layer.number = region.add(layer, shared)
            cut(layer, "weight", 0, part)
            cut(layer, "bias", 0, part)
            layer.out_features = len(layer.weight)
        elif isinstance(role, Row):
            part = partition(layer.in_features, comm.size)[comm.rank]
            cut(layer, "weight", 1, part)
            layer.in_features = layer.weight.shape[1]
            layer.border = border
            layer.__class__ = RowLinear
            if sequence and layer.bias is not None:
                border.share(layer.bias)
        elif isinstance(role, Vocab):
            layer.rows = partition(layer.num_embeddings, comm.size)[comm.rank]
            cut(layer, "weight", 0, layer.rows)
            layer.border = border
            layer.__class__ = VocabEmbedding
        elif isinstance(role, Between) and sequence:
            if isinstance(layer, nn.Dropout):
                layer.border = border
                layer.__class__ = TokenDropout
            for p in layer.parameters():
                border.share(p)
    return module

def _matches(name, pattern):
    a, b = name.split("."), pattern.split(".")
    return len(a) == len(b) and all(y in (x, "*") for x, y in zip(a, b))

class Border:
    def __init__(self, comm, sequence):
        self.comm, self.sequence, self.shape = comm, sequence, None
    def leave(self, x):
        if not self.sequence:
            return autograd.reduce(x, self.comm)
        self.shape = x.shape[:-1]
        return autograd.reduce_scatter(x.flatten(0, -2), self.comm)
    def entered(self, x):
        if not self.sequence:
            return None
        if self.shape is None:
            return (sum(self.comm.lengths(len(x))),)
        return tuple(self.shape)
    def share(self, p):
        def hook(grad):
            with self.comm.recorder.label("norm gradients"):
                return self.comm.all_reduce(grad.clone())
        p.register_hook(hook)

class Region:
    def __init__(self, border, module=None):
        self.border, self.layers, self.shared, self.open = border, [], [], None
        if module is not None:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._exit, always_call=True)
    def add(self, layer, shared):
        self.layers.append(layer)
        self.shared.append(shared)
        return len(self.layers) - 1
    def _enter(self, module, args):
        x = args[0]
        entry = Entry(self.border.comm, self.border.entered(x), self.shared)
        self.open = entry, entry.enter(x, [l.weight for l in self.layers]), x
        return self.open[1], *args[1:]
    def _exit(self, *_):
        self.open = None
    def product(self, layer, x):
        if self.open is not None and x is self.open[1]:
            entry, whole, entered = self.open
            return entry.product(layer.number, whole, entered, layer.weight)
        shape = self.border.entered(x) if self.open is None else None
        entry = Entry(self.border.comm, shape, [self.shared[layer.number]])
        return entry.product(0, entry.enter(x, [layer.weight]), x, layer.weight)

class ColumnLinear(nn.Linear):
    def forward(self, x):
        out = self.region.product(self, x)
        return out if self.bias is None else out + self.bias

class VocabLinear(ColumnLinear):
    def forward(self, x):
        out = super().forward(x)
        return F.pad(out, (0, self.missing), value=-torch.inf) if self.missing else out

class RowLinear(nn.Linear):
    def forward(self, x):
        out = self.border.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

class VocabEmbedding(nn.Embedding):
    def forward(self, tokens):
        away = (tokens < self.rows.start) | (tokens >= self.rows.stop)
        rows = F.embedding((tokens - self.rows.start).masked_fill(away, 0), self.weight)
        return self.border.leave(rows.masked_fill(away[..., None], 0))

class TokenDropout(nn.Dropout):
    def forward(self, x):
        if not self.training or self.p == 0: return x
        shape = self.border.shape
        mask = F.dropout(torch.ones(*shape, x.shape[-1], dtype=x.dtype), self.p).flatten(0, -2)
        return x * mask[partition(len(mask), self.border.comm.size)[self.border.comm.rank]]
