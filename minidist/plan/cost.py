"""What communication costs, counted before anything is sent: messages, bytes and alpha-beta seconds.

Payloads are counted as nccl-tests counts them: S is the whole tensor of an all-reduce, the whole result of an
all-gather, the whole input of a reduce-scatter, all that one rank hands to an all-to-all.

Sources:
  [T] R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication Operations in MPICH, 2005.
  [P] P. Patarasuk, X. Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009.
  [N] nccl-tests, doc/PERFORMANCE.md: algorithm and bus bandwidth.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from types import MappingProxyType

from minidist.plan.hardware import Link


@dataclass(frozen=True)
class Traffic:
    """What one rank sends one after the other: a number of messages, and in all so many elements (or bytes).

    Where ranks send different amounts it is that of the longest chain of messages that wait for one another, which is
    what decides the time.
    """

    messages: int
    count: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.messages + other.messages, self.count + other.count)

    def seconds(self, link: Link) -> float:
        """alpha * messages + bytes / bandwidth, the count being bytes."""
        return self.messages * link.alpha_s + self.count / link.bytes_per_s


def log2_ceil(n: int) -> int:
    """The smallest k with 2**k >= n.

    >>> [log2_ceil(n) for n in (1, 2, 3, 4, 5, 8)]
    [0, 1, 2, 2, 3, 3]
    """
    return (n - 1).bit_length()


def ring_half(count: int, n: int) -> Traffic:
    """A ring reduce-scatter, a ring all-gather or a pairwise all-to-all: n-1 messages of ceil(count / n) [P].

    >>> ring_half(16, 4)
    Traffic(messages=3, count=12)
    """
    return Traffic(n - 1, (n - 1) * ceil(Fraction(count, n)))


def ring_all_reduce(count: int, n: int) -> Traffic:
    """A ring reduce-scatter, then a ring all-gather [P]: nearly twice the tensor, however many ranks join.

    >>> ring_all_reduce(16, 4)
    Traffic(messages=6, count=24)
    """
    return ring_half(count, n) + ring_half(count, n)


def halving(count: int, n: int) -> Traffic:
    """Recursive halving or doubling over n = 2**k ranks: k messages; the bytes of the ring half in fewer steps [T].

    >>> halving(16, 4)
    Traffic(messages=2, count=12)
    """
    if n & (n - 1):
        raise ValueError(f"recursive halving is for a power of two of ranks, not {n}")
    return Traffic(log2_ceil(n), (n - 1) * ceil(Fraction(count, n)))


def halving_doubling_all_reduce(count: int, n: int) -> Traffic:
    """Recursive halving, then doubling [T], over the largest power of two in n.

    The ranks beyond it first hand their tensor to a partner and get the result back at the end: two more messages of
    the whole tensor for the partners' chain.

    >>> halving_doubling_all_reduce(16, 4)
    Traffic(messages=4, count=24)
    >>> halving_doubling_all_reduce(16, 6)
    Traffic(messages=6, count=56)
    """
    core = 1 << (n.bit_length() - 1)
    folded = Traffic(2, 2 * count) if core < n else Traffic(0, 0)
    return folded + halving(count, core) + halving(count, core)


def tree(count: int, n: int) -> Traffic:
    """A binomial tree, as for a broadcast or a reduce: ceil(log2 n) messages of the whole tensor [T].

    >>> tree(16, 5)
    Traffic(messages=3, count=48)
    """
    return Traffic(log2_ceil(n), log2_ceil(n) * count)


def tree_all_reduce(count: int, n: int) -> Traffic:
    """A tree reduce, then a tree broadcast [T]: few messages, each of the whole tensor. For small tensors."""
    return tree(count, n) + tree(count, n)


def bruck_all_gather(count: int, n: int) -> Traffic:
    """Bruck's all-gather: ceil(log2 n) messages for any n, the bytes of the ring [T]."""
    return Traffic(log2_ceil(n), (n - 1) * ceil(Fraction(count, n)))


def bruck_all_to_all(count: int, n: int) -> Traffic:
    """Bruck's all-to-all: ceil(log2 n) messages of half the tensor [T]. For small tensors."""
    return Traffic(log2_ceil(n), log2_ceil(n) * ceil(Fraction(count, 2)))


def scatter_all_gather_broadcast(count: int, n: int) -> Traffic:
    """Van de Geijn's broadcast: a tree scatter, then a ring all-gather [T]. For large tensors."""
    return Traffic(log2_ceil(n), ring_half(count, n).count) + ring_half(count, n)


def barrier(count: int, n: int) -> Traffic:
    """A dissemination barrier: ceil(log2 n) empty messages."""
    return Traffic(log2_ceil(n), 0)


# Every algorithm by the collective it computes; the first of each is the one a paced run is timed by.
ALGORITHMS: Mapping[str, Mapping[str, Callable[[int, int], Traffic]]] = MappingProxyType(
    {
        "all_reduce": MappingProxyType(
            {"ring": ring_all_reduce, "halving_doubling": halving_doubling_all_reduce, "tree": tree_all_reduce}
        ),
        "reduce_scatter": MappingProxyType({"ring": ring_half, "halving": halving}),
        "all_gather": MappingProxyType({"ring": ring_half, "doubling": halving, "bruck": bruck_all_gather}),
        "all_to_all": MappingProxyType({"pairwise": ring_half, "bruck": bruck_all_to_all}),
        "broadcast": MappingProxyType({"tree": tree, "scatter_all_gather": scatter_all_gather_broadcast}),
        "reduce": MappingProxyType({"tree": tree}),
        "barrier": MappingProxyType({"dissemination": barrier}),
    }
)


def seconds(op: str, nbytes: int, ranks: int, link: Link, algorithm: str | None = None) -> float:
    """Alpha-beta seconds of a collective when every hop is this link.

    A ring all-reduce of 1 GB over 8 ranks at 100 GB/s:

    >>> round(seconds("all_reduce", 10**9, 8, Link(0, 100e9)) * 1e3, 3)
    17.5

    Raises: ValueError for an op or algorithm that is not in `ALGORITHMS`.
    """
    known = ALGORITHMS.get(op)
    if known is None:
        raise ValueError(f"op {op!r} is none of {', '.join(ALGORITHMS)}")
    algorithm = next(iter(known)) if algorithm is None else algorithm
    if algorithm not in known:
        raise ValueError(f"{op} by {algorithm!r} is not known; by {', '.join(known)} it is")
    return known[algorithm](nbytes, ranks).seconds(link)


def bus_factor(op: str, ranks: int) -> Fraction:
    """Bytes a rank must send for each byte of payload; bus bandwidth is this times payload / seconds [N].

    >>> [str(bus_factor(op, 4)) for op in ("all_reduce", "all_gather", "broadcast")]
    ['3/2', '3/4', '1']
    """
    return Fraction(*_bus_ratio(op, ranks))


def bytes_sent(op: str, nbytes: int, ranks: int) -> int:
    """Bytes a bandwidth-optimal algorithm sends per rank: `bus_factor` of the payload, rounded up [N].

    With 4 ranks and 16 elements of 4 bytes, in elements:

    >>> [bytes_sent(op, 16 * 4, 4) // 4 for op in ("all_reduce", "all_gather", "reduce_scatter")]
    [24, 12, 12]
    """
    numerator, denominator = _bus_ratio(op, ranks)
    return -(-nbytes * numerator // denominator)


def _bus_ratio(op: str, ranks: int) -> tuple[int, int]:
    if op not in ALGORITHMS:
        raise ValueError(f"op {op!r} is none of {', '.join(ALGORITHMS)}")
    if ranks == 1 or op == "barrier":
        return 0, 1
    if op in ("broadcast", "reduce"):
        return 1, 1
    return (2 if op == "all_reduce" else 1) * (ranks - 1), ranks


def hierarchical_seconds(nbytes: int, machines: int, chips: int, inside: Link, between: Link) -> float:
    """Seconds of an all-reduce in three steps: reduce-scatter inside, ring all-reduce between, all-gather inside.

    Between machines each chip moves only its own share of the tensor, one `chips`-th of it.

    >>> fast, slow = Link(0, 100e9), Link(0, 10e9)
    >>> flat = seconds("all_reduce", 8 * 10**9, 16, slow)
    >>> [round(t, 3) for t in (hierarchical_seconds(8 * 10**9, 2, 8, fast, slow), flat)]
    [0.24, 1.5]
    """
    share = ceil(Fraction(nbytes, chips))
    return 2 * ring_half(nbytes, chips).seconds(inside) + ring_all_reduce(share, machines).seconds(between)


def tensor_parallel_layer(
    tokens: int, dim: int, ranks: int, element_nbytes: int = 4, sequence: bool = False
) -> dict[str, dict[str, int]]:
    """Bytes one rank sends for one transformer layer, {"forward": {what: bytes}, "backward": {what: bytes}}.

    tokens: T, of the whole batch that all ranks work on; dim: D. Attention and feed-forward are a region each. What
    crosses a region's border is [T, D]: an all-reduce where it ends, and going back where it begins [S]. With sequence
    parallelism that is an all-gather and a reduce-scatter, half the bytes each; going back, what entered is gathered
    once more ("regather"), since each rank kept its own tokens only [K], and the gradients of the two norms' D
    weights, each from a rank's own tokens, are summed ("norm gradients").

      [S] Shoeybi et al., Megatron-LM (arXiv 1909.08053), 3 and figure 4.
      [K] Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198), 4.2.

    >>> tensor_parallel_layer(8, 4, ranks=2)
    {'forward': {'all_reduce': 256}, 'backward': {'all_reduce': 256}}
    >>> tensor_parallel_layer(8, 4, ranks=2, sequence=True)["forward"]
    {'all_gather': 128, 'reduce_scatter': 128}
    >>> tensor_parallel_layer(8, 4, ranks=2, sequence=True)["backward"]
    {'all_gather': 128, 'reduce_scatter': 128, 'regather': 128, 'norm gradients': 32}
    """
    whole = tokens * dim * element_nbytes
    twice = lambda op, nbytes: 2 * bytes_sent(op, nbytes, ranks)
    if not sequence:
        return {way: {"all_reduce": twice("all_reduce", whole)} for way in ("forward", "backward")}
    forward = {op: twice(op, whole) for op in ("all_gather", "reduce_scatter")}
    norms = twice("all_reduce", dim * element_nbytes)
    return {"forward": forward, "backward": {**forward, "regather": forward["all_gather"], "norm gradients": norms}}
