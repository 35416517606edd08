"""Every schedule, run on real ranks, gives the gradients of the model in one piece, in float64.

A case is a program. The model has everything a stage may hand on: several tensors, whole numbers, a mask, rows that do
not divide into micro-batches, targets that do not count. The faults that people make are cases too, for which the same
comparison has to fail.
"""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import minidist as md
from minidist import schedule
from minidist.parallel import pipeline as module
from minidist.schedule import SCHEDULES, build
from minidist.staged.backward import Weights

D, VOCAB = 6, 11


class Layer(nn.Module):
    """[B, D], a mask and an embedding's numbers -> the same; a weight that is used twice, and one that is not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.scale, self.shift = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D))
        self.unused = nn.Parameter(torch.rand(D))

    def forward(self, x, mask, tokens):
        x = x + self.b(torch.tanh(self.a(x * self.scale))) * self.scale
        return x * mask[:, None] + self.shift.exp(), mask, tokens


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCAB, D), Layer()

    def forward(self, tokens, mask):
        return self.layer(self.embed(tokens).mean(1), mask, tokens)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(D, VOCAB, bias=False)

    def forward(self, x, mask, tokens):
        return self.head(self.layer(x, mask, tokens)[0])


def stages_of(count):
    """The model in `count` stages, float64; the head is tied to the embedding's values by whoever asks."""
    torch.manual_seed(0)
    if count == 1:
        return [Only().double()]
    return [First().double(), *(Layer().double() for _ in range(count - 2)), Last().double()]


class Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, D), Layer(), nn.Linear(D, VOCAB, bias=False)

    def forward(self, tokens, mask):
        return self.head(self.layer(self.embed(tokens).mean(1), mask, tokens)[0])


def batch(rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, 3), generator=draw)
    targets = torch.randint(0, VOCAB, (rows,), generator=draw)
    targets[torch.rand(rows, generator=draw) < 0.3] = -100
    targets[0] = 1
    return (tokens, torch.rand(rows, generator=draw, dtype=torch.float64)), targets


def one_process(count, rows, steps=2):
    """The definition: the loss and gradients of the model in one piece, after `steps` batches that add up."""
    parts, losses = stages_of(count), []
    parts[-1].head.weight.data.copy_(parts[0].embed.weight.data)
    for step in range(steps):
        x, targets = batch(rows, step)
        for part in parts:
            x = part(*x)
        loss = nn.functional.cross_entropy(x, targets, ignore_index=-100)
        loss.backward()
        losses.append(loss.item())
    ends = parts[0].embed.weight, parts[-1].head.weight
    total = ends[0].grad + ends[1].grad
    for end in ends:
        end.grad = total
    return losses, [[p.grad for p in part.parameters()] for part in parts]


def run(world, programs, rows, steps=2):
    """For each program: losses, this rank's gradients by stage, and the most in flight, measured and predicted."""
    torch.set_num_threads(1)
    results = []
    for program in programs:
        parts, mine = stages_of(program.stages), program.stages_of(world.rank)
        loss_fn = lambda out, targets: nn.functional.cross_entropy(out, targets, ignore_index=-100)
        tied = [("embed.weight", "head.weight")]
        pipe = md.PipelineParallel([parts[s] for s in mine], program, world, loss_fn, tied)
        losses = [
            pipe.step(*(batch(rows, step) if world.rank in (pipe.first, pipe.last) else (None, None)))
            for step in range(steps)
        ]
        flight = pipe.timeline.peak_in_flight[0], schedule.simulate(program).peak_in_flight[world.rank]
        results.append((losses, {s: [p.grad for p in parts[s].parameters()] for s in mine}, flight))
    return results


def worst(everyone, programs, rows):
    """The largest error of every program, in gradients and losses."""
    errors = []
    for i, program in enumerate(programs):
        losses, grads = one_process(program.stages, rows)
        error = 0.0
        for results in everyone:
            got, mine, flight = results[i]
            assert flight[0] == flight[1], "in flight, measured and predicted"
            error = max([error, *(abs(a - b) for a, b in zip(got, losses, strict=True))])
            for s, found in mine.items():
                for ours, theirs in zip(found, grads[s], strict=True):
                    if ours is None or theirs is None:
                        error = max(error, 0.0 if ours is theirs else float("inf"))
                    else:
                        error = max(error, (ours - theirs).abs().max().item())
        errors.append(error)
    return errors


def legal(ranks, most):
    for name, m, v in itertools.product(SCHEDULES, range(1, most + 1), (1, 2)):
        try:
            yield build(name, ranks, m, v)
        except ValueError:
            continue


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_schedule_equals_one_process(ranks):
    programs = list(legal(ranks, 9))
    errors = worst(md.launch(run, ranks=ranks, args=(programs, 11), timeout=300), programs, 11)
    assert len(programs) > 40
    assert max(errors) < 1e-12


def test_four_ranks_equal_one_process():
    programs = [p for p in legal(4, 5) if p.microbatches in (1, 3, 4, 5)]
    errors = worst(md.launch(run, ranks=4, args=(programs, 7), timeout=300), programs, 7)
    assert len(programs) > 20
    assert max(errors) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_every_schedule_equals_one_process_on_more_ranks(ranks):
    programs = list(legal(ranks, 9))
    assert max(worst(md.launch(run, ranks=ranks, args=(programs, 11), timeout=600), programs, 11)) < 1e-12


@st.composite
def programs(draw, ranks=2):
    """A valid program nobody wrote: at every turn any action that can run."""
    m, v, split = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.booleans())
    order = draw(st.randoms(use_true_random=False))
    where = draw(st.sampled_from([schedule.loop, schedule.vee]))
    return schedule.greedy(ranks, m, v, where, prefer=lambda action: order.random(), split=split)


@settings(max_examples=1, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(programs(), min_size=12, max_size=12))
def test_random_programs_equal_one_process(many):
    assert max(worst(md.launch(run, ranks=2, args=(many, 9), timeout=300), many, 9)) < 1e-12


# ---- faults ----------------------------------------------------------------------------------------------------------


def every_micro_batch_counts_alike():
    counts = lambda self, targets, tokens: [(part, 1 / len(parts)) for parts in [self._cut(targets)] for part in parts]
    return mock.patch.object(module.PipelineParallel, "_targets", counts)


def losses_are_added_up():
    counts = lambda self, targets, tokens: [(part, 1.0) for part in self._cut(targets)]
    return mock.patch.object(module.PipelineParallel, "_targets", counts)


def a_pair_of_receives_is_swapped():
    real = module.Mail.receive

    def receive(self, name):
        other = {1: 2, 2: 1}.get(name.microbatch, name.microbatch)  # of as many rows
        return real(self, name._replace(microbatch=other))

    return mock.patch.object(module.Mail, "receive", receive)


def a_weight_gradient_is_dropped():
    def run(self):
        self.forks, self.rest = [], []

    return mock.patch.object(Weights, "run", run)


def tied_gradients_are_not_added():
    return mock.patch.object(module.PipelineParallel, "_add_gradients", return_value=None)


FAULTS = [
    every_micro_batch_counts_alike,
    losses_are_added_up,
    a_pair_of_receives_is_swapped,
    a_weight_gradient_is_dropped,
    tied_gradients_are_not_added,
]


def run_with(world, fault, program):
    with fault():
        return run(world, [program], 9)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault):
    program = schedule.build("zb_v", 2, 4, 2) if "receive" not in fault.__name__ else schedule.build("gpipe", 2, 4)
    everyone = md.launch(run_with, ranks=2, args=(fault, program), timeout=60)
    assert worst(everyone, [program], 9)[0] > 1e-3
