"""04.2, stage 2. `_make` is the right way, with a switch for each mistake."""

import torch

import minidist as md
from grading.mutants import mutant


def _scatter(comm, flat):
    return comm.reduce_scatter(flat, op="mean")


def _add(shards, i, piece):
    shards[i] += piece


def _make(
    module,
    comm,
    shards,
    scatter=_scatter,
    add=_add,
    place=lambda i, n: i,
    frees="hook",
    early=True,
    again=True,
    unused="in order",
    keep=None,
):
    """scatter, add: how a gradient is reduced, and how its slice is kept. frees: where grad becomes None. unused: what
    becomes of one that has none. keep: a list that gradients stay in."""
    parameters = list(module.parameters())
    waiting = list(range(len(parameters)))

    def reduce_one(i):
        grad = parameters[i].grad
        if grad is None and unused != "expected":
            grad = torch.zeros_like(parameters[i])
        shard = place(i, len(parameters))
        add(shards, shard, scatter(comm, grad.flatten()))
        if keep is not None:
            keep.append(grad)
        if frees == "hook":
            parameters[i].grad = None

    def hook(parameter):
        i = next(i for i, each in enumerate(parameters) if each is parameter)
        if not early or i not in waiting:
            return
        while unused != "at the end" and unused != "never" and waiting[-1] != i:
            reduce_one(waiting.pop())
        waiting.remove(i)
        reduce_one(i)

    def finish():
        while waiting and unused != "never":
            reduce_one(waiting.pop())
        if frees != "never":
            for parameter in parameters:
                parameter.grad = None
        if again:
            waiting[:] = range(len(parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    return finish


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("04.2", "basic", "sum-not-mean")
def only_adds(module, comm, shards):
    return _make(module, comm, shards, scatter=lambda comm, flat: comm.reduce_scatter(flat))


@mutant("04.2", "basic", "divided-twice")
def divides_once_more(module, comm, shards):
    return _make(module, comm, shards, scatter=lambda comm, flat: comm.reduce_scatter(flat, op="mean") / comm.size)


@mutant("04.2", "basic", "local-is-global")
def cuts_its_own_gradient(module, comm, shards):
    def scatter(comm, flat):
        return flat[md.partition(len(flat), comm.size)[comm.rank]]

    return _make(module, comm, shards, scatter=scatter)


@mutant("04.2", "basic", "mixed-up-order")
def fills_the_slices_as_gradients_come(module, comm, shards):
    return _make(module, comm, shards, place=lambda i, n: n - 1 - i)


@mutant("04.2", "basic", "no-result")
def adds_to_another_tensor(module, comm, shards):
    def add(shards, i, piece):
        shard = shards[i] + piece  # noqa: F841

    return _make(module, comm, shards, add=add)


# ---- frees -----------------------------------------------------------------------------------------------------------


@mutant("04.2", "frees", "gradients-at-the-end")
def reduces_all_in_finish(module, comm, shards):
    return _make(module, comm, shards, early=False)


@mutant("04.2", "frees", "keeps-full-gradients")
def frees_in_finish(module, comm, shards):
    return _make(module, comm, shards, frees="finish")


@mutant("04.2", "frees", "keeps-full-gradients")
def keeps_a_list_of_gradients(module, comm, shards):
    return _make(module, comm, shards, keep=[])


# ---- accumulation ----------------------------------------------------------------------------------------------------


@mutant("04.2", "accumulation", "last-micro-batch-only")
def writes_over_the_slice(module, comm, shards):
    return _make(module, comm, shards, add=lambda shards, i, piece: shards[i].copy_(piece))


@mutant("04.2", "accumulation", "state-left-over")
def works_once(module, comm, shards):
    return _make(module, comm, shards, again=False)


@mutant("04.2", "accumulation", "micro-batch-as-step")
def averages_the_micro_batches(module, comm, shards):
    seen = [0] * len(shards)

    def add(shards, i, piece):
        seen[i] = seen[i] + 1 if shards[i].any() else 1
        shards[i] += (piece - shards[i]) / seen[i]

    return _make(module, comm, shards, add=add)


# ---- unused parameters -----------------------------------------------------------------------------------------------


@mutant("04.2", "unused parameters", "absent-are-skipped")
def leaves_out_what_has_no_gradient(module, comm, shards):
    return _make(module, comm, shards, unused="never")


@mutant("04.2", "unused parameters", "grad-is-none")
def expects_a_gradient(module, comm, shards):
    return _make(module, comm, shards, unused="expected")


@mutant("04.2", "unused parameters", "sends-as-they-fill")
def sends_zeros_at_the_end(module, comm, shards):
    return _make(module, comm, shards, unused="at the end")


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("04.2", "traffic", "moves-more-than-needed")
def averages_all_and_cuts(module, comm, shards):
    def scatter(comm, flat):
        return comm.all_reduce(flat.clone(), op="mean")[md.partition(len(flat), comm.size)[comm.rank]].clone()

    return _make(module, comm, shards, scatter=scatter)


@mutant("04.2", "traffic", "moves-more-than-needed")
def gathers_what_it_reduced(module, comm, shards):
    def scatter(comm, flat):
        whole = comm.all_gather(comm.reduce_scatter(flat, op="mean"))
        return whole[md.partition(len(flat), comm.size)[comm.rank]].clone()

    return _make(module, comm, shards, scatter=scatter)


@mutant("04.2", "traffic", "moves-more-than-needed")
def adds_in_float64(module, comm, shards):
    return _make(module, comm, shards, scatter=lambda comm, flat: comm.reduce_scatter(flat.double(), op="mean"))
