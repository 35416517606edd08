"""What communication costs: bytes per rank and alpha-beta seconds, each formula with its source."""

from fractions import Fraction
from math import ceil


def bus_factor(op: str, ranks: int) -> Fraction:
    """Bytes one rank must send, per byte of payload.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (Fraction(3, 2), Fraction(3, 4), Fraction(1, 1))
    """
    if ranks == 1 or op == "barrier":
        return Fraction(0)
    others = Fraction(ranks - 1, ranks)
    factors = {
        "all_reduce": 2 * others,
        "reduce_scatter": others,
        "all_gather": others,
        "all_to_all": others,
        "broadcast": Fraction(1),
        "reduce": Fraction(1),
    }
    return factors[op]


def bytes_sent(op: str, nbytes: int, ranks: int) -> int:
    """Bytes a bandwidth-optimal algorithm sends from the busiest rank.

    >>> bytes_sent("all_reduce", 16 * 4, ranks=4) // 4
    24
    """
    return ceil(nbytes * bus_factor(op, ranks))
