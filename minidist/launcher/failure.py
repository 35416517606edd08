"""An exception of a rank as the user should read it."""

import traceback
from typing import Any

from minidist.launcher.frames import Library
from minidist.launcher.job import Failure

# What gloo, TCP and torch's stores say when another rank went away.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "remote process exited",
)
_LONGEST_MESSAGE = 4_000
_LONGEST_TEXT = 20_000


def describe(error: BaseException) -> Failure:
    """The exception with its notes and causes, and the frames that are the user's own."""
    library = Library.here()
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if not library.holds(frame.filename)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else ""
    _keep_user_frames(shown, library, set())
    peer = isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _PEER_GONE)
    message = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(shown.format()).rstrip().removesuffix(message)
    message = message.removeprefix("minidist.").removeprefix(f"{type(error).__module__.removeprefix('minidist.')}.")
    return Failure(
        type(error).__name__, _shortened(message, _LONGEST_MESSAGE), place, _shortened(text, _LONGEST_TEXT), peer
    )


def unsendable(value: Any, error: BaseException) -> Failure:
    """The failure of a rank whose result cannot be pickled."""
    kind = type(error).__name__
    message = (
        f"{kind}: it returned a {type(value).__name__} that cannot be sent back: {error}\n"
        "Return tensors, arrays, numbers, strings, and lists or dicts of them."
    )
    return Failure(kind, message, "", "")


def _keep_user_frames(shown: traceback.TracebackException, library: Library, seen: set[int]) -> None:
    """Drop library frames, in the causes and the members of groups as well, wherever user frames are left."""
    if id(shown) in seen:
        return
    seen.add(id(shown))
    own = [frame for frame in shown.stack if not library.holds(frame.filename)]
    if own:
        shown.stack[:] = own
    for other in (shown.__cause__, shown.__context__, *(getattr(shown, "exceptions", None) or ())):
        if other is not None:
            _keep_user_frames(other, library, seen)


def _shortened(text: str, most: int) -> str:
    """
    >>> _shortened("abcdefghij" * 10, 40)
    'abcdefghijabcdefghij ... [60 characters] ... abcdefghijabcdefghij'
    """
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... [{len(text) - 2 * half} characters] ... {text[-half:]}"
