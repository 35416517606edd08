"""A tensor-parallel plan: which role each module of a model has, as data, and whether it fits the model and the ranks.

A *region* begins where a tensor enters column-parallel layers and ends behind a row-parallel one. Inside, each rank has
its share of the columns; between regions all ranks have the same tensor, or, with sequence parallelism, each has its
share of the tokens.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import nn


@dataclass(frozen=True)
class Enter:
    """A module whose first argument enters a region, once for all column-parallel layers in it."""


@dataclass(frozen=True)
class Column:
    """nn.Linear with its outputs cut, W: [D, F/tp] as mathematics, by whole heads where it has `heads` of them.

    repeat: with more ranks than heads, several ranks hold the same head: keys and values that several queries share.
    """

    heads: int | None = None
    repeat: bool = False


@dataclass(frozen=True)
class Row:
    """nn.Linear with its inputs cut, W: [F/tp, D]. Its output is summed over the ranks; a bias is added once."""


@dataclass(frozen=True)
class Vocab:
    """nn.Embedding with its rows cut, [V/tp, D], or the nn.Linear that ends in logits with its outputs cut.

    V need not divide: the last ranks may have fewer rows, and the logits that they lack are -inf.
    """


@dataclass(frozen=True)
class Between:
    """A norm or a dropout between regions. With sequence parallelism it sees this rank's tokens only."""


@dataclass(frozen=True)
class Inside:
    """A norm or a dropout inside a region. A dropout's input is this rank's slice, along dim, of a larger tensor."""

    dim: int = -1


Role = Enter | Column | Row | Vocab | Between | Inside
Plan = Mapping[str, Role]

# exactly these, no subclasses: their forward would be lost
TYPES: Mapping[type, tuple[type, ...]] = MappingProxyType(
    {Column: (nn.Linear,), Row: (nn.Linear,), Vocab: (nn.Linear, nn.Embedding)}
)


def copies(role: Role, ranks: int) -> int:
    """How many ranks, side by side, hold the same slice.

    >>> copies(Column(heads=2, repeat=True), 8), copies(Column(heads=8), 8)
    (4, 1)
    """
    return ranks // role.heads if isinstance(role, Column) and role.repeat and role.heads and ranks > role.heads else 1


def match(plan: Plan, module: nn.Module) -> dict[str, Role]:
    """The roles by full names. A star in the plan stands for one part of a name, such as a block's number.

    Raises ValueError where a line of the plan names no module, or two name one; TypeError for what is no role.
    """
    named = dict(module.named_modules())
    roles: dict[str, Role] = {}
    for pattern, role in plan.items():
        if not isinstance(role, Role):
            raise TypeError(f"plan[{pattern!r}] must be a role such as Column() or Row(), not {role!r}")
        names = [name for name in named if _matches(name, pattern)]
        if not names:
            close = difflib.get_close_matches(pattern, named, 3)
            raise ValueError(
                f"no module is named {pattern!r}" + (f": did you mean {' or '.join(close)}?" if close else "")
            )
        for name in names:
            if name in roles:
                raise ValueError(f"two lines of the plan name the module {name!r}: {roles[name]} and {role}")
            roles[name] = role
    return roles


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def around(name: str, roles: Mapping[str, Role]) -> str | None:
    """The innermost module with the role Enter that holds the module of this name."""
    outer = [
        each for each, role in roles.items() if isinstance(role, Enter) and (not each or name.startswith(f"{each}."))
    ]
    return max((each for each in outer if each != name), key=len, default=None)


def check_plan(roles: Mapping[str, Role], module: nn.Module, ranks: int, sequence: bool) -> None:
    """Raise ValueError or TypeError, with what to change, unless the plan fits the module and its sizes can be cut."""
    named = dict(module.named_modules())
    for name, role in roles.items():
        _check_type(name, named[name], role)
        _check_sizes(name, named[name], role, ranks)
        if isinstance(role, Enter) and not any(around(n, roles) == name for n, r in roles.items() if _is_column(r)):
            raise ValueError(f"{name}: a region begins here and no column-parallel layer is in it")
    _check_tied(roles, named)
    _check_complete(roles, named, sequence)


def _is_column(role: Role) -> bool:
    return isinstance(role, Column | Vocab)


def _check_type(name: str, layer: nn.Module, role: Role) -> None:
    wanted = TYPES.get(type(role))
    if wanted and type(layer) not in wanted:
        kinds = " or ".join(f"nn.{each.__name__}" for each in wanted)
        raise TypeError(f"{name}: {role} is for a plain {kinds}, and this is {type(layer).__name__}")
    if isinstance(role, Between | Inside) and any(layer.children()):
        raise TypeError(
            f"{name}: {role} is for a single norm or dropout, and {type(layer).__name__} has parts: name those"
        )
    if isinstance(layer, nn.modules.dropout._DropoutNd) and type(layer) is not nn.Dropout:
        raise TypeError(
            f"{name}: only nn.Dropout can be cut so that its mask stays the same, not {type(layer).__name__}"
        )
    if isinstance(layer, nn.Embedding) and isinstance(role, Vocab):
        for option, plain in (
            ("padding_idx", None),
            ("max_norm", None),
            ("scale_grad_by_freq", False),
            ("sparse", False),
        ):
            if getattr(layer, option) != plain:
                raise ValueError(f"{name}: an embedding with {option} cannot be cut: build it without")
    if any(p.is_meta for p in layer.parameters(recurse=False)):
        raise ValueError(f"{name} is on the meta device and has no weights to cut: build the module on a real one")


def _check_sizes(name: str, layer: nn.Module, role: Role, ranks: int) -> None:
    if isinstance(role, Column) and isinstance(layer, nn.Linear):
        if role.heads is not None and layer.out_features % role.heads:
            raise ValueError(f"{name}: {layer.out_features} outputs are not {role.heads} heads of one size")
        what = "outputs" if role.heads is None else "heads"
        number = layer.out_features if role.heads is None else role.heads
        if number % ranks and not (role.repeat and ranks % number == 0):
            raise ValueError(f"{name}: {refusal(number, what, ranks, role.repeat)}")
    if isinstance(role, Row) and isinstance(layer, nn.Linear) and layer.in_features % ranks:
        raise ValueError(f"{name}: {refusal(layer.in_features, 'inputs', ranks)}")


def refusal(number: int, what: str, ranks: int, repeat: bool = False) -> str:
    """What to say of a number that cannot be shared out evenly: both numbers, and the nearest ones that would do.

    >>> refusal(6, "heads", 4)
    '6 heads cannot be shared out to 4 ranks: use 3 or 6 ranks, or 4 or 8 heads'
    """
    fits = lambda number, ranks: number % ranks == 0 or (repeat and ranks % number == 0)
    right_ranks = [r for r in range(1, max(number, ranks) * 2 + 1) if fits(number, r)]
    right_numbers = [n for n in range(1, number + ranks + 1) if fits(n, ranks)]
    either = lambda found, target: " or ".join(str(n) for n in _nearest(found, target))
    return (
        f"{number} {what} cannot be shared out to {ranks} ranks: "
        f"use {either(right_ranks, ranks)} ranks, or {either(right_numbers, number)} {what}"
    )


def _nearest(found: list[int], target: int) -> list[int]:
    below, above = [n for n in found if n < target], [n for n in found if n > target]
    return below[-1:] + above[:1]


def _check_tied(roles: Mapping[str, Role], named: Mapping[str, nn.Module]) -> None:
    """A matrix that two layers share is cut once, so both must cut it alike."""
    seen: dict[nn.Parameter, tuple[str, object]] = {}
    for name, layer in named.items():
        for key, parameter in layer.named_parameters(recurse=False):
            role = roles.get(name)
            cut = (role, key) if isinstance(role, Column | Row | Vocab) else None
            path = f"{name}.{key}" if name else key
            first, other = seen.setdefault(parameter, (path, cut))
            if cut != other:
                raise ValueError(f"{first} and {path} are one parameter, which the plan cuts in two ways: untie them")


def _check_complete(roles: Mapping[str, Role], named: Mapping[str, nn.Module], sequence: bool) -> None:
    """Refuse what would go wrong silently: a layer without a role whose gradient, or mask, is a part on each rank."""
    for name, layer in named.items():
        if isinstance(roles.get(name), Column | Row | Vocab | Between | Inside):
            continue
        drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        trains = any(p.requires_grad for p in layer.parameters(recurse=False))
        if (drops or trains) and (sequence or around(name, roles) is not None):
            where = "with sequence=True every layer needs one" if sequence else f"it is inside {around(name, roles)!r}"
            raise ValueError(
                f"{name or type(layer).__name__} has no role in the plan, and {where}: Between() if all ranks should "
                "see the same there, Inside() if each sees its slice"
            )
