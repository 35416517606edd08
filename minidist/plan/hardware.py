"""What the ranks run on: chips, links and clusters, with the unit in every field's name. Bytes and seconds, decimal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from minidist.plan import check

_TABLES = "https://github.com/stas00/ml-engineering, compute/accelerator and network (snapshot of 2026-08-22)"


@dataclass(frozen=True)
class Chip:
    """One accelerator: dense 16-bit peak, memory size and memory bandwidth; what is not given is not a limit.

    >>> Chip(flops_per_s=1e12).seconds(2e9)
    0.002
    """

    flops_per_s: float = math.inf
    memory_bytes: float = math.inf
    memory_bytes_per_s: float = math.inf
    name: str = "chip"
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check.positive(self, "flops_per_s", "memory_bytes", "memory_bytes_per_s")

    def seconds(self, flops: float) -> float:
        """Seconds that many floating-point operations take at the peak rate."""
        return flops / self.flops_per_s


@dataclass(frozen=True)
class Link:
    """One direction of a connection: a message of n bytes takes alpha_s + n / bytes_per_s (Hockney's model).

    >>> Link(alpha_s=1e-6, bytes_per_s=1e9).seconds(1_000_000)
    0.001001
    """

    alpha_s: float = 0.0
    bytes_per_s: float = math.inf
    source: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check.positive(self, "bytes_per_s")
        check.not_negative(self, "alpha_s")

    @property
    def beta_s_per_byte(self) -> float:
        """Seconds per byte."""
        return 1 / self.bytes_per_s

    def seconds(self, nbytes: float) -> float:
        """Seconds one message takes."""
        return self.alpha_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Machines of equal chips; ranks fill it machine by machine.

    inside: the link from a chip to any other of its machine. between: the link from a chip to one of another machine.

    >>> slow, fast = Link(1e-5, 1e9), Link(1e-6, 1e11)
    >>> cluster = Cluster(machines=2, chips=4, inside=fast, between=slow)
    >>> cluster.ranks, cluster.machine(5), cluster.link(4, 7) is fast, cluster.link(3, 4) is slow
    (8, 1, True, True)
    """

    machines: int = 1
    chips: int = 1
    chip: Chip = Chip()
    inside: Link = Link()
    between: Link = Link()

    def __post_init__(self) -> None:
        check.whole(self, "machines", "chips")

    @property
    def ranks(self) -> int:
        """How many chips there are."""
        return self.machines * self.chips

    def machine(self, rank: int) -> int:
        """The machine a rank runs on. Raises ValueError for a rank the cluster has no chip for."""
        if not 0 <= rank < self.ranks:
            raise ValueError(
                f"rank {rank} has no chip: {self.machines} machines of {self.chips} chips take {self.ranks} ranks"
            )
        return rank // self.chips

    def link(self, src: int, dst: int) -> Link:
        """The link from one rank to another. Raises ValueError for a rank to itself."""
        if src == dst:
            raise ValueError(f"there is no link from rank {src} to itself")
        return self.inside if self.machine(src) == self.machine(dst) else self.between

    def slowest(self, ranks: tuple[int, ...], nbytes: float = 0.0) -> Link:
        """The link that decides a collective over these ranks: that of a ring through them which takes longest.

        nbytes: size of the messages; it matters where one link has the longer latency and another less bandwidth.
        """
        hops = zip(ranks, ranks[1:] + ranks[:1], strict=True)
        return max((self.link(src, dst) for src, dst in hops), key=lambda link: link.seconds(nbytes))


def _chip(name: str, tera_flops: float, memory_gb: float, memory_tb_per_s: float) -> Chip:
    return Chip(tera_flops * 1e12, memory_gb * 1e9, memory_tb_per_s * 1e12, name, _TABLES)


V100 = _chip("V100 32GB SXM2", 125, 32, 0.9)
A100 = _chip("A100 80GB SXM", 312, 80, 2.039)
H100 = _chip("H100 80GB SXM5", 989.4, 80, 3.35)
H200 = _chip("H200 SXM", 989.4, 141, 4.8)
B200 = _chip("B200 SXM", 2250, 180, 8.0)
MI300X = _chip("MI300X", 1307.4, 192, 5.3)

# Latency a step, from all-reduces of small payloads measured there: t = 2(n-1)/n * S / busbw, divided by 2(n-1) steps.
# Inside, 8 H200: 32 KiB at 1.44 GB/s is 40 us over 14 steps. Between, 32 B200: 128 KiB at 0.45 GB/s is 564 us over 62.
_INSIDE_ALPHA_S, _BETWEEN_ALPHA_S = 2.8e-6, 9e-6


def _nvidia(machines: int, chip: Chip, inside_gb_per_s: float, between_gb_per_s: float) -> Cluster:
    return Cluster(
        machines,
        8,
        chip,
        Link(_INSIDE_ALPHA_S, inside_gb_per_s * 1e9, _TABLES),
        Link(_BETWEEN_ALPHA_S, between_gb_per_s * 1e9, _TABLES),
    )


def dgx_a100(machines: int = 1) -> Cluster:
    """Machines of 8 A100: NVLink 3 inside (300 GB/s a direction), one HDR port a chip between (25 GB/s)."""
    return _nvidia(machines, A100, 300, 25)


def dgx_h100(machines: int = 1) -> Cluster:
    """Machines of 8 H100: NVLink 4 inside (450 GB/s a direction), one NDR port a chip between (50 GB/s).

    >>> dgx_h100(machines=2).link(0, 8).bytes_per_s
    50000000000.0
    """
    return _nvidia(machines, H100, 450, 50)


def dgx_b200(machines: int = 1) -> Cluster:
    """Machines of 8 B200: NVLink 5 inside (900 GB/s a direction), one NDR port a chip between (50 GB/s)."""
    return _nvidia(machines, B200, 900, 50)


# One chip's link in one direction, from fast to slow. PCIe's latency is taken for that measured inside machines, and
# Ethernet's for that measured between them. 100 Gbit/s are 12.5 GB/s.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "NVLink 4": dgx_h100().inside,
        "PCIe 5 x16": Link(_INSIDE_ALPHA_S, 63e9, _TABLES),
        "NDR InfiniBand": dgx_h100().between,
        "100 Gbit/s Ethernet": Link(_BETWEEN_ALPHA_S, 12.5e9, _TABLES),
    }
)
