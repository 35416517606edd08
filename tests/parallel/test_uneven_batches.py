"""Ranks with different numbers of batches: those that are out of data contribute zeros."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minidist as md

COUNTS = [3, 2, 0]  # rank -> batches
WIDTH, CLASSES = 4, 5


def batches(rank):
    """inputs [rows, WIDTH], targets [rows]: another size, and another number of valid targets, every time."""
    draw = torch.Generator().manual_seed(rank)
    for step in range(COUNTS[rank]):
        rows = 2 + rank + step
        targets = torch.randint(0, CLASSES, (rows,), generator=draw)
        targets[:step] = -100
        yield torch.randn(rows, WIDTH, generator=draw).double(), targets


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def sgd(module):
    return md.SGD(module.parameters(), lr=0.3, momentum=0.9)


def one_process(ranks):
    """Step k on everything that step k has, wherever it lies."""
    module = model()
    optimizer = sgd(module)
    for k in range(max(COUNTS[:ranks])):
        step = [list(batches(rank))[k] for rank in range(ranks) if k < COUNTS[rank]]
        inputs, targets = (torch.cat(parts) for parts in zip(*step, strict=True))
        optimizer.zero_grad()
        (F.cross_entropy(module(inputs), targets, reduction="sum") / (targets != -100).sum()).backward()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


def train(world, follow=True):
    """A loop over this rank's own batches; then a metric, which must not meet the others' gradients."""
    replica = md.DataParallel(model(), world, bucket_mb=1e-6)
    optimizer = sgd(replica)
    with replica.join(step=optimizer.step if follow else None):
        for inputs, targets in batches(world.rank):
            optimizer.zero_grad()
            md.token_loss(replica(inputs), targets, world).backward()
            optimizer.step()
    metric = world.all_reduce(torch.tensor([1.0, 100.0, 10000.0][world.rank]))
    replica.check_replicas()
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in replica.parameters() if p in optimizer.state]
    return [p.detach() for p in replica.parameters()], metric.item(), momentum


def divisor(world):
    """A loss that is each rank's own: still divided by all ranks. In step 3 rank 0 has 6, the others zero."""
    weight = nn.Linear(1, 1, bias=False).double()
    replica = md.DataParallel(weight, world)
    grads = []
    with replica.join(step=lambda: grads.append(weight.weight.grad.item())):
        for k in range(COUNTS[world.rank]):
            replica.zero_grad()
            replica(torch.full((1, 1), 2.0 * (k + 1)).double()).sum().backward()
            grads.append(weight.weight.grad.item())
    return grads


def left_over(world):
    """Rank 1 ends inside an accumulation: what it gathered goes into the next step, then it is done."""
    weight = nn.Linear(1, 1, bias=False).double()
    replica = md.DataParallel(weight, world)
    grads = []
    with replica.join(step=lambda: grads.append(weight.weight.grad.item())):
        if world.rank == 1:
            with replica.no_sync():
                replica(torch.full((1, 1), 30.0).double()).sum().backward()
        if world.rank == 0:
            for _ in range(2):
                replica.zero_grad()
                replica(torch.full((1, 1), 3.0).double()).sum().backward()
                grads.append(weight.weight.grad.item())
    return grads


def statistics(world):
    """BatchNorm inside join: at the end all have those of the rank that ran longest."""
    replica = md.DataParallel(nn.BatchNorm1d(1, momentum=1.0).double(), world)
    with replica.join():
        for k in range([1, 2, 0][world.rank]):
            replica(torch.tensor([[1.0], [3.0]]).double() + 10 * k).square().sum().backward()
    return replica.module.running_mean.item()


def raises(world):
    """An exception leaves join without waiting for anybody."""
    replica = md.DataParallel(model(), world)
    try:
        with replica.join():
            raise KeyError("data")
    except KeyError:
        pass
    md.token_loss(replica(torch.ones(1, WIDTH).double()), torch.tensor([0]), world).backward()
    return replica.synced


def gradients_again(world):
    """A fault: ranks that are out of data contribute their last gradient again."""
    with mock.patch.object(md.DataParallel, "_contribute_nothing", lambda replica: replica._finish()):
        return train(world)


def cases(world):
    return {
        "trained": train(world),
        "without step": train(world, follow=False),
        "divisor": divisor(world),
        "left over": left_over(world),
        "statistics": statistics(world),
        "raises": raises(world),
        "fault: gradients again": gradients_again(world),
    }


def assert_trained(found, reference, ranks):
    weights, metric, _ = found
    assert max((a - b).abs().max().item() for a, b in zip(weights, reference, strict=True)) <= 1e-12
    assert metric == sum([1.0, 100.0, 10000.0][:ranks])


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_numbers_of_batches(ranks):
    everywhere = md.launch(cases, ranks=ranks, timeout=20)
    for found in everywhere:
        assert_trained(found["trained"], one_process(ranks), ranks)
        with pytest.raises(AssertionError):
            assert_trained(found["fault: gradients again"], one_process(ranks), ranks)
        assert_trained(found["without step"], one_process(ranks), ranks)
        assert found["statistics"] == 12
        assert found["raises"]
        assert found["left over"] == [(3 + 30) / ranks, 3 / ranks]
        expected = [2.0 * (k + 1) * sum(count > k for count in COUNTS[:ranks]) / ranks for k in range(3)]
        assert found["divisor"] == pytest.approx(expected)
        momentum = zip(found["trained"][2], everywhere[0]["trained"][2], strict=True)
        assert all(torch.equal(mine, first) for mine, first in momentum)


# ---- faults ----------------------------------------------------------------------------------------------------------


def without_join(world):
    """Rank 1 leaves its loop and reduces a metric while rank 0 reduces gradients."""
    replica = md.DataParallel(nn.Linear(1, 1, bias=False), world)
    for _ in range([3, 2][world.rank]):
        replica(torch.ones(1, 1)).sum().backward()
    return world.all_reduce(torch.tensor([[100.0]])).item()


def no_contribution(world):
    """Ranks that are out of data answer the roll, and send nothing."""
    with mock.patch.object(md.DataParallel, "_contribute_nothing", return_value=None):
        return train(world, follow=False)


@pytest.mark.parametrize("fault", [without_join, no_contribution])
def test_calls_that_do_not_belong_together_are_refused(fault):
    with pytest.raises(md.LaunchError, match="the calls differ; nothing was sent"):
        md.launch(fault, ranks=2, timeout=20)
