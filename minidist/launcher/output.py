"""What a rank prints: whole lines, in order, and not without end."""

_TAIL = 2_000  # bytes of the end of a cut output that are shown after all
_LONG_LINE = 1 << 16


class Output:
    """One rank's output on its way to the user.

    >>> output = Output(limit=10)
    >>> output.add("out", b"one"), output.add("out", b" two\\nthree"), output.rest("out")
    (b'', b'one two\\n', b'three\\n')
    """

    def __init__(self, limit: int):
        self._room = limit
        self._open = {"out": b"", "err": b""}
        self._tail = {"out": b"", "err": b""}
        self._cut = {"out": 0, "err": 0}
        self._errors = b""

    @property
    def last_errors(self) -> str:
        """The end of what came on stderr."""
        return self._errors.decode("utf-8", "replace")

    def add(self, stream: str, data: bytes) -> bytes:
        """Take what came; return the whole lines to show now."""
        if stream == "err":
            self._errors = (self._errors + data)[-4000:]
        if self._cut[stream]:
            return self._drop(stream, data)
        text = self._open[stream] + data
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) > _LONG_LINE else 0)
        lines, self._open[stream] = text[:end], text[end:]
        shown = _as_on_a_terminal(lines[: max(self._room, 0)])
        if len(lines) > self._room:
            self._drop(stream, lines[max(self._room, 0) :] + self._open[stream])
            self._open[stream] = b""
        self._room -= len(lines)
        return shown

    def rest(self, stream: str) -> bytes:
        """At the end: the unfinished line, or the end of what was cut and how much that was."""
        text = self._open[stream]
        if self._cut[stream]:
            tail = (self._tail[stream] + text)[-_TAIL:]
            tail = tail[tail.find(b"\n", 0, -1) + 1 :]
            hidden = self._cut[stream] + len(text) - len(tail)
            text = f"... {hidden:,} bytes of output not shown ...\n".encode() * (hidden > 0) + tail
        self._open[stream], self._cut[stream] = b"", 0
        return _as_on_a_terminal(text if not text or text.endswith(b"\n") else text + b"\n")

    def _drop(self, stream: str, data: bytes) -> bytes:
        self._cut[stream] += len(data)
        self._tail[stream] = (self._tail[stream] + data)[-_TAIL:]
        return b""


def _as_on_a_terminal(text: bytes) -> bytes:
    """A carriage return starts the line again, so only what follows the last one is seen.

    >>> _as_on_a_terminal(b"10%\\r20%\\r30%\\nnext\\r\\n")
    b'30%\\nnext\\n'
    """
    if b"\r" not in text:
        return text
    return b"\n".join(line.rstrip(b"\r").rsplit(b"\r", 1)[-1] for line in text.split(b"\n"))
