"""05.3, by heads. `_attention` is the right way, with a switch for each mistake."""

import torch
import torch.nn.functional as F

import minidist as md
from grading.mutants import mutant


def column(comm, x, weight, bias=None):
    raise NotImplementedError  # the check puts a right one in its place


def row(comm, x, weight, bias=None):
    raise NotImplementedError


def _refuse(comm, heads):
    if heads % comm.size:
        raise ValueError(f"{heads} heads cannot be divided among {comm.size} ranks")


def _columns(comm, x, weights):
    return column(comm, x, torch.cat(weights)).chunk(len(weights), dim=-1)


def _rows(comm, y, out):
    return row(comm, y.transpose(1, 2).flatten(2), out)


def _by_head(part, size):
    return part.unflatten(-1, (-1, size)).transpose(1, 2)


def _attention(
    comm, x, qkv, out, heads, project=_columns, merge=_rows, split=_by_head, refuse=_refuse, across=False, causal=True
):
    refuse(comm, heads)
    size, own = x.shape[-1] // heads, md.partition(heads, comm.size)[comm.rank]
    mine = slice(own.start * size, own.stop * size)
    weights = [third[mine] for third in qkv.chunk(3)]
    if across:
        weights = list(qkv.chunk(comm.size)[comm.rank].chunk(3))
    q, k, v = (split(part, size) for part in project(comm, x, weights))
    return merge(comm, F.scaled_dot_product_attention(q, k, v, is_causal=causal), out[:, mine])


# ---- basic -----------------------------------------------------------------------------------------------------------


@mutant("05.3", "basic", "local-is-global")
def keeps_its_part(comm, x, qkv, out, heads):
    def merge(comm, y, out):
        return F.linear(y.transpose(1, 2).flatten(2), out)

    return _attention(comm, x, qkv, out, heads, merge=merge)


@mutant("05.3", "basic", "cuts-across-heads")
def cuts_qkv_into_blocks(comm, x, qkv, out, heads):
    return _attention(comm, x, qkv, out, heads, across=True)


@mutant("05.3", "basic", "not-causal")
def sees_the_future(comm, x, qkv, out, heads):
    return _attention(comm, x, qkv, out, heads, causal=False)


@mutant("05.3", "basic", "reshapes-for-transpose")
def reshapes_there_and_back(comm, x, qkv, out, heads):
    def split(part, size):
        return part.reshape(part.shape[0], -1, part.shape[1], size)

    def merge(comm, y, out):
        return row(comm, y.reshape(*x.shape[:2], -1), out)

    return _attention(comm, x, qkv, out, heads, split=split, merge=merge)


@mutant("05.3", "basic", "reshapes-for-transpose")
def reshapes_on_the_way_back(comm, x, qkv, out, heads):
    return _attention(comm, x, qkv, out, heads, merge=lambda comm, y, out: row(comm, y.reshape(*x.shape[:2], -1), out))


@mutant("05.3", "basic", "rank-does-it-all")
def computes_all_heads(comm, x, qkv, out, heads):
    size = x.shape[-1] // heads
    q, k, v = (_by_head(part, size) for part in F.linear(x, qkv).chunk(3, dim=-1))
    return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), out)


# ---- gradients -------------------------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad.clone()), None


@mutant("05.3", "gradients", "local-is-global")
def projects_without_the_pair(comm, x, qkv, out, heads):
    def project(comm, x, weights):
        return F.linear(x, torch.cat(weights)).chunk(3, dim=-1)

    return _attention(comm, x, qkv, out, heads, project=project)


@mutant("05.3", "gradients", "sums-twice")
def sums_once_more(comm, x, qkv, out, heads):
    return _attention(comm, _Sum.apply(x, comm), qkv, out, heads)


@mutant("05.3", "gradients", "backward-follows")
def takes_the_data_of_the_weight(comm, x, qkv, out, heads):
    return _attention(comm, x, qkv.data, out, heads)


# ---- messages --------------------------------------------------------------------------------------------------------


@mutant("05.3", "messages", "one-message-each")
def projects_three_times(comm, x, qkv, out, heads):
    def project(comm, x, weights):
        return [column(comm, x, weight) for weight in weights]

    return _attention(comm, x, qkv, out, heads, project=project)


@mutant("05.3", "messages", "one-message-each")
def projects_values_apart(comm, x, qkv, out, heads):
    def project(comm, x, weights):
        return [*column(comm, x, torch.cat(weights[:2])).chunk(2, dim=-1), column(comm, x, weights[2])]

    return _attention(comm, x, qkv, out, heads, project=project)


@mutant("05.3", "messages", "one-message-each")
def adds_head_after_head(comm, x, qkv, out, heads):
    def merge(comm, y, out):
        pieces = zip(y.unbind(1), out.chunk(y.shape[1], dim=1), strict=True)
        return sum(row(comm, head, columns) for head, columns in pieces)

    return _attention(comm, x, qkv, out, heads, merge=merge)


# ---- refuses ---------------------------------------------------------------------------------------------------------


@mutant("05.3", "refuses", "uneven-heads")
def leaves_a_rank_idle(comm, x, qkv, out, heads):
    return _attention(comm, x, qkv, out, heads, refuse=lambda comm, heads: None)


@mutant("05.3", "refuses", "fails-deep-inside")
def divides_and_hopes(comm, x, qkv, out, heads):
    if x.shape[-1] // comm.size % (x.shape[-1] // heads):
        torch.zeros(x.shape[-1] // comm.size).view(-1, x.shape[-1] // heads)
    return _attention(comm, x, qkv, out, heads)


@mutant("05.3", "refuses", "error-without-numbers")
def says_little(comm, x, qkv, out, heads):
    def refuse(comm, heads):
        if heads % comm.size:
            raise ValueError("wrong number of heads")

    return _attention(comm, x, qkv, out, heads, refuse=refuse)


@mutant("05.3", "refuses", "not-all-join")
def refuses_on_one_rank(comm, x, qkv, out, heads):
    def refuse(comm, heads):
        if comm.rank == 0:
            _refuse(comm, heads)

    return _attention(comm, x, qkv, out, heads, refuse=refuse)
