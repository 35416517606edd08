"""05.4, by vocabulary. `_loss` is the right way, with a switch for each mistake."""

import torch

import minidist as md
from grading.mutants import mutant


def sum_ranks(comm, x):
    raise NotImplementedError  # the check puts a right one in its place


def _start(comm, logits, vocab):
    return md.partition(vocab, comm.size)[comm.rank].start


def _most(comm, logits):
    return comm.all_reduce(logits.detach().amax(-1), op="max")


def _exponentials(comm, shifted):
    return sum_ranks(comm, shifted.exp().sum(-1))


def _target(comm, here, picked):
    return sum_ranks(comm, torch.where(here, picked, 0.0))


def _mean(losses, targets):
    valid = targets != -100
    return torch.where(valid, losses, 0.0).sum() / valid.sum().clamp(min=1)


def _loss(
    comm, logits, targets, vocab, start=_start, most=_most, exponentials=_exponentials, target=_target, mean=_mean
):
    shifted = logits - most(comm, logits)[:, None]
    index = targets - start(comm, logits, vocab)
    here = (index >= 0) & (index < logits.shape[-1])
    picked = shifted.gather(-1, index.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    return mean(exponentials(comm, shifted).log() - target(comm, here, picked), targets)


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("05.4", "basic", "local-is-global")
def sums_its_own_columns(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, exponentials=lambda comm, shifted: shifted.exp().sum(-1))


@mutant("05.4", "basic", "adds-foreign-targets")
def picks_a_logit_on_every_rank(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, target=lambda comm, here, picked: sum_ranks(comm, picked))


def _zero(comm, logits):
    return torch.zeros_like(logits[:, 0])


@mutant("05.4", "basic", "own-max-each")
def subtracts_its_own_maximum(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, most=lambda comm, logits: logits.detach().amax(-1))


@mutant("05.4", "basic", "sum-not-mean")
def adds_the_losses(comm, logits, targets, vocab):
    return _loss(
        comm, logits, targets, vocab, mean=lambda losses, targets: torch.where(targets != -100, losses, 0.0).sum()
    )


# ---- gradient --------------------------------------------------------------------------------------------------------


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad.clone()), None


@mutant("05.4", "gradient", "backward-follows")
def reduces_the_exponentials_as_data(comm, logits, targets, vocab):
    def exponentials(comm, shifted):
        return comm.all_reduce(shifted.detach().exp().sum(-1))

    return _loss(comm, logits, targets, vocab, exponentials=exponentials)


@mutant("05.4", "gradient", "backward-follows")
def reduces_the_target_as_data(comm, logits, targets, vocab):
    def target(comm, here, picked):
        return comm.all_reduce(torch.where(here, picked.detach(), 0.0))

    return _loss(comm, logits, targets, vocab, target=target)


@mutant("05.4", "gradient", "reduces-in-both-directions")
def sums_backward_as_well(comm, logits, targets, vocab):
    return _loss(
        comm,
        logits,
        targets,
        vocab,
        exponentials=lambda comm, shifted: _Twice.apply(shifted.exp().sum(-1), comm),
        target=lambda comm, here, picked: _Twice.apply(torch.where(here, picked, 0.0), comm),
    )


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("05.4", "messages", "gathers-the-logits")
def gathers_the_logits_for_the_maximum(comm, logits, targets, vocab):
    def most(comm, logits):
        return comm.all_gather(logits.detach().t()).amax(0)

    return _loss(comm, logits, targets, vocab, most=most)


@mutant("05.4", "messages", "gathers-the-logits")
def adds_whole_rows_with_zeros(comm, logits, targets, vocab):
    def most(comm, logits):
        whole = logits.new_full((len(logits), vocab), -1e9)
        part = md.partition(vocab, comm.size)[comm.rank]
        whole[:, part] = logits.detach()
        return comm.all_reduce(whole, op="max").amax(-1)

    return _loss(comm, logits, targets, vocab, most=most)


@mutant("05.4", "messages", "adds-after-sending")
def sums_the_columns_last(comm, logits, targets, vocab):
    def exponentials(comm, shifted):
        room = shifted.new_zeros(len(shifted), -(-vocab // comm.size) - shifted.shape[1])
        return sum_ranks(comm, torch.cat([shifted.exp(), room], dim=1)).sum(-1)

    return _loss(comm, logits, targets, vocab, exponentials=exponentials)


# ---- large logits ----------------------------------------------------------------------------------------------------


@mutant("05.4", "large logits", "exp-overflows")
def subtracts_nothing(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, most=_zero)


@mutant("05.4", "large logits", "exp-overflows")
def subtracts_the_maximum_of_rank_0(comm, logits, targets, vocab):
    return _loss(
        comm, logits, targets, vocab, most=lambda comm, logits: comm.broadcast(logits.detach().amax(-1), src=0)
    )


@mutant("05.4", "large logits", "exp-overflows")
def subtracts_the_smallest_maximum(comm, logits, targets, vocab):
    return _loss(
        comm, logits, targets, vocab, most=lambda comm, logits: comm.all_reduce(logits.detach().amax(-1), op="min")
    )


# ---- ignored targets -------------------------------------------------------------------------------------------------


@mutant("05.4", "ignored targets", "padding-counts")
def divides_by_all_targets(comm, logits, targets, vocab):
    return _loss(
        comm, logits, targets, vocab, mean=lambda losses, targets: torch.where(targets != -100, losses, 0.0).mean()
    )


@mutant("05.4", "ignored targets", "padding-has-loss")
def adds_all_losses(comm, logits, targets, vocab):
    return _loss(
        comm,
        logits,
        targets,
        vocab,
        mean=lambda losses, targets: losses.sum() / (targets != -100).sum().clamp(min=1),
    )


@mutant("05.4", "ignored targets", "divides-by-no-tokens")
def averages_the_valid_ones(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, mean=lambda losses, targets: losses[targets != -100].mean())


# ---- any V -----------------------------------------------------------------------------------------------------------


@mutant("05.4", "any V", "own-length-as-step")
def counts_in_its_own_columns(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, start=lambda comm, logits, vocab: comm.rank * logits.shape[-1])


@mutant("05.4", "any V", "drops-the-rest")
def rounds_down(comm, logits, targets, vocab):
    return _loss(comm, logits, targets, vocab, start=lambda comm, logits, vocab: comm.rank * (vocab // comm.size))


@mutant("05.4", "any V", "tensor-split")
def cuts_evenly(comm, logits, targets, vocab):
    def start(comm, logits, vocab):
        return int(torch.tensor_split(torch.arange(vocab), comm.size)[comm.rank][0])

    return _loss(comm, logits, targets, vocab, start=start)
