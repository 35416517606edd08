"""Measuring what tensors hold: each storage once, at its size of the moment, and the most of them at one time."""

import torch
from torch import nn

import minidist as md


def test_storages_count_once():
    x = torch.zeros(100)
    assert md.storage_bytes([x, x[10:], x.view(10, 10), None]) == 400
    x.untyped_storage().resize_(0)
    assert md.storage_bytes([x]) == 0


def test_state_without_step_counts():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert md.storage_bytes(md.optimizer_tensors(optimizer)) == 2 * 4 * 8


def test_peak_is_the_most_at_one_time():
    """Three tensors of 4000 bytes, of which at most two are there at once; and one that grows without an operation."""
    with md.PeakMemory() as peak:
        a = torch.zeros(1000)
        b = a + 1
        assert peak.now() == 8000
        del a
        c = b * 2
        b.untyped_storage().resize_(0)
        assert peak.now() == 4000
        del b
        grown = c[:0].clone()
        grown.untyped_storage().resize_(40_000)
        c.add_(1)
    assert peak.nbytes == 44_000
    peak.reset()
    assert peak.nbytes == 44_000
    del grown, c
    peak.reset()
    assert peak.nbytes == 0


def test_what_was_there_before_counts():
    weight = torch.ones(500, 500)
    with md.PeakMemory([weight]) as peak:
        torch.ones(3).sum()
    assert peak.nbytes >= weight.nbytes
