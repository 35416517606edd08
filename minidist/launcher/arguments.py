"""Is what `launch` was asked to do possible? Answered before anything starts."""

import builtins
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from minidist.plan.hardware import Cluster


def check_call(fn: Any, args: Any) -> None:
    """Raise TypeError unless ``fn(world, *args)`` is a possible call."""
    if not callable(fn):
        raise TypeError(f"launch takes a function, not {type(fn).__name__}: write md.launch(f), not md.launch(f(...))")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple of arguments, not {type(args).__name__}: write args=(x,)")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        called = ", ".join(["world", *(f"args[{i}]" for i in range(len(args)))])
        name = getattr(fn, "__name__", "fn")
        raise TypeError(f"each rank calls {name}({called}), but it is {name}{signature}: {error}") from None


def check_pace(pace: Any, ranks: int) -> None:
    """Raise unless ``pace`` is None, or a Cluster with a chip for every rank."""
    if pace is None:
        return
    if not isinstance(pace, Cluster):
        raise TypeError(f"pace must be a Cluster, and is {pace!r}: write pace=md.Cluster(...)")
    if ranks > pace.ranks:
        raise ValueError(f"pace has {pace.machines} x {pace.chips} chips for {ranks} ranks: each rank needs its own")


def check_names(fn: Any) -> None:
    """Raise NameError if ``fn``, or a function of its file that it uses, reads a global name that exists nowhere."""
    todo = list(_functions_of(fn))
    file = todo[0].__module__ if todo else None
    seen: set[int] = set()
    missing: dict[str, str] = {}
    written: set[str] = set()
    while todo:
        function = todo.pop()
        if id(function) in seen or function.__module__ != file:
            continue
        seen.add(id(function))
        scope = function.__globals__
        for code in _codes_of(function.__code__):
            written |= _globals_set(code)
            for name, line in _globals_read(code):
                if name in scope:
                    todo += _functions_of(scope[name])
                elif not hasattr(builtins, name):
                    missing.setdefault(name, f"{code.co_name}, line {line},")
    for name, place in missing.items():
        if name not in written:
            raise NameError(f"name {name!r} is not defined: {place} reads it, and no rank would find it")


def _functions_of(value: Any) -> Iterator[FunctionType]:
    """The functions that calling ``value`` is sure to involve, as far as they can be seen."""
    if isinstance(value, functools.partial):
        yield from _functions_of(value.func)
    elif isinstance(value, MethodType):
        yield from _functions_of(value.__func__)
    elif isinstance(value, FunctionType):
        yield value
        contents = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())
        yield from (content for content in contents if isinstance(content, FunctionType))
    elif isinstance(value, type):
        members = (getattr(m, "__func__", getattr(m, "fget", m)) for m in vars(value).values())
        yield from (member for member in members if isinstance(member, FunctionType))


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_of(constant)


def _globals_read(code: CodeType) -> list[tuple[str, int | None]]:
    """Global names a function's code reads and does not set, with the line; none where it handles NameError itself."""
    if "NameError" in code.co_names:
        return []
    found, written = [], set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "STORE_NAME"):
            written.add(step.argval)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and not step.argval.startswith("__"):
            found.append((step.argval, step.positions and step.positions.lineno))
    return [(name, line) for name, line in found if name not in written]


def _globals_set(code: CodeType) -> set[str]:
    """Names that a function's code declares global and sets."""
    return {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}


def why_unpicklable(fn: Callable[..., Any], args: Any, error: Exception, dump: Callable[[Any], Any]) -> TypeError:
    """The error to raise when ``(fn, args)`` could not be packed: names what it is that cannot travel."""
    for what, value in _parts(fn, args):
        try:
            dump(value)
        except Exception as reason:
            return TypeError(f"{what} cannot be sent to the ranks: {reason}. Make it inside the function instead.")
    return TypeError(f"the function or its arguments cannot be sent to the ranks: {error}")


def _parts(fn: Any, args: Any) -> Iterator[tuple[str, Any]]:
    for i, value in enumerate(args):
        yield f"args[{i}] (a {type(value).__name__})", value
    if isinstance(fn, functools.partial):
        yield from (
            (f"an argument of the partial (a {type(v).__name__})", v) for v in (*fn.args, *fn.keywords.values())
        )
        fn = fn.func
    if isinstance(fn, MethodType):
        yield f"the object whose method this is (a {type(fn.__self__).__name__})", fn.__self__
        fn = fn.__func__
    if not isinstance(fn, FunctionType):
        return
    filled = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    for name, cell in ((name, cell) for name, cell in filled if cell != CellType()):
        yield f"{name!r} (a {type(cell.cell_contents).__name__}), which {fn.__name__} uses,", cell.cell_contents
    for code in _codes_of(fn.__code__):
        for name, _ in _globals_read(code):
            if name in fn.__globals__:
                value = fn.__globals__[name]
                yield f"{name!r} (a {type(value).__name__}), which {fn.__name__} uses,", value
