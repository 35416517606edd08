"""ZeRO's gradients and weights after five steps equal those of one process on the whole batch, in every stage.

Every case trains a model on (world, tokens, targets) and returns full gradients and weights. The faults that people
make are cases too, for which the same comparison has to fail.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import minidist as md
from minidist.units.flat import Flat

CONFIG = md.GPTConfig(layers=2, dim=16, heads=2, seq=8, vocab=48, tie=True)
ROWS, STEPS = 13, 5  # 13 divides by none of 2, 3, 4
SGD = {"lr": 0.5, "momentum": 0.9}
DECAY = lambda name, p: {"weight_decay": 0.1 if p.dim() > 1 else 0.0, "lr": 0.25 if "norm" in name else 0.5}


def global_batch(step):
    """tokens, targets: [ROWS, 8]. The later a row, the fewer valid targets it has, so no two ranks have as many."""
    draw = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, CONFIG.vocab, (2, ROWS, CONFIG.seq), generator=draw)
    targets[torch.arange(CONFIG.seq) > 0.7 * torch.arange(ROWS, 0, -1)[:, None]] = -100
    return tokens, targets


def share(world, step):
    rows = md.partition(ROWS, world.size)[world.rank]
    tokens, targets = global_batch(step)
    return tokens[rows], targets[rows]


def one_process(groups=None, max_norm=None):
    """The definition, in torch alone: gradients of the last step, and the weights after it."""
    module = md.GPT(CONFIG, seed=0).double()
    momentum = {}
    for step in range(STEPS):
        module.zero_grad()
        tokens, targets = global_batch(step)
        total = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        (total / (targets != -100).sum()).backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        for name, p in module.named_parameters():
            options = SGD | {"weight_decay": 0.0} | (groups(name, p) if groups else {})
            change = p.grad + options["weight_decay"] * p.detach()
            momentum[name] = options["momentum"] * momentum.get(name, 0) + change
            p.data -= options["lr"] * momentum[name]
    grads = {name: p.grad for name, p in module.named_parameters()}
    return grads, {name: value.clone() for name, value in module.state_dict().items()}


def train(world, z, max_norm=None, micro=1, reshard=True):
    for step in range(STEPS):
        z.zero_grad()
        tokens, targets = share(world, step)
        pieces = list(zip(*(x.tensor_split(micro) for x in (tokens, targets)), strict=True))
        total = md.global_tokens([labels for _, labels in pieces], world)
        with z.no_sync(reshard=reshard):
            for inputs, labels in pieces[:-1]:
                md.token_loss(z(inputs), labels, world, tokens=total).backward()
        md.token_loss(z(pieces[-1][0]), pieces[-1][1], world, tokens=total).backward()
        if max_norm:
            z.clip_grad_norm_(max_norm)
        z.step()
    return z.full_grads(), z.full_state_dict()


def build(world, stage, comm=None, sgd=md.SGD, groups=None, **options):
    module = md.GPT(CONFIG, seed=world.rank).double()  # rank 0's is the one that counts
    make = lambda given: sgd(given, **SGD)
    return md.Zero(module, comm or world, stage=stage, optimizer=make, groups=groups, **options)


def distance(found, reference):
    """The largest difference, over gradients and weights, relative to nothing: they are of order 1."""
    assert [sorted(part) for part in found] == [sorted(part) for part in reference]
    return max(
        (mine[name] - theirs[name]).abs().max().item()
        for mine, theirs in zip(found, reference, strict=True)
        for name in theirs
    )


def grid(world):
    """(shard, replicate): two ranks in each where there are four."""
    mesh = md.Mesh({"replicate": world.size // 2, "shard": 2}, world)
    return mesh["shard"], mesh["replicate"]


CASES = {
    **{f"stage {stage}": (lambda world, stage=stage: train(world, build(world, stage))) for stage in range(4)},
    **{
        f"stage {stage} in micro-batches": (lambda world, stage=stage: train(world, build(world, stage), micro=2))
        for stage in range(4)
    },
    "stage 3, keep_last": lambda world: train(world, build(world, 3, keep_last=True)),
    "stage 3, unsharded between micro-batches": lambda world: train(world, build(world, 3), micro=2, reshard=False),
    "stage 3, one unit": lambda world: train(world, build(world, 3, blocks=[])),
    "stage 3, offload": lambda world: train(world, build(world, 3, offload=True)),
    "stage 1, offload": lambda world: train(world, build(world, 1, offload=True)),
}
GROUPED = {
    f"stage {stage}": (lambda world, stage=stage: train(world, build(world, stage, groups=DECAY), max_norm=0.5))
    for stage in range(4)
}
HYBRID = {
    f"stage {stage}": (lambda world, stage=stage: train(world, build(world, stage, comm=grid(world)), 0.5, micro=2))
    for stage in range(4)
}

# ---- faults ----------------------------------------------------------------------------------------------------------


def with_fault(owner, name, wrong, stage=3, micro=1):
    def case(world):
        with mock.patch.object(owner, name, wrong(getattr(owner, name))):
            return train(world, build(world, stage), micro=micro)

    return case


def no_division(right):
    def take_over(flat, index):
        if flat.parameters[index].grad is not None:
            flat.parameters[index].grad.mul_(flat.setting.ranks)
        right(flat, index)

    return take_over


def first_micro_batch_lost(right):
    def finish(flat):
        flat.grad_shard = None
        right(flat)

    return finish


def shifted(right):
    """The pieces' gradients begin one element too late."""

    def hand_out(flat):
        flat.grad_shard = flat.grad_shard.roll(-1)
        right(flat)

    return hand_out


def never_updated(right):
    return lambda flat: None


FAULTS = {
    "no division": with_fault(Flat, "take_over", no_division),
    "first micro-batch lost": with_fault(Flat, "finish_reduce", first_micro_batch_lost, micro=2),
    "slices off by one": with_fault(Flat, "hand_out", shifted),
    "not gathered after the step": with_fault(Flat, "start_update", never_updated, stage=2),
    "stale parameters": with_fault(Flat, "start_update", never_updated, stage=1),
}


def distances(world, cases, reference):
    torch.set_num_threads(1)
    found = {}
    for name, case in cases.items():
        whole = case(world)
        found[name] = distance(whole, reference) if world.rank == 0 else whole == ({}, {})
    return found


def assert_close(everywhere):
    assert all(all(found.values()) for found in everywhere[1:]), "full on rank 0 alone"
    assert all(value <= 1e-10 for value in everywhere[0].values()), everywhere[0]


@pytest.mark.parametrize("ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_gradients_and_weights_equal_one_process(ranks):
    assert_close(md.launch(distances, ranks=ranks, args=(CASES, one_process())))


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_parameter_groups_and_clipping(ranks):
    assert_close(md.launch(distances, ranks=ranks, args=(GROUPED, one_process(DECAY, 0.5))))


def test_sharded_within_one_axis_and_replicated_over_the_other():
    assert_close(md.launch(distances, ranks=4, args=(HYBRID, one_process(None, 0.5))))


@pytest.mark.slow  # torch's optimizers import its compiler in every rank
def test_an_optimizer_of_torch():
    cases = {"torch's SGD": lambda world: train(world, build(world, 3, sgd=torch.optim.SGD))}
    assert_close(md.launch(distances, ranks=2, args=(cases, one_process())))


def test_faults_are_seen():
    everywhere = md.launch(distances, ranks=3, args=(FAULTS, one_process()))
    assert all(value > 1e-3 for value in everywhere[0].values()), everywhere[0]
