"""Data: every sample once per epoch, the same after a restart, split over the data axis and over nothing else."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidist.data import TextBatches, epoch_order, sample_indices, stdlib_source, stdlib_tokens
from minidist.mesh import coordinate_of


def counting(n, **settings):
    """A text whose byte number i is i mod 251, so that a window says where it starts."""
    return TextBatches(torch.arange(n).remainder(251).to(torch.uint8), **settings)


def check_split(parts):
    """With tp=2, dp=2 and 8 samples in order, tp neighbours read the same, and the two replicas share them out."""
    assert parts == [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]


def test_model_parallel_ranks_of_a_replica_read_the_same_samples():
    axes = {"dp": 2, "tp": 2}
    check_split([sample_indices(0, 8, 8, None, coordinate_of(rank, axes)["dp"], axes["dp"]) for rank in range(4)])
    with pytest.raises(AssertionError):  # the fault: split by the rank in the world
        check_split([sample_indices(0, 8, 8, None, rank, 4) for rank in range(4)])


sizes = st.integers(1, 12)


def check_epochs(indices, samples, batch, ranks):
    """What `indices(step, rank, ranks)` must give: disjoint shards, every sample once an epoch, a new order in each."""
    steps = 3 * samples // batch + 1
    sequence = []
    for step in range(steps):
        shards, together = [indices(step, rank, ranks) for rank in range(ranks)], indices(step, 0, 1)
        assert len(together) == batch
        assert [together[rank::ranks] for rank in range(ranks)] == shards, "the batch depends on the number of ranks"
        sequence += together
    epochs = [sequence[epoch * samples : (epoch + 1) * samples] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(samples)), "not every sample once"
    if samples >= 8:
        assert epochs[0] != epochs[1] != epochs[2], "two epochs in the same order"


@given(samples=sizes, batch=sizes, ranks=st.integers(1, 6), seed=st.integers(0, 3))
def test_every_sample_once_per_epoch_over_all_ranks(samples, batch, ranks, seed):
    check_epochs(lambda step, r, n: sample_indices(step, batch, samples, seed, r, n), samples, batch, ranks)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda step, r, n: sample_indices(step % 3, 4, 12, 0, r, n), "same order"),
        (lambda step, r, n: sample_indices(step, 4, 12, r, r, n), "number of ranks"),
        (lambda step, r, n: sample_indices(step, 4, 12, 0), "number of ranks"),
        (lambda step, r, n: sample_indices(step, 4, 12, step, r, n), "not every sample once"),
    ],
    ids=["the epoch never set", "a seed per rank", "no split", "a seed per step"],
)
def test_that_check_notices(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_epochs(fault, 12, 4, 2)


def test_the_order_is_a_function_of_seed_and_epoch():
    torch.manual_seed(5)
    orders = {key: epoch_order(100, *key).tolist() for key in [(0, 0), (0, 1), (1, 0), (1, 1)]}
    assert len({tuple(order) for order in orders.values()}) == 4
    torch.manual_seed(6)
    for key, order in orders.items():
        assert epoch_order(100, *key).tolist() == order
    assert epoch_order(100, None, 3).tolist() == list(range(100))
    with torch.device("meta"):  # a default device changes nothing
        assert epoch_order(100, 0, 1).tolist() == orders[0, 1]


def test_a_restarted_run_goes_on_where_it_was():
    first, again = counting(1000, seq=7, batch=5), counting(1000, seq=7, batch=5)
    for step in (61, 3, 61):  # any order of asking
        assert torch.equal(first.batch(step)[0], again.batch(step)[0])
    assert not torch.equal(first.batch(3)[0], first.batch(4)[0])
    assert not torch.equal(first.batch(3)[0], counting(1000, seq=7, batch=5, seed=1).batch(3)[0])


def test_targets_are_the_tokens_one_byte_later():
    data = counting(1000, seq=10, batch=4, seed=None)
    assert data.samples == 99, "sample 99 would have no target for its last token"
    tokens, targets = data.batch(0)
    assert tokens.shape == targets.shape == (4, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert tokens.flatten().tolist() == list(range(40))
    assert targets.flatten().tolist() == list(range(1, 41))
    assert counting(11, seq=10).samples == 1


def test_a_batch_that_ranks_do_not_divide():
    data = counting(1000, seq=10, batch=5)
    parts = [data.batch(2, rank, 4)[0] for rank in range(4)]
    assert [len(part) for part in parts] == [2, 1, 1, 1]
    whole = data.batch(2)[0]
    assert all(torch.equal(part, whole[rank::4]) for rank, part in enumerate(parts))
    assert [data.batch(2, rank, 7)[1].shape for rank in range(7)] == [(1, 10)] * 5 + [(0, 10)] * 2


def test_any_text_file(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_bytes("Wer reitet so spät".encode() * 3)
    data = stdlib_tokens(path=path, seq=18, batch=2, seed=None)
    tokens, _ = data.batch(0)
    assert bytes(tokens[0].tolist()).decode() == "Wer reitet so spä"
    assert repr(data) == "TextBatches(57 bytes, 3 samples of 18, 2 a step)"
    assert torch.equal(stdlib_tokens(path=str(path), seq=18, batch=2, seed=None).batch(0)[0], tokens)


def test_the_standard_library_is_there_and_short():
    source = stdlib_source()
    assert 500_000 < len(source) <= 4_000_000
    assert source[:100] == stdlib_source(limit=100)
    tokens, targets = stdlib_tokens().batch(0, rank=1, ranks=2)
    assert tokens.shape == targets.shape == (8, 128)
    assert int(tokens.max()) < 256


def test_errors_say_what_to_change(tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=re.escape("no_such.txt' is not a file (the current folder is")):
        stdlib_tokens(path="no_such.txt")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        stdlib_tokens(path=tmp_path)
    with pytest.raises(ValueError, match=r"3 bytes .* or seq=2 or less"):
        stdlib_tokens(path=tmp_path / "short.txt")
    with pytest.raises(ValueError, match="0 bytes"):
        stdlib_tokens(path=tmp_path / "empty.txt")
    for rank, ranks in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match=f"rank={rank} of ranks={ranks}"):
            counting(1000).batch(0, rank, ranks)
    with pytest.raises(ValueError, match="step=-1"):
        counting(1000).batch(-1)
    with pytest.raises(ValueError, match="batch=0"):
        counting(1000, batch=0)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="comes without its source"):
        stdlib_tokens()
