"""06.3, when an action starts."""

from grading.mutants import mutant


def _times(
    program,
    reads,
    writes,
    seconds,
    comm,
    lasts=None,
    latest=max,
    there=lambda end, start: end,
    free_at=lambda rank, action: rank,
    late=lambda home, rank, made_at, action: home != rank,
    busy=lambda action: 0.0,
    stuck=ValueError,
):
    """As it should be, but for what is passed."""
    lasts = lasts or seconds
    starts, made, free = {}, {}, {}
    written = {name for row in program for action in row for name in writes(action)}
    waiting = [list(row) for row in program]
    while any(waiting):
        ready = [r for r, row in enumerate(waiting) if row and all(n in made for n in reads(row[0]) if n in written)]
        if not ready:
            if stuck is None:
                return starts
            raise stuck("no rank can go on")
        for rank in ready:
            action = waiting[rank].pop(0)
            read = [made[name] for name in reads(action) if name in written]
            times = [at + (comm if late(home, rank, by, action) else 0.0) for at, home, by in read]
            start = max(free.get(free_at(rank, action), 0.0), latest(times) if times else 0.0)
            starts[action] = start
            end = start + lasts(action)
            free[free_at(rank, action)] = end + busy(action)
            made.update((name, (there(end, start), rank, action)) for name in writes(action))
    return starts


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("06.3", "basic", "ignores-busy-rank")
def starts_when_all_is_there(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, free_at=lambda rank, action: action)


@mutant("06.3", "basic", "ignores-what-it-reads")
def adds_up_each_row(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, latest=lambda times: 0.0)


@mutant("06.3", "basic", "ignores-what-it-reads")
def has_it_when_the_writer_starts(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, there=lambda end, start: start)


@mutant("06.3", "basic", "one-input-only")
def looks_at_the_first_that_is_read(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, latest=lambda times: times[0])


@mutant("06.3", "basic", "no-result")
def returns_the_length_of_the_program(program, reads, writes, seconds, comm):
    starts = _times(program, reads, writes, seconds, comm)
    return max(start + seconds(action) for action, start in starts.items())


# ---- costs -----------------------------------------------------------------------------------------------------------


@mutant("06.3", "costs", "all-cost-the-same")
def counts_actions(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, lasts=lambda action: 1.0)


@mutant("06.3", "costs", "reader-pays")
def adds_the_seconds_of_the_reader(program, reads, writes, seconds, comm):
    starts, made, free = {}, {}, [0.0] * len(program)
    written = {name for row in program for action in row for name in writes(action)}
    waiting = [list(row) for row in program]
    while any(waiting):
        ready = [r for r, row in enumerate(waiting) if row and all(n in made for n in reads(row[0]) if n in written)]
        if not ready:
            raise ValueError("no rank can go on")
        for rank in ready:
            action = waiting[rank].pop(0)
            own = seconds(action)
            there = [made[n][0] + own + comm * (made[n][1] != rank) for n in reads(action) if n in written]
            starts[action] = max([free[rank], *there])
            free[rank] = starts[action] + own
            made.update((name, (starts[action], rank)) for name in writes(action))
    return starts


@mutant("06.3", "costs", "wrong-values")
def asks_the_first_stage_for_all(program, reads, writes, seconds, comm):
    price = {action.kind: seconds(action) for row in reversed(program) for action in row}
    return _times(program, reads, writes, seconds, comm, lasts=lambda action: price[action.kind])


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("06.3", "messages", "messages-take-no-time")
def forgets_messages(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, 0.0)


@mutant("06.3", "messages", "message-on-one-rank")
def sends_to_itself(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, late=lambda home, rank, by, action: True)


@mutant("06.3", "messages", "sending-keeps-busy")
def stands_still_while_it_sends(program, reads, writes, seconds, comm):
    home = {name: rank for rank, row in enumerate(program) for action in row for name in reads(action)}
    at = {action: rank for rank, row in enumerate(program) for action in row}

    def busy(action):
        return comm if any(home.get(name, at[action]) != at[action] for name in writes(action)) else 0.0

    return _times(program, reads, writes, seconds, comm, busy=busy)


# ---- any program -----------------------------------------------------------------------------------------------------


@mutant("06.3", "any program", "one-input-only")
def looks_at_the_last_that_is_read(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, latest=lambda times: times[-1])


@mutant("06.3", "any program", "stage-for-rank")
def sends_between_stages(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, late=lambda home, rank, by, action: by[0] != action[0])


@mutant("06.3", "any program", "knows-one-schedule")
def knows_what_forward_and_backward_read(program, reads, writes, seconds, comm):
    last = max(action[0] for row in program for action in row)

    def known(action):
        stage, kind, m = action
        before = [(stage - 1, "F", m)] if stage else []
        return before if kind == "F" else [(stage, "F", m)] + ([(stage + 1, "B", m)] if stage < last else [])

    return _times(program, known, lambda action: [tuple(action)], seconds, comm)


@mutant("06.3", "any program", "knows-one-schedule")
def has_a_clock_for_each_stage(program, reads, writes, seconds, comm):
    starts, end, home, free = {}, {}, {}, [0.0] * len(program)
    written = {name for row in program for action in row for name in writes(action)}
    left = [action for row in program for action in row]
    while left:
        first = {}
        for action in left:
            first.setdefault(action[0], action)
        ready = [a for a in first.values() if all(n in end for n in reads(a) if n in written)]
        if not ready:
            raise ValueError("no stage can go on")
        for action in ready:
            left.remove(action)
            there = [end[n] + comm * (home[n] != action[0]) for n in reads(action) if n in written]
            starts[action] = max([free[action[0]], *there])
            free[action[0]] = starts[action] + seconds(action)
            for name in writes(action):
                end[name], home[name] = free[action[0]], action[0]
    return starts


# ---- stuck -----------------------------------------------------------------------------------------------------------


@mutant("06.3", "stuck", "stuck-goes-unnoticed")
def returns_what_can_start(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, stuck=None)


@mutant("06.3", "stuck", "endless-loop")
def tries_again_for_ever(program, reads, writes, seconds, comm):
    while True:
        try:
            return _times(program, reads, writes, seconds, comm)
        except ValueError:
            continue


@mutant("06.3", "stuck", "fails-deep-inside")
def fails_with_what_it_finds(program, reads, writes, seconds, comm):
    return _times(program, reads, writes, seconds, comm, stuck=KeyError)
