"""Data parallelism's gradients equal those of one process on the whole batch, and torch's DistributedDataParallel's.

Every case is a function of (world, module, rows) that leaves gradients in the module; `distance` compares them with one
process, and the faults that people make are cases too, for which the same comparison has to fail.
"""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import minidist as md
from minidist.parallel import data

CONFIG = md.GPTConfig(layers=2, dim=32, heads=2, seq=16, vocab=64, tie=True)
ROWS = 13  # divides by none of 2, 3, 4


def global_batch():
    """tokens, targets: [ROWS, 16]. The later a row, the fewer valid targets it has, so no two ranks have as many."""
    draw = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, CONFIG.vocab, (2, ROWS, CONFIG.seq), generator=draw)
    targets[torch.arange(CONFIG.seq) > 1.2 * torch.arange(ROWS, 0, -1)[:, None]] = -100
    return tokens, targets


def share(world):
    rows = md.partition(ROWS, world.size)[world.rank]
    tokens, targets = global_batch()
    return tokens[rows], targets[rows]


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def one_process():
    """The definition, in torch alone: sum of the token losses over the valid tokens of the whole batch."""
    module = md.GPT(CONFIG, seed=0).double()
    tokens, targets = global_batch()
    total = F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    (total / (targets != -100).sum()).backward()
    return gradients(module)


def distance(mine, reference):
    return max((mine[name] - reference[name]).abs().max().item() for name in reference)


# ---- ours ------------------------------------------------------------------------------------------------------------


def backward(world, module, tokens, targets):
    md.token_loss(module(tokens), targets, world).backward()


def naive(world, module, tokens, targets):
    backward(world, module, tokens, targets)
    md.average_gradients(module, world)


def parallel(**options):
    return lambda world, module, tokens, targets: backward(
        world, md.DataParallel(module, world, **options), tokens, targets
    )


def steps(set_to_none):
    """Several steps one after the other: gradients that were there before, as views or gone, leave no trace."""

    def case(world, module, tokens, targets):
        replica = md.DataParallel(module, world, bucket_mb=0.01)
        for _ in range(3):
            replica.zero_grad(set_to_none=set_to_none)
            backward(world, replica, tokens, targets)

    return case


def accumulated(world, module, tokens, targets):
    """Micro-batches of unlike size and token count, the last of them averaged."""
    replica = md.DataParallel(module, world, bucket_mb=0.01)
    pieces = list(zip(tokens.split([1, len(tokens) - 1]), targets.split([1, len(tokens) - 1]), strict=True))
    total = md.global_tokens([labels for _, labels in pieces], world)
    for last, (inputs, labels) in enumerate(pieces):
        if last:
            md.token_loss(replica(inputs), labels, world, tokens=total).backward()
        else:
            with replica.no_sync():
                md.token_loss(replica(inputs), labels, world, tokens=total).backward()


def backward_twice(world, module, tokens, targets):
    """Two averaged backward passes before the step: half of the loss each."""
    replica = md.DataParallel(module, world, bucket_mb=0.01)
    loss = md.token_loss(replica(tokens), targets, world) / 2
    loss.backward(retain_graph=True)
    loss.backward()


OURS = {
    "naive": naive,
    "buckets": parallel(overlap=False),
    "overlap": parallel(),
    "overlap, one parameter a bucket": parallel(bucket_mb=1e-6),
    "overlap, some parameters a bucket": parallel(bucket_mb=0.01),
    "zero_grad to None": steps(True),
    "zero_grad in place": steps(False),
    "accumulation": accumulated,
    "two backward passes": backward_twice,
}

# ---- faults ----------------------------------------------------------------------------------------------------------


def mean_of_means(world, module, tokens, targets):
    replica = md.DataParallel(module, world)
    F.cross_entropy(replica(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()


def scaled_by(power):
    """Divides by size^power: not at all, or twice."""

    def case(world, module, tokens, targets):
        deliver = data.Bucket.deliver
        wrong = lambda bucket, i, scale: deliver(bucket, i, scale**power)
        with mock.patch.object(data.Bucket, "deliver", wrong):
            parallel()(world, module, tokens, targets)

    return case


def parameters_summed(world, module, tokens, targets):
    """Reduces p where p.grad is meant."""
    backward(world, module, tokens, targets)
    for parameter in module.parameters():
        world.all_reduce(parameter.data)


def tied_twice(world, module, tokens, targets):
    """A bucket for each name instead of each parameter."""
    make = data.make_buckets
    both = lambda named, mb: make({"head.weight": named["embed.weight"], **named}, mb)
    with mock.patch.object(data, "make_buckets", both), mock.patch.object(data.Bucket, "expect_all", _forgive):
        parallel()(world, module, tokens, targets)


def _forgive(bucket):
    bucket.waiting, bucket.handle = set(range(len(bucket.parameters))), None


def grads_not_views(world, module, tokens, targets):
    """Averages the flat tensor, while the optimizer sees what it was copied from."""
    deliver = data.Bucket.deliver

    def wrong(bucket, i, scale):
        local = bucket.parameters[i].grad
        deliver(bucket, i, scale)
        bucket.parameters[i].grad = local

    with mock.patch.object(data.Bucket, "deliver", wrong):
        parallel()(world, module, tokens, targets)


def early(world, module, tokens, targets):
    """Averages before the backward pass is over: what came later is lost."""
    replica = md.DataParallel(module, world)
    with replica.no_sync():
        backward(world, replica, tokens, targets)


FAULTS = {
    "mean of means": mean_of_means,
    "no division": scaled_by(0),
    "double division": scaled_by(2),
    "parameters summed": parameters_summed,
    "tied counted twice": tied_twice,
    "grads are not views": grads_not_views,
    "never averaged": early,
}


def distances(world, reference, cases):
    found = {}
    for name, case in cases.items():
        module = md.GPT(CONFIG, seed=0).double()
        case(world, module, *share(world))
        found[name] = distance(gradients(module), reference)
    return found


def assert_close(found):
    assert all(value <= 1e-12 for value in found.values()), found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_equal_one_process(ranks):
    for found in md.launch(distances, ranks=ranks, args=(one_process(), OURS)):
        assert_close(found)


def test_faults_in_gradients_are_seen():
    everywhere = md.launch(distances, ranks=3, args=(one_process(), FAULTS))
    for name in FAULTS:
        with pytest.raises(AssertionError):
            assert_close({rank: found[name] for rank, found in enumerate(everywhere)})


# ---- torch's ---------------------------------------------------------------------------------------------------------


def three_steps(world, wrap):
    """Gradients of the last of three SGD steps in float32, and the weights after it."""
    module = md.GPT(CONFIG, seed=0)
    replica = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        backward(world, replica, *share(world))
        optimizer.step()
    return [t.detach().clone() for p in module.parameters() for t in (p.grad, p)]


def beside_torch(world):
    theirs = three_steps(world, DistributedDataParallel)
    ours = three_steps(world, lambda module: md.DataParallel(module, world, bucket_mb=0.01))
    relative = max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), relative


def test_same_bits_as_distributed_data_parallel_on_two_ranks():
    assert all(same for same, _ in md.launch(beside_torch, ranks=2))


def test_close_to_distributed_data_parallel_on_four_ranks():
    assert all(relative <= 1e-6 for _, relative in md.launch(beside_torch, ranks=4))
