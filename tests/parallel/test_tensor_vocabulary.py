"""The loss from logits that are cut along the vocabulary: dense's value and gradient, and no logit ever travels."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import minidist as md
from minidist import loss

V, T = 6, 7


def dense_logits():
    return 4 * torch.randn(T, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


TARGETS = torch.tensor([0, 5, -100, 2, 3, -100, 5])


def slices(logits, world):
    """This rank's columns, filled up with -inf: as many on every rank."""
    width = -(-logits.shape[-1] // world.size)
    return F.pad(logits, (0, width * world.size - logits.shape[-1]), value=-torch.inf).chunk(world.size, -1)[world.rank]


def against_dense(world, v=V):
    """Largest difference of losses and of gradients, for the first v words."""
    whole = dense_logits()[:, :v]
    targets = TARGETS.clamp(max=v - 1)
    mine, dense = slices(whole, world).clone().requires_grad_(), whole.clone().requires_grad_()
    losses = md.vocab_parallel_cross_entropy(mine, targets, world)
    expected = F.cross_entropy(dense, targets, reduction="none")
    weight = torch.arange(1.0, T + 1)
    (losses * weight).sum().backward()
    (expected * weight).sum().backward()
    grads = F.pad(dense.grad, (0, mine.shape[-1] * world.size - v)).chunk(world.size, -1)[world.rank]
    return max((losses - expected).abs().max().item(), (mine.grad - grads).abs().max().item())


def value(world, logits, target, pad=-torch.inf):
    logits = torch.tensor([logits])
    logits = F.pad(logits, (0, -logits.shape[-1] % world.size), value=pad)
    return md.vocab_parallel_cross_entropy(
        logits.chunk(world.size, -1)[world.rank], torch.tensor([target]), world
    ).item()


def no_maximum(scores, comm):
    return torch.zeros(len(scores), dtype=scores.dtype)


def local_maximum(scores, comm):
    return scores.amax(-1)


def traffic(world):
    """Bytes a rank sends for the loss of T tokens and any vocabulary: three numbers a token and two more."""
    sent = []
    for v in (2 * world.size, 500 * world.size):
        world.recorder.clear()
        logits = torch.zeros(T, v // world.size, requires_grad=True)
        md.vocab_parallel_cross_entropy(logits, TARGETS.clamp(max=1), world).sum().backward()
        sent.append([(call.op, call.nbytes) for call in world.recorder.calls])
    return sent


def half_precision(world):
    logits = slices(dense_logits(), world).bfloat16().requires_grad_()
    losses = md.vocab_parallel_cross_entropy(logits, TARGETS, world)
    losses.sum().backward()
    return losses.dtype, logits.grad.dtype


def token_losses(world):
    """`token_loss` with and without tp, with two ranks on each axis: what dp ranks average."""
    mesh = md.Mesh({"dp": 2, "tp": 2}, world)
    dp, tp = mesh["dp"], mesh["tp"]
    rows = slice(0, 3) if dp.rank == 0 else slice(3, T)
    whole = dense_logits()[rows]
    cut = slices(whole, tp)
    return [md.token_loss(cut, TARGETS[rows], dp, tp=tp), md.token_loss(whole, TARGETS[rows], dp)]


def everything(world):
    found = {f"{v} words": against_dense(world, v) for v in (2, 3, 5, 6)}
    tenths = [0.1, 0.2, 0.3, 0.4, 0.5]
    found |= {
        "oracle": value(world, tenths, 4),
        "fault: padding left at 0": value(world, tenths, 4, pad=0.0),
        "large": value(world, [1000.0, 1001.0, 1002.0, 1003.0, 1004.0], 4),
        "traffic": traffic(world),
        "half": half_precision(world),
    }
    with mock.patch.object(loss, "_largest", no_maximum):
        found["fault: no maximum"] = value(world, [1000.0, 1001.0, 1002.0, 1003.0, 1004.0], 4)
    with mock.patch.object(loss, "_largest", local_maximum):
        found["fault: each its own maximum"] = value(world, tenths, 4)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_dense(ranks):
    for found in md.launch(everything, ranks=ranks):
        assert all(found[f"{v} words"] <= 1e-12 for v in (2, 3, 5, 6)), found
        assert found["oracle"] == pytest.approx(1.419416, abs=1e-6)
        assert found["large"] == pytest.approx(0.4519, abs=1e-4)
        assert found["half"] == (torch.float32, torch.bfloat16)
        few, many = found["traffic"]
        assert few == many == [("all_reduce", 4 * (T + 2)), ("all_reduce", 8 * T)]
        if ranks == 2:
            assert found["fault: padding left at 0"] == pytest.approx(1.556298, abs=1e-6)
            assert found["fault: each its own maximum"] != pytest.approx(1.419416, abs=1e-3)
        assert not torch.isfinite(torch.tensor(found["fault: no maximum"]))


def test_the_scaling_rule_is_that_of_token_loss():
    for cut, whole in md.launch(token_losses, ranks=4):
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-12)


def refused(world):
    words = []
    for logits, targets in (
        (torch.zeros(2, 3), torch.tensor([0, 6])),
        (torch.zeros(2, 3), torch.tensor([0, -1])),
        (torch.zeros(2, 3), torch.tensor([0, 1], dtype=torch.int32)),
        (torch.zeros(2, 3), torch.tensor([0])),
        (torch.zeros(2, 3 - world.rank), torch.tensor([0, 1])),
    ):
        try:
            md.vocab_parallel_cross_entropy(logits, targets, world)
            words.append("nothing")
        except (TypeError, ValueError) as error:
            words.append(str(error))
    return words


def test_what_does_not_fit_is_refused_on_every_rank():
    for found in md.launch(refused, ranks=2):
        for words, expected in zip(
            found, ("from 0 to 5", "from 0 to 5", "targets.long()", "shape of targets", "hold from 2 to 3"), strict=True
        ):
            assert expected in words
