"""Ours beside torch's DTensor plan on the same model: the same training, within rounding."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import minidist as md

CONFIG = md.GPTConfig(layers=2, dim=32, heads=4, kv_heads=4, seq=16, vocab=64, tie=False)


def data():
    return torch.randint(0, CONFIG.vocab, (2, 3, 12), generator=torch.Generator().manual_seed(1))


def theirs(world):
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(CONFIG.layers):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("attn.out", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel()
    module = parallelize_module(md.GPT(CONFIG, seed=0), DeviceMesh("cpu", list(range(world.size))), plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    tokens, targets = data()
    for _ in range(3):
        optimizer.zero_grad()
        with loss_parallel():
            F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
    return {
        n: whole(t).detach() for name, p in module.named_parameters() for n, t in ((name, p), (f"{name} grad", p.grad))
    }


def ours(world, sequence):
    module = md.tensor_parallel(md.GPT(CONFIG, seed=0), world, sequence=sequence)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    tokens, targets = data()
    for _ in range(3):
        optimizer.zero_grad()
        md.vocab_parallel_cross_entropy(module(tokens), targets, world).mean().backward()
        optimizer.step()
    return md.full_state_dict(module) | {f"{n} grad": g for n, g in md.full_grads(module).items()}


def beside_torch(world):
    reference = theirs(world)
    relative = lambda found: max(((found[n] - t).norm() / t.norm()).item() for n, t in reference.items())
    return {sequence: relative(ours(world, sequence)) for sequence in (False, True)}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_close_to_the_dtensor_plan(ranks):
    for found in md.launch(beside_torch, ranks=ranks, timeout=120):
        assert all(value <= 1e-5 for value in found.values()), found
