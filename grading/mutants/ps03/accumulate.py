"""03.4, accumulation."""

import torch
import torch.nn.functional as F

from grading.mutants import mutant


def average_gradients(module, comm):
    raise NotImplementedError  # the check puts a right one in its place


def _loss(module, batch, reduction="sum"):
    inputs, targets = batch
    return F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten(), ignore_index=-100, reduction=reduction)


def _count(micro_batches):
    return torch.tensor(sum(int((targets != -100).sum()) for _, targets in micro_batches))


def _tokens(comm, micro_batches):
    return comm.all_reduce(_count(micro_batches))


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("03.4", "basic", "last-micro-batch-only")
def clears_between_micro_batches(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        module.zero_grad()
        (comm.size * _loss(module, batch) / tokens).backward()
    average_gradients(module, comm)


@mutant("03.4", "basic", "divided-twice")
def forgets_the_factor(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        (_loss(module, batch) / tokens).backward()
    average_gradients(module, comm)


@mutant("03.4", "basic", "sum-not-mean")
def forgets_the_tokens(module, comm, micro_batches):
    for batch in micro_batches:
        _loss(module, batch).backward()
    average_gradients(module, comm)


@mutant("03.4", "basic", "local-is-global")
def does_not_average(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        (comm.size * _loss(module, batch) / tokens).backward()


# ---- token rule ------------------------------------------------------------------------------------------------------


@mutant("03.4", "token rule", "mean-of-means")
def divides_by_its_own_tokens(module, comm, micro_batches):
    tokens = _count(micro_batches).clamp(min=1)
    for batch in micro_batches:
        (_loss(module, batch) / tokens).backward()
    average_gradients(module, comm)


@mutant("03.4", "token rule", "micro-batch-as-step")
def averages_micro_batches(module, comm, micro_batches):
    for batch in micro_batches:
        tokens = _count([batch]).clamp(min=1)
        (_loss(module, batch) / tokens / len(micro_batches)).backward()
    average_gradients(module, comm)


@mutant("03.4", "token rule", "padding-counts")
def counts_padding(module, comm, micro_batches):
    tokens = comm.all_reduce(torch.tensor(sum(targets.numel() for _, targets in micro_batches)))
    for batch in micro_batches:
        (comm.size * _loss(module, batch) / tokens).backward()
    average_gradients(module, comm)


# ---- averages once ---------------------------------------------------------------------------------------------------


@mutant("03.4", "averages once", "averages-every-time")
def averages_after_each(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        (comm.size * _loss(module, batch) / tokens).backward()
        average_gradients(module, comm)


@mutant("03.4", "averages once", "averages-every-time")
def averages_each_and_adds(module, comm, micro_batches):
    tokens, total = _tokens(comm, micro_batches), {}
    for batch in micro_batches:
        module.zero_grad()
        (comm.size * _loss(module, batch) / tokens).backward()
        average_gradients(module, comm)
        for parameter in module.parameters():
            total[parameter] = total.get(parameter, 0) + parameter.grad.clone()
    for parameter in module.parameters():
        parameter.grad = total[parameter]


@mutant("03.4", "averages once", "averages-every-time")
def averages_to_be_sure(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        (comm.size * _loss(module, batch) / tokens).backward()
    average_gradients(module, comm)
    average_gradients(module, comm)


# ---- no tokens -------------------------------------------------------------------------------------------------------


@mutant("03.4", "no tokens", "absent-are-skipped")
def leaves_without_tokens(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    if not _count(micro_batches):
        return
    for batch in micro_batches:
        (comm.size * _loss(module, batch) / tokens).backward()
    average_gradients(module, comm)


@mutant("03.4", "no tokens", "local-is-global")
def averages_with_the_last_valid_one(module, comm, micro_batches):
    tokens = _tokens(comm, micro_batches)
    for batch in micro_batches:
        if not _count([batch]):
            continue
        (comm.size * _loss(module, batch) / tokens).backward()
        if batch is micro_batches[-1]:
            average_gradients(module, comm)


@mutant("03.4", "no tokens", "divides-by-no-tokens")
def weighs_its_own_mean(module, comm, micro_batches):
    mine, tokens = int(_count(micro_batches)), int(_tokens(comm, micro_batches))
    per_token = 1 / mine
    for batch in micro_batches:
        (comm.size * _loss(module, batch) * per_token * (mine / tokens)).backward()
    average_gradients(module, comm)
