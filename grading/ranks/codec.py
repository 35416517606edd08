"""Messages between a rank and the grader: a head in JSON, then the bytes of its tensors. Nothing is ever unpickled.

A message is <bytes of head, bytes of body> as two little-endian u32, the head, the body. A value is None, True, False,
a number, a text, bytes, a tensor, or a list, tuple or dict of these. In the head a container or tensor stands as an
object with one key that says what it is; tensors and bytes lie in the body in the order in which the head names them.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FRAME = struct.Struct("<II")
MOST_HEAD, MOST_BODY = 1 << 20, 1 << 26  # bytes: what a message may hold at most
DEEPEST = 20  # containers inside containers
_LARGEST_INT = 2**63

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class Damaged(ValueError):
    """Bytes that are no message, or a message that says nothing sensible."""


def dump(value: Any) -> bytes:
    """A value as a message. Raises TypeError for what is not plain data, ValueError for what is too large.

    >>> load_one(dump({"x": torch.arange(3.0), "then": (1, None, [b"raw"])}))
    {'x': tensor([0., 1., 2.]), 'then': (1, None, [b'raw'])}
    >>> dump(object())
    Traceback (most recent call last):
    TypeError: an object is no plain data: use tensors, numbers, texts, and lists, tuples or dicts of them
    """
    body: list[bytes] = []
    head = json.dumps(_plain(value, body, 0), ensure_ascii=False).encode("utf-8", "replace")
    size = sum(map(len, body))
    if len(head) > MOST_HEAD or size > MOST_BODY:
        raise ValueError(f"{len(head) + size:,} bytes are more than a message may hold ({MOST_BODY:,})")
    return b"".join((FRAME.pack(len(head), size), head, *body))


def _plain(value: Any, body: list[bytes], depth: int) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"more than {DEEPEST} containers inside one another")
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        if abs(value) > _LARGEST_INT:
            raise ValueError("a whole number of more than 64 bits")
        return int(value)
    if isinstance(value, bytes):
        body.append(value)
        return {"bytes": len(value)}
    if isinstance(value, Tensor):
        return {"tensor": _tensor_head(value, body)}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_plain(item, body, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(part, body, depth + 1) for part in item] for item in value.items()]}
    what = type(value).__name__
    article = "an" if what[:1].lower() in "aeiou" else "a"
    raise TypeError(
        f"{article} {what} is no plain data: use tensors, numbers, texts, and lists, tuples or dicts of them"
    )


def _tensor_head(x: Tensor, body: list[bytes]) -> list[Any]:
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES or x.layout is not torch.strided:
        raise TypeError(f"a tensor of {name} ({x.layout}) cannot be sent: convert it to a dense one of a common type")
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    flat = plain.clone(memory_format=torch.contiguous_format).reshape(-1)  # an empty tensor of numpy has stride 0
    body.append(flat.view(torch.uint8).numpy().tobytes())
    return [name, list(x.shape)]


class Reader:
    """Puts messages together from the pieces in which they arrive. Raises Damaged as soon as they cannot be one."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with these bytes."""
        self._bytes += data
        while len(self._bytes) >= FRAME.size:
            head, body = FRAME.unpack_from(self._bytes)
            if head > MOST_HEAD or body > MOST_BODY:
                raise Damaged("a message larger than any may be")
            end = FRAME.size + head + body
            if len(self._bytes) < end:
                return
            whole = bytes(self._bytes[FRAME.size : end])
            del self._bytes[:end]
            yield _load(whole[:head], whole[head:])


def load_one(message: bytes) -> Any:
    """The value of one whole message."""
    values = list(Reader().feed(message))
    if len(values) != 1:
        raise Damaged(f"{len(values)} messages where one belongs")
    return values[0]


def _load(head: bytes, body: bytes) -> Any:
    try:
        cursor = _Cursor(body)
        value = _value(json.loads(head), cursor, 0)
    except Damaged:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RuntimeError) as error:
        raise Damaged(f"no message: {type(error).__name__}") from None
    if cursor.at != len(body):
        raise Damaged("bytes that belong to nothing")
    return value


class _Cursor:
    """Takes bytes off a body, one value after the other."""

    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.body):
            raise Damaged("a value that is longer than the message")
        self.at += size
        return self.body[self.at - size : self.at]


def _value(plain: Any, cursor: _Cursor, depth: int) -> Any:
    if depth > DEEPEST:
        raise Damaged("too deep")
    if not isinstance(plain, dict):
        if isinstance(plain, list):
            raise Damaged("a list that does not say what it is")
        return plain
    (kind, inner), *more = plain.items()
    if more:
        raise Damaged("a value of two kinds")
    if kind == "bytes":
        return cursor.take(whole_number(inner))
    if kind == "tensor":
        return _tensor(inner, cursor)
    if kind == "dict":
        return {_value(key, cursor, depth + 1): _value(item, cursor, depth + 1) for key, item in inner}
    items = [_value(item, cursor, depth + 1) for item in inner]
    if kind not in ("list", "tuple"):
        raise Damaged("a value of an unknown kind")
    return items if kind == "list" else tuple(items)


def _tensor(inner: Any, cursor: _Cursor) -> Tensor:
    name, shape = inner
    dtype = DTYPES[name]
    sizes = [whole_number(size) for size in shape]
    if len(sizes) > DEEPEST:
        raise Damaged("a tensor of too many dims")
    raw = cursor.take(math.prod(sizes) * dtype.itemsize)
    if not raw:
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if dtype is torch.bool:
        return flat.ne(0).view(sizes)  # a byte of 2 is no bool
    return flat.view(dtype).view(sizes)


def whole_number(value: Any, most: int = MOST_BODY) -> int:
    """value, if it is a whole number from 0 to `most`; else raises Damaged."""
    if type(value) is not int or not 0 <= value <= most:
        raise Damaged(f"{value!r:.40} where a number belongs")
    return value
