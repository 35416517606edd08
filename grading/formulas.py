"""The functions that questions may call: the package's own cost formulas, and numbers as text. GB is 1e9 bytes."""

import math
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import minidist as md


def scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """Three significant digits and the unit that suits; steps: (size, unit) from the largest to the smallest."""
    if value == 0:
        return f"0 {next((unit for size, unit in steps if size == 1), '')}".strip()
    # A value that would print as 1000 of a unit is 1 of the next.
    size, unit = next((step for step in steps if abs(value) * 1.0005 >= step[0]), steps[-1])
    amount = value / size
    return f"{decimal(amount, 3)} {unit}".strip()


def decimal(value: float, digits: int = 4) -> str:
    """A number as people write it: whole from 1000 on, else with so many significant digits; never with an e.

    >>> decimal(150588.2353), decimal(2.5), decimal(0.0000125), decimal(12), decimal(0)
    ('150,588', '2.5', '0.0000125', '12', '0')
    """
    if not math.isfinite(value):
        return str(value)
    if value == round(value) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}".rstrip("0")


def nbytes(value: float) -> str:
    """Bytes as text.

    >>> nbytes(1.5e9), nbytes(590592), nbytes(12), nbytes(999_999), nbytes(2.5e15)
    ('1.5 GB', '591 kB', '12 bytes', '1 MB', '2,500 TB')
    """
    return scaled(value, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")))


def seconds(value: float) -> str:
    """Seconds as text.

    >>> seconds(0.0175), seconds(2), seconds(4e-6), seconds(0.9999), seconds(0)
    ('17.5 ms', '2 s', '4 us', '1 s', '0 s')
    """
    return scaled(value, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def count(value: float) -> str:
    """A count as text: whole up to a million, then in words.

    >>> count(98432), count(3), count(7e9), count(1.25e6)
    ('98,432', '3', '7 billion', '1.25 million')
    """
    if abs(value) < 1e6:
        return decimal(value)
    return scaled(value, ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")))


def quantity(value: float, unit: str) -> str:
    """A number with its unit, as explanations print it.

    >>> quantity(590592, "bytes"), quantity(0.3, "s"), quantity(1.5, "x parameters"), quantity(98_432, "")
    ('590,592 bytes (591 kB)', '300 ms', '1.5 x parameters', '98,432')
    >>> quantity(150588.2353, "bytes"), quantity(0, "s"), quantity(545.4848, "ms")
    ('150,588 bytes (151 kB)', '0 s', '545.5 ms')
    """
    if unit == "s":
        return seconds(value)
    large = f" ({nbytes(value)})" if unit == "bytes" and abs(value) >= 1000 else ""
    return f"{decimal(value)} {unit}{large}".strip()


def ring_bytes(n: int, size: float) -> int:
    """Bytes one rank sends in a ring all-reduce of size bytes over n ranks.

    >>> ring_bytes(4, 4 * 98_432)
    590592
    """
    return md.cost.bytes_sent("all_reduce", int(size), n)


def zero_bytes(stage: int, parameters: float, ranks: int, weight: int = 4, grad: int = 4, optimizer: int = 8) -> float:
    """Bytes one rank keeps between steps of ZeRO's stage; weight, grad, optimizer: bytes a parameter has of them.

    >>> [zero_bytes(stage, 1000, 4, 2, 2, 12) for stage in range(4)]
    [16000.0, 7000.0, 5500.0, 4000.0]
    """
    return md.zero_memory(parameters, ranks, stage, weight, grad, optimizer).total


def actions_of(
    schedule: str, ranks: int, microbatches: int, rank: int, stages_per_rank: int = 1, first: int | None = None
) -> str:
    """What a rank does under a published schedule, or the first so many of its actions, as programs are written.

    >>> actions_of("1f1b", 2, 3, rank=0), actions_of("zb_h1", 2, 8, rank=1, first=4)
    ('0F0,0F1,0B0,0F2,0B1,0B2', '1F0,1I0,1F1,1I1')
    """
    return ",".join(map(str, md.schedule.build(schedule, ranks, microbatches, stages_per_rank)[rank][:first]))


def _cost() -> SimpleNamespace:
    """The cost formulas under their own names, so that a question writes cost.ring_all_reduce(count, n)."""
    own = {name: f for name, f in vars(md.cost).items() if getattr(f, "__module__", "") == md.cost.__name__}
    return SimpleNamespace(**{name: f for name, f in own.items() if not name.startswith("_")})


FORMULAS: Mapping[str, Any] = MappingProxyType(
    {
        **{f.__name__: f for f in (nbytes, seconds, count, quantity, ring_bytes, zero_bytes, actions_of)},
        **{f.__name__: f for f in (abs, float, int, len, max, min, range, round, sorted, str, sum)},
        **{f.__name__: f for f in (math.ceil, math.floor, math.log2, math.sqrt)},
        "cost": _cost(),
        "Link": md.Link,
        "partition": md.partition,
    }
)
