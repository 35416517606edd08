"""Latency and bandwidth of a link, read off from measured times."""

from __future__ import annotations

from collections.abc import Sequence


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(alpha_s, beta_s_per_byte) of the line seconds = alpha + beta x size that misses the measured times least.

    sizes in bytes, at least two different ones. What counts is the miss relative to each time: in absolute terms the
    largest message alone would decide, and alpha would be noise. Neither is ever negative. The model is Hockney's
    (1994, "The communication challenge for MPP").

    >>> alpha_s, beta_s_per_byte = fit_alpha_beta([0, 1000, 1_000_000], [1e-4, 1.01e-4, 1.1e-3])
    >>> round(alpha_s, 9), round(beta_s_per_byte, 12)
    (0.0001, 1e-09)
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"{len(sizes)} sizes and {len(seconds)} times: measure at least two different sizes, a time each"
        )
    if min(seconds) <= 0:
        raise ValueError("a measured time is zero or negative: use a monotonic clock and more repetitions")
    # Least squares with weights 1 / seconds^2: the normal equations of two unknowns, solved by hand.
    weights = [1 / t**2 for t in seconds]
    one = sum(weights)
    x = sum(w * s for w, s in zip(weights, sizes, strict=True))
    xx = sum(w * s * s for w, s in zip(weights, sizes, strict=True))
    y = sum(w * t for w, t in zip(weights, seconds, strict=True))
    xy = sum(w * s * t for w, s, t in zip(weights, sizes, seconds, strict=True))
    scale = one * xx - x * x
    alpha, beta = (xx * y - x * xy) / scale, (one * xy - x * y) / scale
    if alpha < 0:
        return 0.0, xy / xx
    if beta < 0:
        return y / one, 0.0
    return alpha, beta
