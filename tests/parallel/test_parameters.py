"""Every kind of parameter and every kind of backward pass: unused, frozen, reused, mixed types, views, one that raises.

Each case runs on two ranks with different data and returns how far its gradients are from the mean of the two ranks'
gradients computed alone, or what else it promises.
"""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.parallel import data


def inputs(rank):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)).double()


def alone(make, loss, ranks=2):
    """The mean over ranks of the gradients each computes alone, without any of our code; None counts as zero."""
    total = {}
    for rank in range(ranks):
        module = make()
        loss(module, inputs(rank), rank).backward()
        for name, p in module.named_parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            total[name] = total.get(name, 0) + grad / ranks
    return total


def distance(module, expected):
    return max(
        ((0 if p.grad is None else p.grad) - expected[name]).abs().max().item() for name, p in module.named_parameters()
    )


def compare(world, make, loss, **options):
    replica = md.DataParallel(make(), world, **options)
    loss(replica, inputs(world.rank), world.rank).backward()
    return distance(replica, alone(make, loss))


# ---- modules ---------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers of one shape, taken in the order given; and a third that is never taken."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.never = (nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x, order="ab"):
        for name in order:
            x = getattr(self, name)(x).tanh()
        return x


def other_branch(replica, x, rank):
    """Rank 0 takes a and rank 1 takes b."""
    return replica(x, "ab"[rank]).sum()


def other_order(replica, x, rank):
    """Both take both, the one in the other order: so the gradients are ready in another order."""
    return replica(x, ["ab", "ba"][rank]).sum()


def reused(replica, x, rank):
    return replica(x, "aab").sum()


def penalty(replica, x, rank):
    """A loss made of a gradient."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(replica(x).sum(), x, create_graph=True)
    return slope.square().sum()


def unused(world):
    """Gradients, what becomes of the layer nobody takes, and torch's answer to the same."""
    replica = md.DataParallel(Branches(), world, bucket_mb=1e-6)
    other_branch(replica, inputs(world.rank), world.rank).backward()
    theirs = DistributedDataParallel(Branches(), find_unused_parameters=True)
    other_branch(theirs, inputs(world.rank), world.rank).backward()
    nones = [[name for name, p in m.named_parameters() if p.grad is None] for m in (replica.module, theirs.module)]
    before = replica.module.never.weight.clone()
    torch.optim.AdamW(replica.parameters(), lr=0.1, weight_decay=0.5).step()
    replica.check_replicas()
    return nones, torch.equal(before, replica.module.never.weight)


def zero_is_a_gradient(world):
    """Rank 0's gradient of `a` is zero, of both signs, and rank 1 has none: both get zeros, not None."""
    replica = md.DataParallel(Branches(), world)
    out = replica(inputs(world.rank), "ab"[world.rank])
    (out * (-0.0 if world.rank == 0 else 1.0)).sum().backward()
    a, b, never = (getattr(replica.module, name).weight.grad for name in ("a", "b", "never"))
    return bool((a == 0).all()), bool((b != 0).any()), never


def frozen(world):
    def make():
        module = Branches()
        module.a.requires_grad_(False)
        return module

    loss = lambda replica, x, rank: replica(x).sum()
    replica = md.DataParallel(make(), world)
    loss(replica, inputs(world.rank), 0).backward()
    replica.module.b.bias.requires_grad_(False)  # freezing one later
    replica.zero_grad()
    loss(replica, inputs(world.rank), 0).backward()
    late = replica.module.b.bias.grad
    replica.module.b.bias.requires_grad_(True)
    replica.zero_grad()
    loss(replica, inputs(world.rank), 0).backward()
    found = distance(replica, alone(make, loss))
    untouched = replica.module.a.weight.grad
    replica.module.a.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"a\.weight, a\.bias.*wrap the module again"):
        replica(inputs(0))
    replica.module.a = nn.Identity()
    replica.module.b.weight = nn.Parameter(replica.module.b.weight.detach())
    with pytest.raises(RuntimeError, match=r"^b\.weight: .*wrap the module again"):
        replica(inputs(0))
    return found, untouched, late


def mixed_types(world):
    module = nn.ModuleList(nn.Linear(3, 3, dtype=t) for t in [torch.float32, torch.bfloat16, torch.float64] * 2)
    replica = md.DataParallel(module, world)
    for layer in module:
        (layer(inputs(0).to(layer.weight.dtype)) * (world.rank + 1)).sum().backward()
    sums = [(p.grad.dtype, p.grad.double().sum().item()) for p in module.parameters()]
    ones = [p.grad for name, p in module.named_parameters() if name.endswith("bias")]
    return len(replica._buckets), sums, [g.tolist() for g in ones]


def memory_orders(world):
    """A channels-last convolution, a transposed and an expanded-over-nothing weight: values and strides."""
    conv = nn.Conv2d(3, 4, 2).double().to(memory_format=torch.channels_last)
    conv.turned = nn.Parameter(torch.ones(3, 5).double().t())
    conv.scalar = nn.Parameter(torch.ones(()).double())
    conv.empty = nn.Parameter(torch.ones(0).double())
    replica = md.DataParallel(conv, world)
    image = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(world.rank)).double()
    for _ in range(2):
        (replica(image).sum() + (conv.turned * torch.arange(3) * (world.rank + 1)).sum() * conv.scalar).backward()
        strides = [p.grad.stride() == p.stride() for p in (conv.weight, conv.turned)]
        turned, grads = conv.turned.grad.clone(), conv.weight.grad.clone()
        conv.zero_grad()
    return strides, (turned - 1.5 * torch.arange(3)).abs().max().item(), grads


# ---- backward passes -------------------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in the middle of the backward pass")


def failed_backward(world):
    """The backward pass raises, after more buckets on one rank than on the other; the next step is right."""
    replica = md.DataParallel(Branches(), world, bucket_mb=1e-6)
    x = inputs(world.rank)
    hidden = replica.module.a(x)
    hidden = Raises.apply(hidden) if world.rank == 0 else hidden
    out = replica.module.b(hidden)
    out = Raises.apply(out.tanh()).tanh() if world.rank == 1 else out
    with pytest.raises(ArithmeticError):
        (out.sum() + replica.module.never(x).sum()).backward()
    before = replica.synced
    loss = lambda replica, x, rank: replica(x).sum()
    loss(replica, x, 0).backward()
    return distance(replica, alone(Branches, loss)), before, replica.synced


def reentrant(world):
    """Reentrant checkpoints run backward passes inside the backward pass.

    Where they come first each averages for itself; where a parameter would get two gradients in one, it is refused.
    """

    def twice(module, x):
        return sum(checkpoint(module, x, use_reentrant=True).square().sum() for _ in range(2))

    def before(replica, x, rank):
        a, b = (getattr(replica, "module", replica).get_submodule(name) for name in "ab")
        return b(x).sum() + twice(a, x.requires_grad_())

    def plain(replica, x, rank):
        return checkpoint(replica, x, use_reentrant=False).sum()

    replica = md.DataParallel(Branches(), world)
    x = inputs(world.rank).requires_grad_()
    loss = twice(replica.module.a, x) + replica.module.b(x).sum()
    with pytest.raises(RuntimeError, match=r"a\.(weight|bias).*use_reentrant=False"):
        loss.backward()
    return max(compare(world, Branches, before), compare(world, Branches, plain))


def rewrapped(world):
    """A wrapper that is gone no longer averages; buckets hold the gradients, and nothing else is sent."""
    module = Branches()
    replica = md.DataParallel(module, world)
    replica = md.DataParallel(module, world, bucket_mb=1e-6)
    world.recorder.clear()
    replica(inputs(world.rank)).sum().backward()
    sent = sum(call.nbytes for call in world.recorder.calls) == sum(p.nbytes for p in module.parameters())
    inside = all(
        p.grad._base is bucket.flat for bucket in replica._buckets for p in bucket.parameters if p.grad is not None
    )
    del replica
    world.recorder.clear()
    module(inputs(world.rank)).sum().backward()
    return sent, inside, len(world.recorder.calls)


# ---- faults ----------------------------------------------------------------------------------------------------------


def launch_as_they_fill(replica):
    """Sends in the order in which buckets fill."""
    for bucket in replica._buckets:
        if not bucket.waiting and bucket.handle is None:
            bucket.launch(replica.comm)


def readiness_order(world):
    with mock.patch.object(md.DataParallel, "_launch_full_buckets", launch_as_they_fill):
        return compare(world, Branches, other_order, bucket_mb=1e-6)


def no_zeros_for_unused(world):
    """Waits for the gradients that came."""

    def make():
        module = Branches()
        del module.never
        return module

    with mock.patch.object(
        md.DataParallel, "_finish", lambda replica: [b.wait() for b in replica._buckets if b.handle]
    ):
        return compare(world, make, other_branch, bucket_mb=1e-6)


def zeros_for_unused(world):
    """Sends 0 where it should send "nothing": then an optimizer moves what nobody used."""
    with mock.patch.object(data, "UNUSED", 0.0):
        return unused(world)


# ---- all of it ------------------------------------------------------------------------------------------------------


def cases(world):
    one_each = {"bucket_mb": 1e-6}
    return {
        "other branch": compare(world, Branches, other_branch, **one_each),
        "other order": compare(world, Branches, other_order, **one_each),
        "reused": compare(world, Branches, reused),
        "penalty": compare(world, Branches, penalty, **one_each),
        "unused": unused(world),
        "zero": zero_is_a_gradient(world),
        "frozen": frozen(world),
        "mixed types": mixed_types(world),
        "memory orders": memory_orders(world),
        "failed backward": failed_backward(world),
        "reentrant": reentrant(world),
        "rewrapped": rewrapped(world),
        "fault: readiness order": readiness_order(world),
        "fault: zeros for unused": zeros_for_unused(world),
    }


@pytest.fixture(scope="module")
def everywhere():
    return md.launch(cases, ranks=2)


@pytest.mark.parametrize("name", ["other branch", "other order", "reused", "penalty", "reentrant"])
def test_gradients_are_the_mean_over_ranks(everywhere, name):
    assert all(found[name] <= 1e-12 for found in everywhere)


def test_a_layer_that_no_rank_uses_keeps_no_gradient(everywhere):
    for found in everywhere:
        (ours, theirs), unchanged = found["unused"]
        assert ours == theirs == ["never.weight", "never.bias"]
        assert unchanged
        assert found["zero"] == (True, True, None)


def test_frozen_parameters(everywhere):
    assert all(found["frozen"] == (pytest.approx(0, abs=1e-12), None, None) for found in everywhere)


def test_types_do_not_share_a_bucket(everywhere):
    for buckets, sums, biases in (found["mixed types"] for found in everywhere):
        assert buckets == 3
        assert [dtype for dtype, _ in sums[::2]] == [torch.float32, torch.bfloat16, torch.float64] * 2
        assert all(bias == [7.5] * 3 for bias in biases)  # 5 rows x (1 + 2) / 2
    assert everywhere[0]["mixed types"] == everywhere[1]["mixed types"]


def test_gradients_have_the_memory_order_of_their_parameters(everywhere):
    a, b = (found["memory orders"] for found in everywhere)
    assert a[:2] == b[:2] == ([True, True], 0)
    assert torch.equal(a[2], b[2])


def test_a_backward_pass_that_raises_leaves_the_wrapper_usable(everywhere):
    for found in everywhere:
        assert found["failed backward"] == (pytest.approx(0, abs=1e-12), False, True)


def test_the_last_wrapper_alone_averages(everywhere):
    assert all(found["rewrapped"] == (True, True, 0) for found in everywhere)


def test_buckets_sent_as_they_fill_pair_the_wrong_gradients(everywhere):
    assert min(found["fault: readiness order"] for found in everywhere) > 1e-3


def test_unused_parameters_that_are_not_sent_leave_the_others_waiting():
    with pytest.raises(md.LaunchError) as stuck:
        md.launch(no_zeros_for_unused, ranks=2, timeout=20)
    assert stuck.value.verdict == "deadlock"


def test_zeros_for_unused_parameters_are_seen(everywhere):
    for (ours, theirs), unchanged in (found["fault: zeros for unused"] for found in everywhere):
        assert ours == []
        assert len(theirs) == 2
        assert not unchanged


# ---- refused before anything is sent ---------------------------------------------------------------------------------


def test_what_cannot_be_wrapped_is_refused(solo):
    with pytest.raises(ValueError, match="nothing to average"):
        md.DataParallel(nn.ReLU(), solo)
    with pytest.raises(ValueError, match="nothing to average"):
        md.DataParallel(nn.Linear(2, 2).requires_grad_(False), solo)
    with pytest.raises(ValueError, match="bucket_mb=0"):
        md.DataParallel(nn.Linear(2, 2), solo, bucket_mb=0)


def test_sparse_gradients_are_refused(solo):
    rows = nn.Embedding(4, 2, sparse=True)
    rows(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="weight has a sparse gradient"):
        md.average_gradients(rows, solo)
    rows.zero_grad()
    replica = md.DataParallel(rows, solo)
    with pytest.raises(TypeError, match="weight has a sparse gradient"):
        replica(torch.tensor([1])).sum().backward()


def test_buckets_fill_from_the_last_parameter():
    layers = nn.ModuleList([nn.Linear(100, 100, bias=False) for _ in range(6)])  # 40 kB each
    named = dict(layers.named_parameters())
    sizes = lambda mb: [b.names for b in data.make_buckets(named, mb)]
    assert sizes(0.08) == [["5.weight", "4.weight"], ["3.weight", "2.weight"], ["1.weight", "0.weight"]]
    assert sizes(1e-9) == [[f"{i}.weight"] for i in reversed(range(6))]
    assert len(sizes(25)) == 1
    with mock.patch.object(data, "FIRST_BUCKET_MB", 0.04):
        assert [len(names) for names in sizes(25)] == [1, 5]
