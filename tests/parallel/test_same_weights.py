"""The same global batch gives the same weights on any number of ranks, and a schedule counts optimizer steps."""

import pytest
import torch

import minidist as md

CONFIG = md.GPTConfig(layers=1, dim=16, heads=2, vocab=32, seq=8)
SAMPLES, BATCH = 16, 4  # two ranks have a local batch of 2, and an epoch is 4 optimizer steps


def train(world, sgd, steps_a_step=1):
    """One epoch in float64 with SGD and a cosine that ends after 4 steps: weights, and the learning rates used."""
    draw = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(0, CONFIG.vocab, (2, SAMPLES // BATCH, BATCH, CONFIG.seq), generator=draw)
    targets[:, 0, 2:] = -100
    replica = md.DataParallel(md.GPT(CONFIG, seed=0).double(), world, bucket_mb=0.005)
    optimizer = sgd(replica.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=SAMPLES // BATCH)
    rates = []
    mine = md.partition(BATCH, world.size)[world.rank]
    for inputs, labels in zip(tokens, targets, strict=True):
        md.token_loss(replica(inputs[mine]), labels[mine], world).backward()
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(steps_a_step):
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
    replica.check_replicas()
    return [p.detach() for p in replica.parameters()], rates


def right_and_wrong(world, sgd):
    return train(world, sgd), train(world, sgd, steps_a_step=world.size)


def assert_same(found, reference):
    assert max((a - b).abs().max().item() for a, b in zip(found[0], reference[0], strict=True)) <= 1e-12
    assert found[1] == pytest.approx(reference[1])


@pytest.mark.parametrize(("ranks", "sgd"), [(2, torch.optim.SGD), (4, md.SGD)])
def test_weights_and_learning_rates_do_not_depend_on_the_ranks(solo, ranks, sgd):
    alone = train(solo, torch.optim.SGD)
    assert alone[1] == pytest.approx([0.5 * (1 + c) / 2 for c in (0.5**0.5, 0, -(0.5**0.5), -1)])
    for found, too_fast in md.launch(right_and_wrong, ranks=ranks, args=(sgd,)):
        assert_same(found, alone)
        with pytest.raises(AssertionError):  # a scheduler step for each rank
            assert_same(too_fast, alone)
