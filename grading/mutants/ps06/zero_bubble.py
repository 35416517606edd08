"""06.5, weight gradients later."""

from grading.mutants import mutant


def _split(row, lag, cool_down=True):
    """I for each B, and the W of the micro-batch `lag` before it; what is put off comes at the end."""
    split, put_off = [], []
    for action in row:
        if action.kind == "F":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        put_off.append(action._replace(kind="W"))
        if len(put_off) > lag:
            split.append(put_off.pop(0))
    return split + put_off if cool_down else split


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("06.5", "basic", "weights-left-over")
def forgets_what_is_put_off(row, rank, ranks):
    return _split(row, rank, cool_down=False)


@mutant("06.5", "basic", "weights-forgotten")
def has_input_gradients_only(row, rank, ranks):
    return [action._replace(kind="I") if action.kind == "B" else action for action in row]


@mutant("06.5", "basic", "backward-before-forward")
def has_weights_before_inputs(row, rank, ranks):
    split = []
    for action in row:
        split += [action] if action.kind == "F" else [action._replace(kind="W"), action._replace(kind="I")]
    return split


@mutant("06.5", "basic", "backward-kept")
def keeps_the_backward_pass(row, rank, ranks):
    return [*row, *(action._replace(kind="W") for action in row if action.kind == "B")]


# ---- memory ----------------------------------------------------------------------------------------------------------


@mutant("06.5", "memory", "all-weights-at-the-end", also=("bubble",))
def has_all_weights_at_the_end(row, rank, ranks):
    return _split(row, len(row))


@mutant("06.5", "memory", "put-off-too-long", also=("bubble",))
def puts_off_twice_as_many(row, rank, ranks):
    return _split(row, 2 * rank)


@mutant("06.5", "memory", "put-off-too-long", also=("bubble",))
def puts_off_as_many_everywhere(row, rank, ranks):
    return _split(row, ranks - 1)


@mutant("06.5", "memory", "warm-up-too-long", also=("any M and P",))
def fills_the_first_wait_with_forward_passes(row, rank, ranks):
    forward, backward = ([action for action in row if action.kind == kind] for kind in "FB")
    ahead = min(2 * (ranks - 1 - rank), len(forward))
    pairs = zip(forward[ahead:], backward)  # noqa: B905
    more = [*forward[:ahead], *(action for pair in pairs for action in pair), *backward[len(forward) - ahead :]]
    return _split(more, 2 * rank)


# ---- bubble ----------------------------------------------------------------------------------------------------------


@mutant("06.5", "bubble", "weights-at-once")
def has_each_weight_at_once(row, rank, ranks):
    return _split(row, 0)


@mutant("06.5", "bubble", "put-off-too-little")
def puts_off_one_at_most(row, rank, ranks):
    return _split(row, min(1, rank))


@mutant("06.5", "bubble", "put-off-too-little")
def puts_off_one_less(row, rank, ranks):
    return _split(row, max(rank - 1, 0))


# ---- any M and P -----------------------------------------------------------------------------------------------------


@mutant("06.5", "any M and P", "few-micro-batches")
def takes_what_is_not_there(row, rank, ranks):
    split, put_off = [], [action._replace(kind="W") for action in row if action.kind == "B"]
    done = 0
    for action in row:
        split.append(action if action.kind == "F" else action._replace(kind="I"))
        if action.kind == "B":
            done += 1
            if done > rank:
                split.append(put_off[done - 1 - rank])
    return split + [put_off[len(put_off) - rank + i] for i in range(rank)]


@mutant("06.5", "any M and P", "few-micro-batches")
def gives_up_if_the_pipeline_is_never_full(row, rank, ranks):
    if len(row) < 2 * ranks:
        raise ValueError("too few micro-batches")
    return _split(row, rank)


@mutant("06.5", "any M and P", "alone-is-special")
def leaves_a_rank_alone_as_it_is(row, rank, ranks):
    return row if ranks == 1 else _split(row, rank)


@mutant("06.5", "any M and P", "few-micro-batches")
def numbers_the_cool_down_from_behind(row, rank, ranks):
    split = _split(row, rank, cool_down=False)
    count = sum(action.kind == "F" for action in row)
    return split + [row[0]._replace(kind="W", microbatch=count - rank + i) for i in range(rank)]
