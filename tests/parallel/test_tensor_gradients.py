"""Tensor parallelism's gradients and weights equal those of one process, for any number of ranks and either border.

Every case trains five steps of SGD on a mesh dp x tp, each dp rank on rows of its own; `distance` compares the last
gradients and the weights with one process on the whole batch. The faults that people make must fail that comparison.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import minidist as md
from minidist import autograd
from minidist.sharded import entry

CONFIG = md.GPTConfig(layers=2, dim=32, heads=4, seq=16, vocab=61)  # 61 words: the last rank has fewer
GROUPED = md.GPTConfig(layers=1, dim=32, heads=4, kv_heads=2, seq=16, vocab=64, mlp="gelu", tie=False)
SINGLE = md.GPTConfig(layers=1, dim=32, heads=4, kv_heads=1, seq=16, vocab=6)  # 2, 2, 2 and no word on the last of 4
ROWS, LENGTH, STEPS = 3, 15, 5  # 45 tokens: no number of ranks divides them


def batches(config):
    """tokens, targets of each step: [STEPS, ROWS, LENGTH]. The later a row, the fewer valid targets it has."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, config.vocab, (2, STEPS, ROWS, LENGTH), generator=draw)
    targets[..., torch.arange(LENGTH) > 5 * torch.arange(ROWS, 0, -1)[:, None]] = -100
    return zip(tokens, targets, strict=True)


def one_process(config):
    """The definition, in torch alone."""
    module = md.GPT(config, seed=0).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for tokens, targets in batches(config):
        optimizer.zero_grad()
        total = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        (total / (targets != -100).sum()).backward()
        optimizer.step()
    return {n: p.grad for n, p in module.named_parameters()}, module.state_dict()


def train(world, config, tp, sequence, plan=None, micro=1):
    """The whole gradients of the last step, the weights after it, and what the ranks of tp must have in common."""
    mesh = md.Mesh({"dp": world.size // tp, "tp": tp}, world)
    dp = mesh["dp"]
    module = md.tensor_parallel(md.GPT(config, seed=0).double(), mesh["tp"], plan, sequence=sequence)
    replica = md.DataParallel(module, dp, bucket_mb=0.01)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    rows = md.partition(ROWS, dp.size)[dp.rank]
    for tokens, targets in batches(config):
        optimizer.zero_grad()
        pieces = list(zip(tokens[rows].split(micro), targets[rows].split(micro), strict=True))
        valid = md.global_tokens([labels for _, labels in pieces], dp)
        for last, (inputs, labels) in enumerate(pieces, 1 - len(pieces)):
            with replica.no_sync() if last else mock.MagicMock():
                md.token_loss(replica(inputs), labels, dp, valid, tp=mesh["tp"]).backward()
        optimizer.step()
    replicated = [p.detach() for p in module.parameters() if md.placement_of(p, "tp") == md.Replicate()]
    same = [
        torch.equal(row, everyone[0])
        for p in replicated
        for everyone in [mesh["tp"].all_gather(p[None])]
        for row in everyone
    ]
    norm = md.grad_norm(module, mesh).item()
    return md.full_grads(replica), md.full_state_dict(replica), all(same), norm


def distance(found, reference):
    """The largest difference of a gradient, a weight or the gradients' norm; infinite where ranks of tp disagree."""
    (grads, state, same, norm), (dense, weights) = found, reference
    assert grads.keys() == dense.keys()
    assert state.keys() == weights.keys()
    total = torch.stack([g.square().sum() for g in dense.values()]).sum().sqrt().item()
    pairs = [(grads[n], dense[n]) for n in dense] + [(state[n], weights[n]) for n in weights]
    return max([(a - b).abs().max().item() for a, b in pairs] + [abs(norm - total), 0.0 if same else float("inf")])


FLAT = {name: role for name, role in md.gpt_plan(CONFIG).items() if role != md.roles.Enter()}

# config, tp, sequence, plan, rows a micro-batch
CASES = {
    "plain": (CONFIG, 1, False, None, ROWS),
    "sequence": (CONFIG, 1, True, None, 1),
    "accumulated": (CONFIG, 1, False, None, 1),
    "layer by layer": (CONFIG, 1, False, FLAT, ROWS),
    "layer by layer, sequence": (CONFIG, 1, True, FLAT, ROWS),
    "grouped": (GROUPED, 1, False, None, ROWS),
    "grouped, sequence": (GROUPED, 1, True, None, 1),
    "one key head": (SINGLE, 1, False, None, ROWS),
    "one key head, sequence": (SINGLE, 1, True, None, ROWS),
}


def trained(world, tp, names):
    return {n: train(world, config, tp, *options) for n in names for config, _, *options in [CASES[n]]}


@pytest.fixture(scope="module")
def references():
    return {config: one_process(config) for config in (CONFIG, GROUPED, SINGLE)}


def check(ranks, tp, names, references):
    for found in md.launch(trained, ranks=ranks, args=(tp, names), timeout=300):
        apart = {name: distance(found[name], references[CASES[name][0]]) for name in names}
        assert all(value <= 1e-10 for value in apart.values()), apart


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (4, 2)])
def test_gradients_and_weights_equal_one_process(ranks, tp, references):
    check(ranks, tp, ["plain", "sequence", "grouped", "one key head, sequence"], references)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1), (6, 2), (3, 1)])
def test_gradients_and_weights_equal_one_process_in_every_case(ranks, tp, references):
    check(ranks, tp, list(CASES), references)


# ---- faults ----------------------------------------------------------------------------------------------------------


def torch_reduce(x, comm):
    """A sum that is summed again going back: torch's differentiable all-reduce."""
    return autograd._Pair.apply(
        x, lambda x: autograd._all_reduce(x, comm), lambda grad: autograd._all_reduce(grad, comm)
    )


class NoSum:
    def __init__(self, value):
        self.value = value

    def wait(self):
        return self.value


def share_kept(border, parameter, label):
    """Norms keep the gradient of their own tokens."""


def share_averaged(border, parameter, label):
    parameter.register_hook(lambda grad: border.comm.all_reduce(grad.clone(), op="mean"))


def share_after(border, parameter, label):
    """Sums what has accumulated, again with each micro-batch."""

    def again(parameter):
        border.comm.all_reduce(parameter.grad)

    parameter.register_post_accumulate_grad_hook(again)


def heads_not_shared(each, left, x, weight_grads=entry._weight_grads):
    each.shared = [None] * len(each.shared)
    return weight_grads(each, left, x)


def stale_gather(each, x):
    """Weight gradients from this rank's tokens, as often as there are ranks, instead of everyone's."""
    each._regathered = None
    return x[torch.arange(sum(each.sizes)) % len(x)]


FAULTS = {
    "copy without its all-reduce": ("sharded.entry.Entry.start_sum", lambda each, grad: NoSum(grad), "plain"),
    "reduce that is summed going back": ("sharded.layers.reduce_", torch_reduce, "plain"),
    "norms keep their own tokens' gradient": ("sharded.layers.Border.sum_grad", share_kept, "sequence"),
    "norms average": ("sharded.layers.Border.sum_grad", share_averaged, "sequence"),
    "norms sum what was summed": ("sharded.layers.Border.sum_grad", share_after, "sequence"),
    "own tokens in place of all": ("sharded.entry.Entry.tokens", stale_gather, "sequence"),
    "shared heads not summed": ("sharded.entry._weight_grads", heads_not_shared, "one key head"),
}


def faulty(world, tp):
    found = {}
    for name, (target, wrong, case) in FAULTS.items():
        with mock.patch(f"minidist.{target}", wrong):
            config, _, *options = CASES[case]
            found[name] = train(world, config, tp, *options)
    return found


def test_faults_in_gradients_are_seen(references):
    everywhere = md.launch(faulty, ranks=2, args=(2,), timeout=300)
    for name, (_, _, case) in FAULTS.items():
        assert max(distance(found[name], references[CASES[case][0]]) for found in everywhere) > 1e-6, name
