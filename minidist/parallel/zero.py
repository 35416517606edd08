"""ZeRO: what data parallelism keeps n times, optimizer state, gradients and parameters, is kept once.

Ask where each of them rests between steps, and the rest follows: what is cut has to be gathered before it is used.

stage   params      grads     optimizer   traffic, in N (n-1)/n   resident, N parameters and two moments
0       Replicate   Partial   Replicate   2                       4 N
1       Replicate   Partial   Shard       2                       (2 + 2/n) N
2       Replicate   Shard     Shard       2                       (1 + 3/n) N
3       Shard       Shard     Shard       3                       4 N / n

Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable

from minidist.comm.comm import Comm
from minidist.flat import Flat, Rest, Setting
from minidist.placement import Partial, Replicate, Shard

STAGES: Mapping[int, Rest] = MappingProxyType(
    {
        0: Rest(params=Replicate(), grads=Partial(), optimizer=Replicate()),
        1: Rest(params=Replicate(), grads=Partial(), optimizer=Shard()),
        2: Rest(params=Replicate(), grads=Shard(), optimizer=Shard()),
        3: Rest(params=Shard(), grads=Shard(), optimizer=Shard()),
    }
)


class Unit:
    def __init__(self, path, module, named, setting):
        self.path, self.module = path, module
        kinds: dict[Any, dict[str, nn.Parameter]] = {}
        for name, p in named.items():
            if p.requires_grad or setting.rest.params == Shard():
                kinds.setdefault((p.dtype, p.device, p.requires_grad), {})[name] = p
        self.flats = [Flat(kind, setting) for kind in kinds.values()]
        self.started = False
        self.launched = False


class Zero(nn.Module):
    def __init__(self, module, comm, stage=3, optimizer=None, groups=None, *, keep_last=False, axis="dp", grad_dtype=None):
        super().__init__()
        self.module, self.comm, self.stage = module, comm, stage
        setting = Setting(comm, None, axis, STAGES[stage], None, None, grad_dtype)
        blocks = {f"{n}.{k}": b for n, part in module.named_children() if isinstance(part, nn.ModuleList | nn.Sequential) for k, b in part.named_children()}
        mine = {p: path for path, b in blocks.items() for p in b.parameters()}
        byunit = {path: {} for path in ["", *blocks]}
        for name, p in module.named_parameters():
            byunit[mine.get(p, "")][name] = p
        self.root = Unit("", module, byunit[""], setting)
        self.blocks = [Unit(path, b, byunit[path], setting) for path, b in blocks.items()]
        self.units = [self.root, *self.blocks]
        self.next = {a.path: b for a, b in zip(self.units, self.units[1:])}
        self.prev = {b.path: a for a, b in zip(self.units, self.units[1:])}
        self.backwarding = False
        self.pending = []
        for u in self.blocks:
            u.module.register_forward_pre_hook(partial(self._pre, u))
            u.module.register_forward_hook(partial(self._post, u))
        for u in self.units:
            for f in u.flats:
                if f.trained:
                    for i, p in enumerate(f.parameters):
                        p.register_post_accumulate_grad_hook(partial(self._on_grad, u, f, i))
        self.optimizer = optimizer([{"params": [pc.tensor for u in self.units for f in u.flats for pc in f.pieces]}])

    def _start(self, u):
        for f in u.flats: f.start_unshard()
    def _unshard(self, u):
        for f in u.flats: f.start_unshard()
        for f in u.flats: f.unshard()
    def _reshard(self, u):
        for f in u.flats: f.reshard()
    def forward(self, *a, **k):
        self._start(self.root); self._start(self.blocks[0]); self._unshard(self.root)
        out = self.module(*a, **k)
        out.register_hook(partial(self._pre_backward, self.root))
        self._reshard(self.root)
        return out
    def _pre(self, u, *_):
        self._unshard(u)
        if (n := self.next.get(u.path)): self._start(n)
    def _post(self, u, m, a, out):
        out.register_hook(partial(self._pre_backward, u))
        self._reshard(u)
    def _pre_backward(self, u, _):
        if not self.backwarding:
            self.backwarding = True
            Variable._execution_engine.queue_callback(self._finish)
            self._start(self.root); self._start(self.blocks[-1])
            for v in self.units: v.launched = False
        self._unshard(u)
        if u is self.root: return
        p = self.prev[u.path]
        self._start(p)
        for v in reversed(self.blocks[self.blocks.index(u)+1:]): self._launch(v)
    def _launch(self, v):
        if v.launched: return
        v.launched = True
        for f in v.flats: f.start_reduce()
        self._reshard(v)
        while self.pending: self._finish_one()
        self.pending.append(v)
    def _finish_one(self):
        for f in self.pending.pop(0).flats: f.finish_reduce(); f.expect_all()
    def _on_grad(self, u, f, i, _):
        f.deliver(i)
        if self.stage < 3 and not any(ff.waiting for ff in u.flats): 
            if not self.backwarding:
                self.backwarding = True
                Variable._execution_engine.queue_callback(self._finish)
            self._launch(u)
    def _finish(self):
        for v in [*reversed(self.blocks), self.root]: self._launch(v)
        while self.pending: self._finish_one()
        for v in self.units: self._reshard(v); v.launched = False
        self.backwarding = False
    def step(self):
        self.optimizer.step()
        fs = [f for u in self.units for f in u.flats]
        for f in fs: f.start_update()
        for f in fs: f.finish_update()
    def zero_grad(self, set_to_none=True):
        for u in self.units:
            for f in u.flats: f.drop_grads()
