"""What a pipeline does besides the gradients: a GPT's stages, batches of any size, evaluation, memory, refusals."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist.schedule import build
from minidist.staged import backward, mail
from minidist.staged.mail import Kind

CONFIG = md.GPTConfig(layers=4, dim=16, heads=2, seq=8, vocab=24, tie=True)
mean = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def text(rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, CONFIG.vocab, (2, rows, CONFIG.seq), generator=draw)
    targets[torch.arange(CONFIG.seq) > 0.9 * torch.arange(rows, 0, -1)[:, None]] = -100
    return tokens, targets


def pipelined(world, program, gpt, costs=None):
    stages = md.split_stages(gpt, program.stages, costs)
    mine = [stages[s] for s in program.stages_of(world.rank)]
    return md.PipelineParallel(mine, program, world, mean)


# ---- a GPT -----------------------------------------------------------------------------------------------------------


def gpt_steps(world, name, v):
    """Losses and this rank's weights after SGD on batches of several sizes, two of them to a step."""
    program = build(name, world.size, 4, v)
    gpt = md.GPT(CONFIG, seed=0).double()
    pipe = pipelined(world, program, gpt, costs=[1, 2, 2, 1] if v == 1 else None)
    own = {n: p for stage in pipe.stages.values() for n, p in stage.named_parameters()}
    losses = []
    for step in range(3):
        batches = [text(4 + step, seed=2 * step), text(7, seed=2 * step + 1)]
        tokens = sum(int((targets != -100).sum()) for _, targets in batches)
        losses += [pipe.step(*batch, tokens=tokens) for batch in batches]
        losses.append(pipe.evaluate(*batches[0]))
        with torch.no_grad():
            for p in set(own.values()):
                p -= 0.5 * p.grad
                p.grad = None
    return losses, {n: p.detach() for n, p in own.items()}


def one_process():
    gpt, losses = md.GPT(CONFIG, seed=0).double(), []
    for step in range(3):
        batches = [text(4 + step, seed=2 * step), text(7, seed=2 * step + 1)]
        total = sum(int((targets != -100).sum()) for _, targets in batches)
        for tokens, targets in batches:
            share = int((targets != -100).sum()) / total
            loss = mean(gpt(tokens), targets) * share
            loss.backward()
            losses.append(loss.item())
        losses.append(mean(gpt(batches[0][0]), batches[0][1]).item())
        with torch.no_grad():
            for p in gpt.parameters():
                p -= 0.5 * p.grad
                p.grad = None
    return losses, dict(gpt.state_dict())


@pytest.mark.parametrize(
    ("ranks", "name", "v"), [(1, "gpipe", 1), (2, "zb_h1", 1), (2, "zb_v", 2), (2, "interleaved", 2)]
)
def test_a_gpt_with_a_tied_head_trains_as_in_one_process(ranks, name, v):
    losses, weights = one_process()
    found = {}
    for got, own in md.launch(gpt_steps, ranks=ranks, args=(name, v), timeout=60):
        assert got == pytest.approx(losses, abs=1e-12)
        found |= own
    assert {"head.weight", *found} == set(weights)
    for n, value in found.items():
        torch.testing.assert_close(value, weights[n], rtol=0, atol=1e-12)


def test_stages_keep_names_and_numbers():
    gpt = md.GPT(CONFIG, seed=0)
    stages = md.split_stages(gpt, 3)
    assert [list(stage.blocks) for stage in stages] == [["0", "1"], ["2"], ["3"]]
    tokens, _ = text(2)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, gpt(tokens))
    assert {n for stage in stages for n, _ in stage.named_parameters()} >= {"blocks.2.attn.q.weight", "norm.weight"}
    with pytest.raises(ValueError, match="4 layers make at most 4 stages, not 5"):
        md.split_stages(gpt, 5)
    with pytest.raises(ValueError, match="3 costs for 4 blocks"):
        md.split_stages(gpt, 2, costs=[1, 2, 3])


# ---- batches that do not divide (C22) --------------------------------------------------------------------------------


def mean_of_values(world, rows, microbatches):
    """The loss of values 0 .. rows-1, which is their mean however they are cut."""
    program = build("gpipe", world.size, microbatches)
    pipe = md.PipelineParallel([nn.Identity()], program, world, lambda out, target: (out * target).mean())
    values = torch.arange(rows, dtype=torch.float64)[:, None].requires_grad_()
    return pipe.step(values, torch.ones(rows, 1, dtype=torch.float64))


@pytest.mark.parametrize(("rows", "microbatches"), [(8, 3), (5, 4), (8, 8)])
def test_micro_batches_of_different_sizes(rows, microbatches):
    assert md.launch(mean_of_values, ranks=2, args=(rows, microbatches)) == [(rows - 1) / 2] * 2


def test_too_few_rows_are_refused():
    with pytest.raises(md.LaunchError, match="2 rows do not make 3 micro-batches"):
        md.launch(mean_of_values, ranks=1, args=(2, 3))


def test_a_micro_batch_without_targets_counts_nothing():
    losses = md.launch(no_targets_in_one, ranks=2)
    assert losses[0] == losses[1] == pytest.approx(losses_in_one_process())


def no_targets_in_one(world):
    tokens, targets = text(4)
    targets[:1] = -100
    pipe = pipelined(world, build("1f1b", world.size, 4), md.GPT(CONFIG, seed=0).double())
    loss = pipe.step(tokens, targets)
    assert all(p.grad is None or p.grad.isfinite().all() for s in pipe.stages.values() for p in s.parameters())
    return loss


def losses_in_one_process():
    tokens, targets = text(4)
    targets[:1] = -100
    return mean(md.GPT(CONFIG, seed=0).double()(tokens), targets).item()


# ---- what a step costs -----------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_split_backward_computes_each_product_once():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    x = torch.rand(2, 4, requires_grad=True)
    with Products() as first:
        grads, rest = backward.input_gradient([layers(x)], [torch.ones(2, 4)], [x])
    with Products() as second:
        rest.run()
    assert (first.count, second.count) == (3 + 3, 3)  # forward and input gradient; weight gradient
    halves = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    whole = backward.backward([layers(x)], [torch.ones(2, 4)], [x])
    torch.testing.assert_close([*grads, *halves], [*whole, *(p.grad for p in layers.parameters())])


def test_what_a_function_in_python_computes_is_taken_at_once():
    class Scale(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            Scale.calls += 1
            return grad * w, (grad * x).sum(0)

    w, x = torch.rand(4, requires_grad=True), torch.rand(2, 4, requires_grad=True)
    grads, rest = backward.input_gradient([Scale.apply(x, w)], [torch.ones(2, 4)], [x])
    rest.run()
    assert Scale.calls == 1
    torch.testing.assert_close([*grads, w.grad], [w.expand(2, 4), x.detach().sum(0)])


class Saved:
    """A tensor that autograd keeps, and in which forward pass it was put there."""

    def __init__(self, tensor, number):
        self.tensor, self.number = tensor, number


def alive_after_each(world, name):
    """The most forward passes of which something was kept at one time, and how much is left at the end."""
    program = build(name, world.size, 6)
    pipe = pipelined(world, program, md.GPT(CONFIG, seed=0))
    kept, outputs, passes, most = weakref.WeakSet(), weakref.WeakSet(), [0], [0]

    def count(module, args):
        passes[0] += 1

    def look(module, args, out):
        outputs.add(out)
        most[0] = max(most[0], len({saved.number for saved in kept}), len(outputs))

    def pack(tensor):
        kept.add(saved := Saved(tensor, passes[0]))
        return saved

    for stage in pipe.stages.values():
        stage.register_forward_pre_hook(count)
        stage.register_forward_hook(look)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        pipe.step(*text(6))
    return most[0], len(kept) + len(outputs), pipe.timeline.peak_in_flight[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_activations_are_freed_when_nobody_reads_them_any_more(name):
    for rank, (most, left, peak) in enumerate(md.launch(alive_after_each, ranks=2, args=(name,))):
        assert peak == md.schedule.simulate(build(name, 2, 6)).peak_in_flight[rank]
        assert most == peak
        assert left == 0


# ---- what cannot work ------------------------------------------------------------------------------------------------


def refused(world, fault):
    program = build("1f1b", 2, 2)
    stages = [nn.Identity()]
    if fault == "ranks":
        program = build("1f1b", 3, 2)
    if fault == "stages":
        stages = [nn.Identity()] * 2
    if fault == "program":
        program = md.schedule.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    pipe = md.PipelineParallel(stages, program, world, lambda out, target: out.mean())
    data = torch.ones(2, 1, requires_grad=True)
    pipe.step(None if fault == "inputs" else data, None if fault == "targets" else data)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("ranks", "a program for 3 ranks, and this Comm has 2"),
        ("stages", r"has stages \[[01]\] in this program: pass 1 modules, not 2"),
        ("program", "this program cannot go on"),
        ("inputs", "rank 0 has the first stage: pass the inputs"),
        ("targets", "rank 1 has the last stage: pass the targets"),
    ],
)
def test_what_cannot_work_says_what_to_change(fault, words):
    with pytest.raises(md.LaunchError, match=words):
        md.launch(refused, ranks=2, args=(fault,), timeout=20)


def test_letters_say_what_comes():
    kinds = [Kind(torch.float64, (2, 3), True), Kind(torch.int64, (), False), Kind(torch.bool, (0, 4), False)]
    assert mail.read_letter(mail.write_letter(kinds)) == tuple(kinds)
    with pytest.raises(ValueError, match="at most 16 tensors of at most 8 dims"):
        mail.write_letter(kinds * 6)
