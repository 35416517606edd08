"""06.1, all forward, then all backward."""

from grading.mutants import mutant
from minidist.schedule import Action


def _row(rank, forward, backward):
    return [Action(rank, "F", m) for m in forward] + [Action(rank, "B", m) for m in backward]


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("06.1", "basic", "forgets-the-backward")
def forward_passes_only(rank, ranks, microbatches):
    return _row(rank, range(microbatches), [])


@mutant("06.1", "basic", "wrong-stage")
def every_rank_runs_every_stage(rank, ranks, microbatches):
    return [Action(stage, kind, m) for kind in "FB" for m in range(microbatches) for stage in range(ranks)]


@mutant("06.1", "basic", "micro-batch-left-out")
def counts_one_too_few(rank, ranks, microbatches):
    return _row(rank, range(microbatches - 1), range(microbatches - 1))


@mutant("06.1", "basic", "micro-batch-too-many")
def counts_from_one(rank, ranks, microbatches):
    return _row(rank, range(1, microbatches + 1), range(1, microbatches + 1))


@mutant("06.1", "basic", "backward-before-forward")
def backward_first(rank, ranks, microbatches):
    return [Action(rank, kind, m) for kind in "BF" for m in range(microbatches)]


# ---- forward first ---------------------------------------------------------------------------------------------------


@mutant("06.1", "forward first", "backward-at-once")
def one_micro_batch_at_a_time(rank, ranks, microbatches):
    return [Action(rank, kind, m) for m in range(microbatches) for kind in "FB"]


@mutant("06.1", "forward first", "flushes-early")
def as_many_as_ranks_at_a_time(rank, ranks, microbatches):
    row = []
    for first in range(0, microbatches, ranks):
        group = range(first, min(first + ranks, microbatches))
        row += _row(rank, group, group)
    return row


@mutant("06.1", "forward first", "backward-at-once")
def goes_back_as_soon_as_it_can(rank, ranks, microbatches):
    ahead = min(ranks - rank, microbatches)
    row = _row(rank, range(ahead), [])
    for m in range(microbatches):
        row.append(Action(rank, "B", m))
        if m + ahead < microbatches:
            row.append(Action(rank, "F", m + ahead))
    return row


# ---- one order -------------------------------------------------------------------------------------------------------


@mutant("06.1", "one order", "orders-differ")
def each_rank_begins_with_its_own(rank, ranks, microbatches):
    order = [(rank + i) % microbatches for i in range(microbatches)]
    return _row(rank, order, order)


@mutant("06.1", "one order", "orders-differ")
def every_other_rank_goes_back_in_reverse(rank, ranks, microbatches):
    order = range(microbatches)
    return _row(rank, order, order if rank % 2 == 0 else reversed(order))


@mutant("06.1", "one order", "orders-differ")
def the_last_rank_goes_back_in_reverse(rank, ranks, microbatches):
    order = range(microbatches)
    return _row(rank, order, reversed(order) if rank == ranks - 1 else order)


# ---- any M and P -----------------------------------------------------------------------------------------------------


@mutant("06.1", "any M and P", "few-micro-batches")
def fills_the_pipeline_at_least(rank, ranks, microbatches):
    order = range(max(ranks, microbatches))
    return _row(rank, order, order)


@mutant("06.1", "any M and P", "few-micro-batches")
def refuses_what_does_not_fill_the_pipeline(rank, ranks, microbatches):
    if microbatches < ranks:
        raise ValueError("there must be as many micro-batches as ranks")
    return _row(rank, range(microbatches), range(microbatches))


@mutant("06.1", "any M and P", "alone-is-special")
def has_no_pipeline_on_one_rank(rank, ranks, microbatches):
    if ranks == 1:
        return []
    return _row(rank, range(microbatches), range(microbatches))
