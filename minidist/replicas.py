"""Replicas: copies of a module, one a rank, that start equal and have to stay equal."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from minidist.comm.comm import Comm
from minidist.placement import parts


def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, src: int = 0) -> None:
    """Give every rank the tensors of rank src: one message for each dtype.

    Autograd does not notice (`data`): a graph that saved one of them remains valid, such as that of BatchNorm, which
    saves its running statistics and in training has no use for their values.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.data)
    for group in groups.values():
        flat = comm.broadcast(torch.cat([t.reshape(-1) for t in group]), src)
        for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def persistent_buffers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and name of every buffer that `state_dict` saves. A name and not a tensor, since a module may replace it.

    >>> persistent_buffers(nn.BatchNorm1d(1))[0][1]
    'running_mean'
    """
    saved = module.state_dict(keep_vars=True)
    return [
        (owner, name)
        for path, owner in module.named_modules()
        for name, _ in owner.named_buffers(recurse=False)
        if (f"{path}.{name}" if path else name) in saved
    ]


def check_same_module(module: nn.Module, comm: Comm, also: Iterable[str] = ()) -> None:
    """Raise, on all ranks, unless they have parameters and buffers of the same names, shapes and dtypes.

    also: further lines of text that the ranks must agree on.
    """
    lines = [
        f"{name} {list(p.shape)} {p.dtype} trained={p.requires_grad}" + "".join(map(_part, parts(p).items()))
        for name, p in module.named_parameters()
    ]
    lines += [f"{name} {list(b.shape)} {b.dtype} buffer" for name, b in module.named_buffers()]
    lines += also
    text = torch.tensor([*"\n".join(lines).encode(), 0], dtype=torch.uint8, device=comm.device)
    everyone = bytes(comm.all_gather(text).tolist()).decode().split("\0")[:-1]
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            mine, other = ([*t.splitlines(), "nothing more"] for t in (everyone[0], theirs))
            a, b = next((a, b) for a, b in zip(mine, other, strict=False) if a != b)
            cut = next((axis for p in module.parameters() for axis in parts(p)), None)
            hint = f". What is cut over {cut!r} is the same along another axis of the mesh: pass that" if cut else ""
            raise RuntimeError(f"the ranks wrap different modules: rank 0 has {a}, where rank {rank} has {b}{hint}")


def _part(axis_and_part: tuple[str, int]) -> str:
    return " part {1} over {0!r}".format(*axis_and_part)


def check_replicas(module: nn.Module, comm: Comm) -> None:
    """Compare the parameters bit by bit over the ranks, sending 8 bytes for each. Every rank calls.

    Raises: RuntimeError, on all ranks, that names what differs, and where.
    """
    names = [name for name, _ in module.named_parameters()]
    prints = torch.tensor([_fingerprint(p) for p in module.parameters()], device=comm.device)
    everyone = comm.all_gather(prints[None])  # [ranks, parameters]
    differs = everyone != everyone[0]
    if drifted := differs.any(0).nonzero().flatten().tolist():
        ranks = differs[:, drifted[0]].nonzero().flatten().tolist()
        more = f" (and {len(drifted) - 1} more)" if len(drifted) > 1 else ""
        raise RuntimeError(
            f"the replicas have drifted apart: {names[drifted[0]]}{more} differs from rank 0's on ranks {ranks}. Usual "
            "causes: an optimizer step after no_sync alone, a weight written on some ranks, other random numbers"
        )


def _fingerprint(tensor: Tensor) -> int:
    """64 bits of a hash of the tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
