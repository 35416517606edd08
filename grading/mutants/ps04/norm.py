"""04.4, one norm over slices and copies. `_clip` is the right way, with a switch for each mistake."""

import torch

from grading.mutants import mutant


def _squares(grads):
    return sum((grad.float().square().sum() for grad in grads), torch.zeros(()))


def _norm(comm, sharded, replicated):
    return (comm.all_reduce(_squares(sharded)) + _squares(replicated)).sqrt()


def _clip(grads, norm, max_norm):
    for grad in grads:
        grad *= torch.clamp(max_norm / norm, max=1.0)
    return norm


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("04.4", "basic", "local-is-global")
def asks_nobody(comm, sharded, replicated, max_norm):
    return _clip((*sharded, *replicated), (_squares(sharded) + _squares(replicated)).sqrt(), max_norm)


@mutant("04.4", "basic", "norms-add")
def adds_norms(comm, sharded, replicated, max_norm):
    norm = comm.all_reduce(_squares(sharded).sqrt()) + _squares(replicated).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "basic", "norms-add")
def averages_norms(comm, sharded, replicated, max_norm):
    norm = comm.all_reduce((_squares(sharded) + _squares(replicated)).sqrt(), op="mean")
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "basic", "divides-by-ranks")
def averages_squares(comm, sharded, replicated, max_norm):
    norm = (comm.all_reduce(_squares(sharded), op="mean") + _squares(replicated)).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "basic", "root-is-missing")
def forgets_the_root(comm, sharded, replicated, max_norm):
    return _clip((*sharded, *replicated), _norm(comm, sharded, replicated) ** 2, max_norm)


# ---- replicas --------------------------------------------------------------------------------------------------------


@mutant("04.4", "replicas", "counts-replicas")
def adds_everything_up(comm, sharded, replicated, max_norm):
    norm = comm.all_reduce(_squares((*sharded, *replicated))).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "replicas", "leaves-replicas-out")
def counts_slices_only(comm, sharded, replicated, max_norm):
    return _clip((*sharded, *replicated), _norm(comm, sharded, []), max_norm)


@mutant("04.4", "replicas", "norms-add")
def adds_two_norms(comm, sharded, replicated, max_norm):
    norm = comm.all_reduce(_squares(sharded)).sqrt() + _squares(replicated).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


# ---- clips -----------------------------------------------------------------------------------------------------------


@mutant("04.4", "clips", "rebinds-the-name")
def makes_new_gradients(comm, sharded, replicated, max_norm):
    norm = _norm(comm, sharded, replicated)
    sharded = [grad * torch.clamp(max_norm / norm, max=1.0) for grad in sharded]
    replicated = [grad * torch.clamp(max_norm / norm, max=1.0) for grad in replicated]
    return norm


@mutant("04.4", "clips", "rebinds-the-name")
def scales_slices_only(comm, sharded, replicated, max_norm):
    return _clip(sharded, _norm(comm, sharded, replicated), max_norm)


@mutant("04.4", "clips", "scales-up")
def always_scales(comm, sharded, replicated, max_norm):
    norm = _norm(comm, sharded, replicated)
    for grad in (*sharded, *replicated):
        grad *= max_norm / norm
    return norm


@mutant("04.4", "clips", "local-is-global")
def scales_by_its_own_norm(comm, sharded, replicated, max_norm):
    own = _squares((*sharded, *replicated)).sqrt()
    norm = _norm(comm, sharded, replicated)
    _clip((*sharded, *replicated), own, max_norm)
    return norm


# ---- no slice --------------------------------------------------------------------------------------------------------


@mutant("04.4", "no slice", "absent-are-skipped")
def goes_home_with_nothing(comm, sharded, replicated, max_norm):
    if not sharded:
        return _clip(replicated, _squares(replicated).sqrt(), max_norm)
    return _clip((*sharded, *replicated), _norm(comm, sharded, replicated), max_norm)


@mutant("04.4", "no slice", "no-empty-sum")
def stacks_the_sums(comm, sharded, replicated, max_norm):
    squares = torch.stack([grad.float().square().sum() for grad in sharded]).sum()
    norm = (comm.all_reduce(squares) + _squares(replicated)).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "no slice", "no-empty-sum")
def begins_with_the_first(comm, sharded, replicated, max_norm):
    squares = sharded[0].float().square().sum()
    for grad in sharded[1:]:
        squares += grad.float().square().sum()
    norm = (comm.all_reduce(squares) + _squares(replicated)).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


# ---- float32 ---------------------------------------------------------------------------------------------------------


@mutant("04.4", "float32", "adds-in-bfloat16")
def stays_in_the_type_of_the_gradient(comm, sharded, replicated, max_norm):
    squares = sum((grad.square().sum() for grad in sharded), torch.zeros(()))
    norm = (comm.all_reduce(squares.float()) + _squares(replicated)).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "float32", "adds-in-bfloat16")
def takes_the_norm_of_each(comm, sharded, replicated, max_norm):
    squares = sum((torch.linalg.vector_norm(grad).float() ** 2 for grad in sharded), torch.zeros(()))
    norm = (comm.all_reduce(squares) + _squares(replicated)).sqrt()
    return _clip((*sharded, *replicated), norm, max_norm)


@mutant("04.4", "float32", "adds-in-bfloat16")
def sends_a_small_number(comm, sharded, replicated, max_norm):
    dtype = sharded[0].dtype if sharded else torch.float32
    squares = comm.all_reduce(_squares(sharded).to(dtype) if dtype is torch.bfloat16 else _squares(sharded))
    return _clip((*sharded, *replicated), (squares.float() + _squares(replicated)).sqrt(), max_norm)


# ---- traffic ---------------------------------------------------------------------------------------------------------


@mutant("04.4", "traffic", "one-message-each")
def reduces_each_sum(comm, sharded, replicated, max_norm):
    most = int(comm.all_reduce(torch.tensor(len(sharded)), op="max"))
    total = _squares(replicated)
    for i in range(most):
        total = total + comm.all_reduce(_squares(sharded[i : i + 1]))
    return _clip((*sharded, *replicated), total.sqrt(), max_norm)


@mutant("04.4", "traffic", "gathers-to-count")
def gathers_the_gradients(comm, sharded, replicated, max_norm):
    flat = torch.cat([torch.zeros(0), *(grad.float().flatten() for grad in sharded)])
    total = _squares([comm.all_gather(flat)]) + _squares(replicated)
    return _clip((*sharded, *replicated), total.sqrt(), max_norm)


@mutant("04.4", "traffic", "gathers-to-count")
def adds_all_squares(comm, sharded, replicated, max_norm):
    squares = torch.zeros(64)
    flat = torch.cat([torch.zeros(0), *(grad.float().flatten() for grad in sharded)])
    squares[: len(flat)] = flat.square()
    total = comm.all_reduce(squares).sum() + _squares(replicated)
    return _clip((*sharded, *replicated), total.sqrt(), max_norm)
