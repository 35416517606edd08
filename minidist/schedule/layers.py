"""Which layers are which stage's."""

from collections.abc import Sequence
from functools import cache


def split_layers(layers: int | Sequence[float], stages: int) -> list[range]:
    """Consecutive layers for every stage, so that the costliest stage costs as little as can be.

    layers: how many, all of one cost; or the cost of each. Of equal layers the first stages have one more.

    Raises: ValueError for fewer layers than stages, or a cost that is not a positive number.

    >>> [len(part) for part in split_layers(10, 3)]
    [4, 3, 3]
    >>> split_layers([1, 1, 1, 5], 2)
    [range(0, 3), range(3, 4)]
    """
    costs = [1.0] * layers if isinstance(layers, int) else [float(cost) for cost in layers]
    if stages < 1 or len(costs) < stages:
        raise ValueError(
            f"{len(costs)} layers make at most {len(costs)} stages, not {stages}: a stage has at least one layer"
        )
    if not all(cost > 0 for cost in costs):
        raise ValueError(f"a layer costs more than nothing: {list(layers) if not isinstance(layers, int) else layers}")

    @cache
    def best(first: int, left: int) -> tuple[float, int]:
        """(cost of the costliest stage, end of the first stage) for the layers from `first` on, in so many stages."""
        if left == 1:
            return sum(costs[first:]), len(costs)
        ends = range(first + 1, len(costs) - left + 2)
        return min(((max(sum(costs[first:end]), best(end, left - 1)[0]), end) for end in ends), key=_less_and_later)

    ranges, first = [], 0
    for left in range(stages, 0, -1):
        end = best(first, left)[1]
        ranges.append(range(first, end))
        first = end
    return ranges


def _less_and_later(option: tuple[float, int]) -> tuple[float, int]:
    return option[0], -option[1]
