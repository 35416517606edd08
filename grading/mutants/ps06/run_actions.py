"""06.4, a rank's actions on real tensors."""

import torch

from grading.mutants import mutant


def _share(tokens, targets, m):
    return tokens[m] / sum(tokens)


def _run(
    comm,
    actions,
    stage,
    xs,
    targets,
    loss_fn,
    share=_share,
    arrives=lambda x: x.requires_grad_(),
    result=lambda losses, shares: sum(loss * part for loss, part in zip(losses, shares)),  # noqa: B905
    before_backward=lambda stage: None,
    back=lambda x, y, grad: x.grad,
    send_forward=lambda comm, y: comm.isend(y, comm.rank + 1),
    send_back=lambda comm, grad: comm.isend(grad, comm.rank - 1),
    first_sends=lambda comm, grad: None,
    done=lambda handle: handle.wait() if handle else None,
    keep=None,
):
    """As it should be, but for what is passed."""
    rank, last = comm.rank, comm.size - 1
    tokens = [(target != -100).sum() for target in targets or ()]
    kept, returning, losses, shares = {}, [], [], []
    for _, kind, m in actions:
        if kind == "F":
            x = xs[m] if rank == 0 else arrives(comm.irecv(xs[m], rank - 1).wait())
            y = stage(x)
            if rank == last:
                loss, part = loss_fn(y, targets[m]), share(tokens, targets, m)
                losses.append(loss.detach())
                shares.append(part)
                kept[m] = x, loss * part, None
            else:
                kept[m] = x, y, send_forward(comm, y.detach())
            if keep is not None:
                keep.append(y)
        else:
            x, y, handle = kept.pop(m)
            grad = None if rank == last else comm.irecv(torch.empty_like(y), rank + 1).wait()
            done(handle)
            before_backward(stage)
            torch.autograd.backward(y, grad)
            if rank > 0:
                returning.append(send_back(comm, back(x, y, grad)))
            else:
                first_sends(comm, y)
    for handle in returning:
        if handle:
            handle.wait()
    return result(losses, shares)


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("06.4", "basic", "sum-not-mean")
def adds_the_losses(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, share=lambda tokens, targets, m: 1)


@mutant("06.4", "basic", "last-micro-batch-only")
def clears_the_gradients_each_time(comm, actions, stage, xs, targets, loss_fn):
    def clear(stage):
        for parameter in stage.parameters():
            parameter.grad = None

    return _run(comm, actions, stage, xs, targets, loss_fn, before_backward=clear)


@mutant("06.4", "basic", "last-micro-batch-only")
def overwrites_the_gradients(comm, actions, stage, xs, targets, loss_fn):
    (weight,) = stage.parameters()

    def begin(stage):
        weight.grad = torch.zeros_like(weight)

    return _run(comm, actions, stage, xs, targets, loss_fn, before_backward=begin)


@mutant("06.4", "basic", "wrong-gradient-back")
def hands_on_the_gradient_that_came(comm, actions, stage, xs, targets, loss_fn):
    def back(x, y, grad):
        return torch.ones_like(x) if grad is None else grad

    return _run(comm, actions, stage, xs, targets, loss_fn, back=back)


@mutant("06.4", "basic", "input-wants-no-gradient")
def forgets_requires_grad(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, arrives=lambda x: x)


@mutant("06.4", "basic", "forgets-the-backward")
def goes_forward_only(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, [a for a in actions if a[1] == "F"], stage, xs, targets, loss_fn, done=lambda handle: None)


# ---- loss ------------------------------------------------------------------------------------------------------------


@mutant("06.4", "loss", "last-micro-batch-only")
def returns_the_last_loss(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, result=lambda losses, shares: losses and losses[-1])


@mutant("06.4", "loss", "sum-not-mean")
def returns_the_sum_of_the_means(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, result=lambda losses, shares: sum(losses))


@mutant("06.4", "loss", "no-result")
def returns_nothing(comm, actions, stage, xs, targets, loss_fn):
    _run(comm, actions, stage, xs, targets, loss_fn)


# ---- 1F1B ------------------------------------------------------------------------------------------------------------


@mutant("06.4", "1F1B", "blocks-while-sending")
def waits_for_every_send(comm, actions, stage, xs, targets, loss_fn):
    def send_forward(comm, y):
        comm.send(y, comm.rank + 1)

    def send_back(comm, grad):
        comm.send(grad, comm.rank - 1)

    return _run(comm, actions, stage, xs, targets, loss_fn, send_forward=send_forward, send_back=send_back)


@mutant("06.4", "1F1B", "own-order")
def runs_gpipe_whatever_it_is_told(comm, actions, stage, xs, targets, loss_fn):
    in_order = sorted(actions, key=lambda action: ("FB".index(action[1]), action[2]))
    return _run(comm, in_order, stage, xs, targets, loss_fn)


@mutant("06.4", "1F1B", "own-order")
def finishes_each_micro_batch_first(comm, actions, stage, xs, targets, loss_fn):
    in_order = sorted(actions, key=lambda action: (action[2], "FB".index(action[1])))
    return _run(comm, in_order, stage, xs, targets, loss_fn)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@mutant("06.4", "tokens", "mean-of-means")
def divides_by_the_number_of_micro_batches(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, share=lambda tokens, targets, m: 1 / len(targets))


@mutant("06.4", "tokens", "padding-counts")
def counts_rows(comm, actions, stage, xs, targets, loss_fn):
    def share(tokens, targets, m):
        return len(targets[m]) / sum(map(len, targets))

    return _run(comm, actions, stage, xs, targets, loss_fn, share=share)


@mutant("06.4", "tokens", "padding-counts")
def divides_by_all_rows(comm, actions, stage, xs, targets, loss_fn):
    def share(tokens, targets, m):
        return tokens[m] / sum(map(len, targets))

    return _run(comm, actions, stage, xs, targets, loss_fn, share=share)


# ---- frees -----------------------------------------------------------------------------------------------------------


@mutant("06.4", "frees", "keeps-activations")
def lists_all_outputs(comm, actions, stage, xs, targets, loss_fn):
    return _run(comm, actions, stage, xs, targets, loss_fn, keep=[])


@mutant("06.4", "frees", "keeps-activations")
def waits_for_sends_at_the_end(comm, actions, stage, xs, targets, loss_fn):
    handles = []
    found = _run(comm, actions, stage, xs, targets, loss_fn, done=handles.append)
    for handle in handles:
        if handle:
            handle.wait()
    return found


@mutant("06.4", "frees", "keeps-activations")
def keeps_all_sends_in_a_list(comm, actions, stage, xs, targets, loss_fn):
    sent = []

    def send_forward(comm, y):
        sent.append((y, comm.isend(y, comm.rank + 1)))
        return sent[-1][1]

    return _run(comm, actions, stage, xs, targets, loss_fn, send_forward=send_forward)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("06.4", "messages", "gradient-of-data")
def sends_the_gradient_of_the_data(comm, actions, stage, xs, targets, loss_fn):
    def round_the_corner(comm, y):
        comm.isend(torch.zeros_like(y), comm.size - 1, tag=7)

    return _run(comm, actions, stage, xs, targets, loss_fn, first_sends=round_the_corner)


@mutant("06.4", "messages", "moves-more-than-needed")
def sends_each_output_twice(comm, actions, stage, xs, targets, loss_fn):
    def send_forward(comm, y):
        comm.isend(y.clone(), comm.rank + 1, tag=7)
        return comm.isend(y, comm.rank + 1)

    return _run(comm, actions, stage, xs, targets, loss_fn, send_forward=send_forward)


@mutant("06.4", "messages", "moves-more-than-needed")
def sends_the_activation_back_too(comm, actions, stage, xs, targets, loss_fn):
    def send_back(comm, grad):
        comm.isend(torch.cat([grad, grad]), comm.rank - 1, tag=7)
        return comm.isend(grad, comm.rank - 1)

    return _run(comm, actions, stage, xs, targets, loss_fn, send_back=send_back)
