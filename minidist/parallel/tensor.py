"""Tensor parallelism: the ranks hold slices of each layer's matrices, and compute with them on the same tokens.

y = (x A) B with A cut by columns and B by rows is a sum over the ranks: each computes a term from its share of the
columns (of heads in attention, of hidden numbers in the feed-forward pair), and no number is needed from the others in
between. So a layer's two such regions take an all-reduce each going forward, at the end, and one each going back, at
the beginning:

    x: [B, S, D]   A: [D, F/tp]   x A: [B, S, F/tp]   B: [F/tp, D]   x A B: [B, S, D] {+tp}  -all-reduce->  [B, S, D]

With `sequence=True` the same plan has other borders. Between regions a rank has its T/tp of the T = B S tokens, flat:

    x: [T/tp, D]  -all-gather->  [B, S, D]  ...  [B, S, D] {+tp}  -reduce-scatter->  [T/tp, D]

These are the same bytes (`md.cost.tensor_parallel_layer`), and norms, dropouts and what they keep for the backward pass
shrink to a tp-th.

The model is plain torch and knows nothing of this. A plan (`minidist.sharded.roles`) says which module has which role;
the module is then converted in place, into the layers of `minidist.sharded.layers`.

Sources: Shoeybi et al., Megatron-LM (arXiv 1909.08053); Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models (arXiv 2205.05198), 4.2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.comm.partition import lengths, partition
from minidist.models.gpt import GPT, GPTConfig
from minidist.placement import Replicate, Shard, place, redistribute
from minidist.replicas import broadcast_tensors, check_same_module
from minidist.sharded.layers import (
    Border,
    ColumnLinear,
    Region,
    RowLinear,
    SliceDropout,
    TokenDropout,
    VocabEmbedding,
    become,
)
from minidist.sharded.roles import (
    Between,
    Column,
    Enter,
    Inside,
    Plan,
    Role,
    Row,
    Vocab,
    around,
    check_plan,
    copies,
    match,
)


def gpt_plan(config: GPTConfig) -> Plan:
    """The plan of `GPT`."""
    shared = Column(heads=config.query_groups, repeat=True)
    return {
        "embed": Vocab(),
        "blocks.*.attn_norm": Between(),
        "blocks.*.attn": Enter(),
        "blocks.*.attn.q": Column(heads=config.heads),
        "blocks.*.attn.k": shared,
        "blocks.*.attn.v": shared,
        "blocks.*.attn.out": Row(),
        "blocks.*.mlp_norm": Between(),
        "blocks.*.mlp": Enter(),
        **({"blocks.*.mlp.gate": Column()} if config.mlp == "swiglu" else {}),
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),
        "blocks.*.dropout": Between(),
        "norm": Between(),
        "head": Vocab(),
    }


def tensor_parallel(
    module: nn.Module,
    comm: Comm,
    plan: Plan | None = None,
    sequence: bool = False,
    seed: int | None = None,
    axis: str = "tp",
) -> Any:
    """Cut `module` over comm's ranks, in place, and return it. All ranks pass the whole module.

        model = md.tensor_parallel(md.GPT(config), mesh["tp"])
        logits = model(tokens)                                                  # [B, S, V/tp]
        md.token_loss(logits, targets, mesh["dp"], tp=mesh["tp"]).backward()

    All ranks of comm must get the same batches. Ranks that get others are another axis, averaged
    over by wrapping the result in DataParallel. Make the optimizer afterwards: the parameters are
    new ones.

    plan: names of modules (a star for any one part) -> roles, which are in `md.roles`, such as
    {"up": md.roles.Column(), "down": md.roles.Row()}; None: `gpt_plan`. A module without a role
    computes the same on all ranks. sequence: between regions each rank has its part of the
    tokens, flat, [t, D]. seed: of what is random in forward passes. Dropout drops what it would in
    one process seeded so, whatever the number of ranks, and something else in each other replica.
    None: `torch.initial_seed()` of comm's first rank. axis: the name under which the parameters
    note their placements.

    Weights and buffers become those of comm's first rank. Raises, before anything is sent,
    ValueError or TypeError for a plan that does not fit the module and for sizes that cannot be
    cut; RuntimeError, on all ranks, if their modules or plans differ.
    """
    if not isinstance(comm, Comm):
        raise TypeError(f"comm is an axis of the mesh, as mesh['tp'], not {type(comm).__name__}")
    if plan is None:
        if not isinstance(module, GPT):
            name = type(module).__name__
            raise ValueError(f"only GPT has a plan: pass plan= for {name}, or cut, then wrap")
        plan = gpt_plan(module.config)
    roles = match(plan, module)
    check_plan(roles, module, comm.size, sequence)
    told = [*(f"{name}: {role}" for name, role in roles.items()), f"sequence={sequence}"]
    check_same_module(module, comm, told)
    broadcast_tensors([*module.parameters(), *module.buffers()], comm)

    border = Border(comm, sequence, axis)
    _cut_parameters(roles, module, border)
    _open_regions(roles, module, border)
    for name, role in roles.items():
        _convert(module.get_submodule(name), role, border)
    _share_randomness(module, border, seed)
    return module


# ---- its steps -------------------------------------------------------------------------------------------------------


def _cut_parameters(roles: Mapping[str, Role], module: nn.Module, border: Border) -> None:
    """Replace every parameter that a role cuts by this rank's slice of it; one that two layers share, once."""
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for name, role in roles.items():
        layer = module.get_submodule(name)
        for key, parameter in list(layer.named_parameters(recurse=False)):
            placement = _placement(role, key, border.comm.size)
            if placement is None:
                continue
            if parameter not in cut:
                mine = redistribute(parameter.detach(), Replicate(), placement, border.comm)
                cut[parameter] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
                place(cut[parameter], border.axis, placement, border.comm.rank)
            setattr(layer, key, cut[parameter])


def _placement(role: Role, key: str, ranks: int) -> Shard | None:
    """How a role cuts the parameter `key` of its layer. nn.Linear holds W', so columns are dim 0 and rows dim 1."""
    if isinstance(role, Row):
        return Shard(1) if key == "weight" else None
    return Shard(0, copies(role, ranks)) if isinstance(role, Column | Vocab) else None


def _column(role: Role, layer: nn.Module) -> bool:
    return isinstance(role, Column | Vocab) and isinstance(layer, nn.Linear)


def _open_regions(roles: Mapping[str, Role], module: nn.Module, border: Border) -> None:
    """Give each column-parallel layer the region that it is in; one that is in none is a region of its own."""
    named = dict(module.named_modules())
    entered = {name: Region(border, named[name]) for name, role in roles.items() if isinstance(role, Enter)}
    holders: dict[int, Comm | None] = {1: None}
    for name, role in roles.items():
        if _column(role, named[name]):
            held = copies(role, border.comm.size)
            if held not in holders:
                holders[held] = _holders(border.comm, held)
            outer = around(name, roles)
            region = Region(border) if outer is None else entered[outer]
            become(named[name], ColumnLinear, region=region, number=region.add(named[name], holders[held]))
            if holders[held] is not None and isinstance(bias := named[name].bias, nn.Parameter):
                border.sum_grad(bias, "shared heads", holders[held])


def _holders(comm: Comm, copies: int) -> Comm | None:
    """The Comm of the ranks that hold the same slice as this one."""
    return comm.subgroups([range(first, first + copies) for first in range(0, comm.size, copies)], name="shared heads")


def _convert(layer: nn.Module, role: Role, border: Border) -> None:
    """Make it the sharded kind of layer."""
    ranks, rank = border.comm.size, border.comm.rank
    if isinstance(layer, ColumnLinear):
        missing = lengths(layer.out_features, ranks)[0] - len(layer.weight) if isinstance(role, Vocab) else 0
        become(layer, ColumnLinear, out_features=len(layer.weight), missing=missing)
    elif isinstance(layer, nn.Linear) and isinstance(role, Row):
        become(layer, RowLinear, in_features=layer.weight.shape[1], border=border)
        if border.sequence and layer.bias is not None:
            border.sum_grad(layer.bias, "row bias")
    elif isinstance(layer, nn.Embedding):
        words, rows = layer.num_embeddings, partition(layer.num_embeddings, ranks)[rank]
        become(layer, VocabEmbedding, border=border, rows=rows, words=words, num_embeddings=len(layer.weight))
    elif isinstance(role, Inside) or (isinstance(role, Between) and border.sequence):
        if isinstance(layer, nn.Dropout):
            kind = SliceDropout if isinstance(role, Inside) else TokenDropout
            become(layer, kind, border=border, dim=getattr(role, "dim", 0))
        for parameter in layer.parameters():
            border.sum_grad(parameter, "norm gradients")


# ---- random numbers --------------------------------------------------------------------------------------------------


def replica_number(ranks: Sequence[int]) -> int:
    """Which of a mesh's groups along one axis this is, by its world ranks.

    >>> [replica_number(ranks) for ranks in ((0, 1), (2, 3), (4, 5))], [replica_number(r) for r in ((0, 2), (1, 3))]
    ([0, 1, 2], [0, 1])
    """
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block, offset = divmod(ranks[0], stride * len(ranks))
    return block * stride + offset


def _share_randomness(module: nn.Module, border: Border, seed: int | None) -> None:
    """During the module's forward, torch's global generators are in a state that all ranks of comm share.

    Then what is random on every rank alike needs no thought, whatever else a rank draws between forward passes; and
    torch.utils.checkpoint of parts of the module, which puts the global generators back for a second forward pass,
    works as ever. Of the whole module it could not: the second pass would begin with numbers of its own.
    """
    drops = any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules())
    comm = border.comm
    if seed is None:
        first = torch.tensor(torch.initial_seed() % 2**63, device=comm.device)
        seed = int(comm.broadcast(first, src=0))
    generator = torch.Generator(comm.device).manual_seed(seed + replica_number(comm.ranks))
    shared, outside = generator.get_state(), None

    def begin(*_: Any) -> None:
        nonlocal outside
        if drops and module.training and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the whole module runs again in a backward pass, and would drop something else: "
                "checkpoint its parts, such as blocks"
            )
        outside = _state(comm.device)
        _set_state(shared, comm.device)
        border.shape = None

    def end(*_: Any) -> None:
        nonlocal shared, outside
        if outside is not None:  # else a hook before ours raised
            shared = _state(comm.device)
            _set_state(outside, comm.device)
            outside = None

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)


def _state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
