"""06.2, one forward, one backward."""

from grading.mutants import mutant
from minidist.schedule import Action


def _row(rank, microbatches, ahead):
    """As it should be, with so many forward passes ahead."""
    forward, backward = ([Action(rank, kind, m) for m in range(microbatches)] for kind in "FB")
    ahead = min(ahead, microbatches)
    row = forward[:ahead]
    for f, b in zip(forward[ahead:], backward):  # noqa: B905
        row += [f, b]
    return row + backward[microbatches - ahead :]


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("06.2", "basic", "cool-down-missing")
def has_no_cool_down(rank, ranks, microbatches):
    ahead = ranks - 1 - rank
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(ahead, microbatches):
        row += [Action(rank, "F", m), Action(rank, "B", m - ahead)]
    return row


@mutant("06.2", "basic", "backward-before-forward")
def one_backward_one_forward(rank, ranks, microbatches):
    ahead = min(ranks - 1 - rank, microbatches)
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(microbatches):
        row.append(Action(rank, "B", m))
        if m + ahead < microbatches:
            row.append(Action(rank, "F", m + ahead))
    return row


@mutant("06.2", "basic", "micro-batch-left-out")
def loses_the_last_of_the_steady_state(rank, ranks, microbatches):
    ahead = ranks - 1 - rank
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(microbatches - ahead - 1):
        row += [Action(rank, "F", m + ahead), Action(rank, "B", m)]
    return row + [Action(rank, "B", m) for m in range(microbatches - ahead - 1, microbatches)]


@mutant("06.2", "basic", "wrong-stage")
def always_names_stage_0(rank, ranks, microbatches):
    return _row(0, microbatches, ranks - 1 - rank)


@mutant("06.2", "basic", "waits-for-the-later")
def sends_the_second_one_back_first(rank, ranks, microbatches):
    row = _row(rank, microbatches, ranks - 1 - rank)
    if rank == ranks - 1:
        row = [Action(rank, kind, m) for kind in "FB" for m in reversed(range(microbatches))]
    return row


# ---- in flight -------------------------------------------------------------------------------------------------------


@mutant("06.2", "in flight", "warm-up-too-long")
def warms_up_once_more(rank, ranks, microbatches):
    return _row(rank, microbatches, ranks - rank)


@mutant("06.2", "in flight", "same-warm-up", also=("no waiting",))
def warms_up_everywhere_as_rank_0_does(rank, ranks, microbatches):
    return _row(rank, microbatches, ranks - 1)


@mutant("06.2", "in flight", "warm-up-too-long")
def writes_gpipe_again(rank, ranks, microbatches):
    return _row(rank, microbatches, microbatches)


@mutant("06.2", "in flight", "warm-up-too-long")
def warms_up_for_both_ways(rank, ranks, microbatches):
    return _row(rank, microbatches, 2 * (ranks - 1 - rank))


# ---- no waiting ------------------------------------------------------------------------------------------------------


@mutant("06.2", "no waiting", "warm-up-too-short")
def warms_up_once_less(rank, ranks, microbatches):
    return _row(rank, microbatches, max(ranks - 2 - rank, 0))


@mutant("06.2", "no waiting", "warm-up-too-short")
def does_not_warm_up(rank, ranks, microbatches):
    return _row(rank, microbatches, 0)


@mutant("06.2", "no waiting", "warm-up-too-short")
def warms_up_half_as_long(rank, ranks, microbatches):
    return _row(rank, microbatches, (ranks - 1 - rank) // 2)


@mutant("06.2", "no waiting", "newest-goes-first")
def sends_the_newest_back_first(rank, ranks, microbatches):
    stack, row = [], []
    for action in _row(rank, microbatches, ranks - 1 - rank):
        if action.kind == "F":
            stack.append(action)
            row.append(action)
        else:
            row.append(stack.pop()._replace(kind="B"))
    return row


# ---- any M and P -----------------------------------------------------------------------------------------------------


@mutant("06.2", "any M and P", "few-micro-batches")
def warms_up_beyond_the_last(rank, ranks, microbatches):
    ahead = ranks - 1 - rank
    row = [Action(rank, "F", m) for m in range(ahead)]
    for m in range(microbatches - ahead):
        row += [Action(rank, "F", m + ahead), Action(rank, "B", m)]
    return row + [Action(rank, "B", m) for m in range(microbatches - ahead, microbatches)]


@mutant("06.2", "any M and P", "few-micro-batches")
def gives_up_with_fewer_than_ranks(rank, ranks, microbatches):
    assert microbatches >= ranks, "the pipeline is never full"
    return _row(rank, microbatches, ranks - 1 - rank)


@mutant("06.2", "any M and P", "few-micro-batches")
def runs_one_at_a_time_if_there_are_few(rank, ranks, microbatches):
    return _row(rank, microbatches, ranks - 1 - rank if microbatches >= ranks else 0)


@mutant("06.2", "any M and P", "alone-is-special")
def warms_up_at_least_once(rank, ranks, microbatches):
    return _row(rank, microbatches, ranks - 1 - rank if ranks > 1 else microbatches)
