"""Who owns which slice. The one place in the package that cuts a length into parts."""


def partition(n: int, ranks: int) -> list[slice]:
    """Cut ``range(n)`` into one contiguous slice per rank: ``ceil(n / ranks)`` each, the last ones shorter or empty.

    The rule is that of ``torch.chunk`` and of ``fully_shard``, except that every rank gets a slice: where torch.chunk
    returns fewer pieces, the missing ones are empty here. It is not that of ``torch.tensor_split`` (7 over 3: 3, 2, 2).

    >>> [s.stop - s.start for s in partition(7, 3)]
    [3, 3, 1]
    >>> [s.stop - s.start for s in partition(5, 4)]
    [2, 2, 1, 0]
    >>> partition(6, 2)
    [slice(0, 3, None), slice(3, 6, None)]

    Raises: ValueError for a negative length or fewer than one rank.
    """
    if n < 0 or ranks < 1:
        raise ValueError(f"partition needs n >= 0 and ranks >= 1, got n={n}, ranks={ranks}")
    step = -(-n // ranks)
    return [slice(min(rank * step, n), min((rank + 1) * step, n)) for rank in range(ranks)]


def lengths(n: int, ranks: int) -> list[int]:
    """The sizes of the slices of :func:`partition`.

    >>> lengths(7, 3)
    [3, 3, 1]
    """
    return [part.stop - part.start for part in partition(n, ranks)]
