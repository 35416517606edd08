"""Functions and values as bytes: by value where the other process could not import them, tensors as raw memory.

A payload lives in an anonymous file (memfd). Large tensors and arrays are not copied on reading: they lie on a private
(copy-on-write) mapping of that file, so four ranks share one copy of a large argument until they write to it.
"""

import functools
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import SourceLoader
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from zipimport import zipimporter

import cloudpickle
import torch
from cloudpickle import cloudpickle as internals

_LENGTH = struct.Struct("<Q")
_ALIGN = 64
_MAP_FROM = 1 << 20  # smaller payloads are read, not mapped


@dataclass(frozen=True)
class Packed:
    """A value on its way: the pieces of its payload, and the files of all code in it."""

    pieces: list[bytes | memoryview]
    files: set[str]


def dump(value: Any) -> Packed:
    """``value`` as a payload. Raises whatever pickling raises."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=buffers.append)
    pickler.dump(value)
    views = [buffer.raw() for buffer in buffers]
    head = [stream.tell(), len(views), *(view.nbytes for view in views)]
    pieces: list[bytes | memoryview] = [b"".join(map(_LENGTH.pack, head)), stream.getbuffer()]
    size = sum(map(len, pieces))
    for view in views:
        padding = -size % _ALIGN
        pieces += [bytes(padding), view]
        size += padding + view.nbytes
    return Packed(pieces, pickler.files)


def write(fd: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write a payload to an open file."""
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


def read(fd: int) -> Any:
    """The value of the payload in an open file. Leaves the file open."""
    mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    memory = memoryview(mapped if len(mapped) >= _MAP_FROM else bytearray(mapped))
    pickled, count = (_LENGTH.unpack_from(memory, 8 * i)[0] for i in range(2))
    lengths = [_LENGTH.unpack_from(memory, 8 * (2 + i))[0] for i in range(count)]
    start = 8 * (2 + count)
    buffers, at = [], start + pickled
    for length in lengths:
        at += -at % _ALIGN
        buffers.append(memory[at : at + length])
        at += length
    return pickle.loads(memory[start : start + pickled], buffers=buffers)


def adopt_main(fn: Any) -> None:
    """Give this process's ``__main__`` the names that ``fn``, which came by value, knows from another one's.

    What is pickled by name (a model that is saved, an object that is gathered from other ranks) is then found there.
    """
    while isinstance(fn, functools.partial | MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    if isinstance(fn, FunctionType) and fn.__module__ == "__main__":
        names = {name: value for name, value in fn.__globals__.items() if not name.startswith("__")}
        vars(sys.modules["__main__"]).update({**names, fn.__name__: fn})


class _Pickler(cloudpickle.Pickler):
    """cloudpickle with three changes.

    Code keeps its file name, so that a traceback points into the cell. Functions and classes of modules that a fresh
    interpreter would not find (a test file, a module built by hand) travel by value. Plain tensors travel as raw bytes,
    and arrive on the CPU.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.files: set[str] = set()
        self._importable: dict[str, bool] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:
            return _reduce_tensor(obj)
        if isinstance(obj, CodeType):
            self.files.add(obj.co_filename)
            return _reduce_code(obj)
        if isinstance(obj, FunctionType | type) and not self._found_by_ranks(obj.__module__):
            by_value = internals._dynamic_class_reduce if isinstance(obj, type) else self._dynamic_function_reduce
            return by_value(obj)
        return super().reducer_override(obj)

    def _found_by_ranks(self, name: str) -> bool:
        if name not in self._importable:
            module = sys.modules.get(name)
            self._importable[name] = module is None or name == "__main__" or importable(module)
        return self._importable[name]


def importable(module: ModuleType) -> bool:
    """Whether a fresh interpreter with this sys.path would find this very file under the module's name, and load it in
    the same way. (pytest's own loader rewrites the tests it loads.)

    >>> importable(pickle), importable(ModuleType("made_by_hand"))
    (True, True)
    """
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py"):
        return True
    if not isinstance(getattr(module, "__loader__", None), SourceLoader | zipimporter):
        return False
    path, spec = None, None
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((found for find in finders if find and (found := find(name, path))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _reduce_code(code: CodeType) -> Any:
    make, args, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if isinstance(a, str) and a == "<dynamic-code>" else a for a in args)


def _reduce_tensor(x: torch.Tensor) -> Any:
    if x.layout != torch.strided or x.is_quantized or x.device.type == "meta" or x.__dict__:
        return x.__reduce_ex__(5)
    flat = x.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = pickle.PickleBuffer(flat.view(torch.uint8).numpy().data) if flat.numel() else None
    return _rebuild_tensor, (raw, x.dtype, tuple(x.shape), x.requires_grad)


def _rebuild_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.empty(0, dtype=dtype) if raw is None else torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return flat.view(shape).requires_grad_(requires_grad)
