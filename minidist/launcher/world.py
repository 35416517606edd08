"""Joining a world: the process group, the seeds, and this rank's Comm."""

import datetime
import hashlib
import random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from minidist.comm.comm import Comm


def join(
    backend: str, meet: str, rank: int, size: int, timeout: float, seed: int, device: torch.device, **extras: Any
) -> Comm:
    """Make the default process group, unless there is one, and return the Comm of all its ranks.

    meet: torch's init_method, where the ranks find each other; empty for a world of one. timeout: seconds that a
    collective may take. extras: more of Comm's arguments.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized() and dist.get_backend() != backend:
        raise ValueError(f"this process is in a {dist.get_backend()} world already; it cannot join a {backend} one")
    if not dist.is_initialized():
        limit = datetime.timedelta(seconds=timeout)
        where: dict[str, Any] = {"init_method": meet} if meet else {"store": HashStore()}
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=limit, **where)
    generator = torch.Generator(device).manual_seed(own_seed(seed, rank))
    return Comm(dist.group.WORLD, tuple(range(size)), rank, device=device, generator=generator, **extras)


def seed_generators(seed: int) -> None:
    """Start the global generators of torch, random and numpy at ``seed``: the same on every rank."""
    torch.default_generator.manual_seed(seed)
    if torch.version.cuda is not None and torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)  # what torch.manual_seed does as well, 20 ms slower
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def own_seed(seed: int, rank: int) -> int:
    """The seed of ``world.generator``: different for every rank and every seed.

    >>> len({own_seed(seed, rank) for seed in range(50) for rank in range(50)})
    2500
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=8).digest(), "big") >> 1
