"""03.3, buckets that leave during the backward pass. `_make` is the right way, with a switch for each mistake."""

import torch

from grading.mutants import mutant


def _make(
    module,
    comm,
    elements,
    forward=False,
    early=True,
    waits=False,
    in_order=True,
    op="mean",
    write_back=True,
    finish_waits=True,
    sends_rest=True,
    fills_zeros=True,
    keeps_none=False,
):
    parameters = list(module.parameters())
    buckets = []
    for parameter in parameters if forward else reversed(parameters):
        if not buckets or sum(p.numel() for p in buckets[-1]) + parameter.numel() > elements:
            buckets.append([])
        buckets[-1].append(parameter)
    arrived, under_way, ready = set(), {}, []

    def send(i):
        grads = [torch.zeros_like(p) if p.grad is None and fills_zeros else p.grad for p in buckets[i]]
        flat = torch.cat([grad.flatten() for grad in grads])
        under_way[i] = (flat, comm.all_reduce(flat, op=op, async_op=True))
        if waits:
            under_way[i][1].wait()

    def hook(parameter):
        arrived.add(parameter)
        for i in range(len(buckets)):
            if i in under_way or i in ready or not is_full(i):
                continue
            begun = any(arrived.intersection(other) for k, other in enumerate(buckets[:i]) if k not in under_way)
            if {True: i == len(under_way), False: True, "begun": not begun, "counted": True}[in_order]:
                send(i) if early else ready.append(i)

    def is_full(i):
        if in_order == "counted":
            return len(arrived) >= sum(len(bucket) for bucket in buckets[: i + 1])
        return arrived.issuperset(buckets[i])

    def finish():
        for i in [*ready, *range(len(buckets))] if sends_rest else []:
            if i not in under_way:
                send(i)
        for i, (flat, handle) in list(under_way.items()):
            if finish_waits:
                handle.wait()
            for parameter, piece in zip(buckets[i], flat.split([p.numel() for p in buckets[i]]), strict=True):
                if write_back and not (keeps_none and parameter.grad is None):
                    parameter.grad = piece.view_as(parameter).clone()
        for each in (arrived, under_way, ready):
            each.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hook)
    return finish


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("03.3", "basic", "sum-not-mean")
def only_adds(module, comm, elements):
    return _make(module, comm, elements, op="sum")


@mutant("03.3", "basic", "averages-a-copy")
def does_not_write_back(module, comm, elements):
    return _make(module, comm, elements, write_back=False)


@mutant("03.3", "basic", "averages-a-copy")
def does_not_wait(module, comm, elements):
    return _make(module, comm, elements, finish_waits=False)


@mutant("03.3", "basic", "hook-comes-too-early")
def hooks_the_incoming_gradient(module, comm, elements):
    handles = []
    for parameter in module.parameters():
        parameter.register_hook(
            lambda grad, parameter=parameter: handles.append(comm.all_reduce(parameter.grad, op="mean", async_op=True))
        )
    return lambda: [handle.wait() for handle in handles]


# ---- overlap ---------------------------------------------------------------------------------------------------------


@mutant("03.3", "overlap", "nothing-overlaps")
def sends_all_in_finish(module, comm, elements):
    return _make(module, comm, elements, early=False)


@mutant("03.3", "overlap", "nothing-overlaps")
def fills_from_the_first_layer(module, comm, elements):
    return _make(module, comm, elements, forward=True)


@mutant("03.3", "overlap", "waits-in-the-hook")
def waits_in_the_hook(module, comm, elements):
    return _make(module, comm, elements, waits=True)


# ---- two steps -------------------------------------------------------------------------------------------------------


@mutant("03.3", "two steps", "state-left-over")
def sends_in_the_first_step_only(module, comm, elements):
    finish, steps = _make(module, comm, elements), []

    def once():
        steps.append(1)
        if len(steps) == 1:
            finish()

    return once


@mutant("03.3", "two steps", "state-left-over")
def adds_to_the_old_bucket(module, comm, elements):
    old = {}
    finish = _make(module, comm, elements)

    def add():
        finish()
        for parameter in module.parameters():
            parameter.grad = parameter.grad + old.get(parameter, 0)
            old[parameter] = parameter.grad.clone()

    return add


@mutant("03.3", "two steps", "state-left-over")
def gives_the_first_result_again(module, comm, elements):
    results = []
    finish = _make(module, comm, elements)

    def again():
        finish()
        results.append([parameter.grad.clone() for parameter in module.parameters()])
        for parameter, grad in zip(module.parameters(), results[0], strict=True):
            parameter.grad = grad.clone()

    return again


# ---- one order -------------------------------------------------------------------------------------------------------


@mutant("03.3", "one order", "sends-as-they-fill")
def sends_what_is_full(module, comm, elements):
    return _make(module, comm, elements, in_order=False)


@mutant("03.3", "one order", "sends-as-they-fill")
def waits_only_for_those_begun(module, comm, elements):
    return _make(module, comm, elements, in_order="begun")


@mutant("03.3", "one order", "sends-as-they-fill")
def counts_gradients(module, comm, elements):
    return _make(module, comm, elements, in_order="counted")


# ---- unused parameters -----------------------------------------------------------------------------------------------


@mutant("03.3", "unused parameters", "absent-are-skipped")
def never_sends_what_is_not_full(module, comm, elements):
    return _make(module, comm, elements, sends_rest=False)


@mutant("03.3", "unused parameters", "grad-is-none")
def expects_a_gradient(module, comm, elements):
    return _make(module, comm, elements, fills_zeros=False)


@mutant("03.3", "unused parameters", "replicas-drift")
def leaves_none_where_it_was(module, comm, elements):
    return _make(module, comm, elements, keeps_none=True)
