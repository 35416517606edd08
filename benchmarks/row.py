"""A comparison as one row: two medians, their ratio, how sure it is, and what it had to beat."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["pass", "miss", "unclear", "info"]


@dataclass(frozen=True)
class Row:
    """ours and theirs in `unit`, smaller is better; ratio = ours / theirs, and bar is the largest ratio that passes."""

    name: str
    ours: float
    theirs: float
    ratio: float
    bar: float
    verdict: Verdict
    unit: str
    samples: int
    spread: dict[str, tuple[float, float]]
    what: str

    def line(self) -> str:
        """The row as it is printed."""
        low, high = self.spread["ratio"]
        return (
            f"{self.name:<50} ours {shown(self.ours, self.unit):>10}  theirs {shown(self.theirs, self.unit):>10}  "
            f"ratio {self.ratio:6.3f} [{low:.3f}, {high:.3f}]  bar {self.bar:.2f}  {self.verdict}"
        )

    def record(self, **context: Any) -> dict[str, Any]:
        """The row as it is written to JSON, with what it was measured on."""
        return {**asdict(self), **context}


def compare(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    bar: float,
    what: str,
    judged: bool = True,
    unit: str = "s",
) -> Row:
    """The row of two equally long lists of seconds (or bytes, unit="B"), sample i of both taken next to each other.

    ratio is the ratio of the two medians. Its spread is the middle 90 % of that ratio over resampled pairs
    (bootstrap, Efron 1979), so a burst of foreign load that hits both sides of a pair widens it little. Where
    that range holds the bar the run was too noisy to call and the verdict is "unclear". A row with
    `judged=False` makes no claim: its bar is a line to read the ratio against.

    >>> compare("toy", [1.0, 1.1, 1.0, 0.9], [2.0, 2.1, 2.0, 1.9], bar=1.02, what="half").verdict
    'pass'
    >>> compare("toy", [2.0] * 4, [1.0] * 4, bar=1.02, what="double").verdict
    'miss'
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"{name}: {len(ours)} samples of ours and {len(theirs)} of theirs; need as many of both, and one"
        )
    ratio = statistics.median(ours) / statistics.median(theirs)
    low, high = ratio_range(ours, theirs)
    return Row(
        name=name,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        ratio=ratio,
        bar=bar,
        verdict=verdict(low, high, bar) if judged else "info",
        unit=unit,
        samples=len(ours),
        spread={"ours": quartiles(ours), "theirs": quartiles(theirs), "ratio": (low, high)},
        what=what,
    )


def verdict(low: float, high: float, bar: float) -> Verdict:
    """Whether a ratio known to lie in [low, high] is at most bar.

    >>> verdict(0.97, 1.01, 1.02), verdict(1.03, 1.1, 1.02), verdict(0.9, 1.1, 1.02)
    ('pass', 'miss', 'unclear')
    """
    if high <= bar:
        return "pass"
    return "miss" if low > bar else "unclear"


def ratio_range(ours: Sequence[float], theirs: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The middle 90 % of median(ours) / median(theirs) when the pairs are drawn again with replacement."""
    draw = random.Random(0)
    pairs = list(zip(ours, theirs, strict=True))
    ratios = []
    for _ in range(draws):
        sample = draw.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(o for o, _ in sample) / statistics.median(t for _, t in sample))
    ratios.sort()
    return ratios[draws // 20], ratios[-draws // 20 - 1]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third


def shown(value: float, unit: str) -> str:
    """A value with a readable prefix.

    >>> shown(0.00321, "s"), shown(2.5, "s"), shown(4.2e-6, "s"), shown(4.2e6, "B")
    ('3.210 ms', '2.500 s', '4.200 us', '4.200 MB')
    """
    for factor, prefix in ((1e6, "M"), (1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if abs(value) >= factor:
            return f"{value / factor:.3f} {prefix}{unit}"
    return f"{value / 1e-9:.3f} n{unit}"
