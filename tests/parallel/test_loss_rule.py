"""token_loss: the sum of token losses over the valid tokens of the global batch, however the batch is spread."""

import pytest
import torch
import torch.nn.functional as F

import minidist as md

VOCAB = 5


def logits_for(losses):
    """logits: [tokens, VOCAB], targets: [tokens]: token i has the cross-entropy losses[i], None one that is ignored."""
    logits = torch.zeros(len(losses), VOCAB, dtype=torch.float64)
    for row, loss in zip(logits, losses, strict=True):
        if loss is not None:  # -log(e^a / (e^a + VOCAB - 1)) = loss
            row[1] = torch.log((VOCAB - 1) / torch.expm1(torch.tensor(float(loss), dtype=torch.float64)))
    targets = torch.tensor([-100 if loss is None else 1 for loss in losses])
    return logits.requires_grad_(), targets


def mean_over_ranks(world, loss):
    return world.all_reduce(loss.detach().clone(), op="mean").item()


def mean_of_means(logits, targets, world):
    return F.cross_entropy(logits, targets)


def one_call(world, loss=md.token_loss):
    """One valid token of loss 4 on rank 0, three of loss 2 on rank 1; padding on both."""
    return mean_over_ranks(world, loss(*logits_for([[None, 4, None], [2, 2, 2, None]][world.rank]), world))


def two_micro_batches(world):
    """Counts 1 and 3, then 2 and 2; sums 4 and 6, then 2 and 8."""
    micro_batches = [logits_for(losses) for losses in [([4], [2, 2, 2]), ([1, 1], [4, 4])][world.rank]]
    tokens = md.global_tokens([targets for _, targets in micro_batches], world)
    total = sum(md.token_loss(*batch, world, tokens=tokens) for batch in micro_batches)
    return mean_over_ranks(world, total), int(tokens)


def nothing_valid(world):
    """All of rank 0's targets are ignored: it adds 0, and zero gradients. Then nobody has one."""
    logits, targets = logits_for([[None, None], [2, 4]][world.rank])
    loss = md.token_loss(logits, targets, world)
    loss.backward()
    nobody = md.token_loss(*logits_for([None, None]), world)
    return mean_over_ranks(world, loss), loss.item(), logits.grad.abs().sum().item(), nobody.item()


def gradient(world):
    """The average of the gradients is the rule's gradient: softmax minus one-hot over the number of valid tokens."""
    logits, targets = logits_for([[None, 4, None], [2, 2, 2, None]][world.rank])
    md.token_loss(logits, targets, world).backward()
    valid = (targets != -100)[:, None]
    expected = (logits.softmax(-1) - F.one_hot(targets.clamp(min=0), VOCAB)) * valid / 4
    return (logits.grad / world.size - expected).abs().max().item()


def rules(world):
    half = logits_for([2, 4])
    shaped = md.token_loss(half[0].view(1, 2, VOCAB), half[1].view(1, 2), world)  # [B, S, V]
    low = md.token_loss(half[0].bfloat16(), half[1], world)
    return {
        "one call": one_call(world),
        "mean of means": one_call(world, mean_of_means),
        "micro-batches": two_micro_batches(world),
        "nothing valid": nothing_valid(world),
        "gradient": gradient(world),
        "shaped": shaped.item(),
        "bfloat16": (low.dtype, low.item()),
    }


def assert_rule(loss):
    assert loss == pytest.approx(2.5, abs=1e-12)


def test_loss_is_over_the_tokens_of_all_ranks():
    for rank, found in enumerate(md.launch(rules, ranks=2)):
        assert_rule(found["one call"])
        with pytest.raises(AssertionError):
            assert_rule(found["mean of means"])
        assert_rule(found["micro-batches"][0])
        assert found["micro-batches"][1] == 8
        mean, mine, gradients, nobody = found["nothing valid"]
        assert mean == pytest.approx(3)
        assert nobody == 0
        assert (mine == 0 and gradients == 0) if rank == 0 else (mine == pytest.approx(6) and gradients > 0)
        assert found["gradient"] <= 1e-12
        assert found["shaped"] == pytest.approx(3)
        assert found["bfloat16"] == (torch.float32, pytest.approx(3, rel=0.02))


def test_targets_that_do_not_fit_are_refused(solo):
    logits, targets = logits_for([1, 2])
    with pytest.raises(TypeError, match=r"targets\.long"):
        md.token_loss(logits, targets.int(), solo)
    with pytest.raises(ValueError, match=r"\[2, 5\].*\[1\]"):
        md.token_loss(logits, targets[:1], solo)
    with pytest.raises(IndexError, match="out of bounds"):
        md.token_loss(logits, targets + VOCAB, solo)
