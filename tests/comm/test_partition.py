"""partition: contiguous, complete, ceil(n / ranks) each, as torch.chunk cuts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minidist as md
from minidist.comm.partition import lengths


def check_cut(cut, n, ranks):
    """`cut` gives every rank one slice; end to end they are range(n), ceil(n/ranks) each and the rest last."""
    parts = cut(n, ranks)
    assert len(parts) == ranks
    assert [i for part in parts for i in range(n)[part]] == list(range(n))
    share = -(-n // ranks)
    assert [len(range(n)[part]) for part in parts] == [min(share, max(0, n - r * share)) for r in range(ranks)]


@given(st.integers(0, 200), st.integers(1, 40))
def test_every_length(n, ranks):
    check_cut(md.partition, n, ranks)
    assert lengths(n, ranks) == [part.stop - part.start for part in md.partition(n, ranks)]


@given(st.integers(1, 200), st.integers(1, 40))
def test_cuts_as_torch_chunk_does(n, ranks):
    chunks = [len(chunk) for chunk in torch.arange(n).chunk(ranks)]
    assert [length for length in lengths(n, ranks) if length] == chunks


def test_the_check_notices_tensor_split():
    def tensor_split(n, ranks):
        pieces = torch.arange(n).tensor_split(ranks)
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
        return [slice(end - len(piece), end) for end, piece in zip(ends, pieces, strict=True)]

    check_cut(tensor_split, 6, 3)
    with pytest.raises(AssertionError):
        check_cut(tensor_split, 7, 3)


@pytest.mark.parametrize(("n", "ranks"), [(-1, 2), (3, 0)])
def test_refuses_what_cannot_be_cut(n, ranks):
    with pytest.raises(ValueError, match=f"n={n}, ranks={ranks}"):
        md.partition(n, ranks)
