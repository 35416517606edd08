"""What comes from a rank: every value survives the way, and bytes that are none are refused without harm."""

import doctest
import importlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.ranks import codec
from grading.ranks.codec import FRAME, Damaged, Reader, dump, load_one

MODULES = ["ranks.codec", "ranks.collectives", "exercise"]
plain = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner), max_leaves=10
)


@pytest.mark.parametrize("name", MODULES)
def test_checks_doctests(name: str):
    assert doctest.testmod(importlib.import_module(f"grading.{name}")).failed == 0


@given(values)
@settings(max_examples=60, deadline=None)
def test_a_value_survives(value):
    assert load_one(dump(value)) == value


@pytest.mark.parametrize("name", codec.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)])
def test_a_tensor_survives(name: str, shape: tuple[int, ...]):
    x = (torch.arange(6)[: torch.Size(shape).numel()].reshape(shape) - 2).to(codec.DTYPES[name])
    got = load_one(dump([x, x.t() if x.dim() == 2 else x]))
    assert torch.equal(got[0], x)
    assert got[0].dtype == x.dtype
    assert got[1].shape == x.t().shape if x.dim() == 2 else True


@pytest.mark.parametrize("x", [torch.from_numpy(np.zeros(0, np.float32)), torch.ones(1).expand(4), torch.ones(3, 2).T])
def test_strides_do_not_matter(x: torch.Tensor):
    assert torch.equal(load_one(dump(x)), x)


def test_messages_arrive_in_pieces():
    data = dump({"a": torch.arange(5)}) + dump("two")
    reader, got = Reader(), []
    for i in range(len(data)):
        got += reader.feed(data[i : i + 1])
    assert got[0]["a"].tolist() == [0, 1, 2, 3, 4]
    assert got[1] == "two"


def frame(head: object, body: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return FRAME.pack(len(text), len(body)) + text + body


@pytest.mark.parametrize(
    "data",
    [
        FRAME.pack(1 << 21, 0),
        FRAME.pack(0, 1 << 27),
        frame(b"\x80\x04cos\nsystem\n."),  # a pickle
        frame(b"{"),
        frame([1, 2]),
        frame({"object": 1}),
        frame({"list": [1], "tuple": [1]}),
        frame({"bytes": 10}, b"short"),
        frame({"bytes": -1}),
        frame({"bytes": True}, b"x"),
        frame({"tensor": ["float32", [2]]}, b"1234"),
        frame({"tensor": ["float32", [-1]]}),
        frame({"tensor": ["float32", [2**40, 2**40]]}),
        frame({"tensor": ["object", [1]]}, b"12345678"),
        frame({"tensor": ["float32", [1] * 100]}, b"1234"),
        frame({"tensor": "float32"}),
        frame(1, b"left over"),
        frame({"dict": [[{"list": []}, 1]]}),
        frame(b'{"list":[' * 5000 + b"]}" * 5000),
        frame(b"9" * 5000),
    ],
)
def test_other_bytes_are_refused(data: bytes):
    with pytest.raises(Damaged):
        load_one(data)


def test_a_byte_of_two_is_a_true_bool():
    got = load_one(frame({"tensor": ["bool", [3]]}, b"\x00\x02\x01"))
    assert got.tolist() == [False, True, True]
    assert got.view(torch.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("value", [object(), lambda: 1, {1, 2}, torch.ones(2).to_sparse()])
def test_what_is_no_plain_data_cannot_be_sent(value):
    with pytest.raises(TypeError):
        dump(value)


def test_what_is_too_large_cannot_be_sent():
    with pytest.raises(ValueError, match="more than a message may hold"):
        dump(torch.empty(1 << 25))
    with pytest.raises(ValueError, match="64 bits"):
        dump(10**30)
