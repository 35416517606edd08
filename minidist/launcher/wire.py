"""Messages between your process and a world's supervisor: framed, buffered, with file descriptors for what is big."""

import socket
import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

_FRAME = struct.Struct("<BBIQ")  # kind, number of descriptors, rank, bytes in the body
_CHUNK = 1 << 16


class Kind(IntEnum):
    """What a message says."""

    JOB = 1  # your process -> supervisor: what to run; the payload's descriptors come with it
    TAKEN = 2  # supervisor -> your process: the job is there, and from now on ranks may run
    OUT = 3  # complete lines a rank printed
    ERR = 4  # the same for its stderr
    RESULT = 5  # the descriptor of what one rank returned
    END = 6  # the verdict; always the last message


@dataclass(frozen=True)
class Message:
    """One message. ``fds`` are open descriptors that the receiver must close."""

    kind: Kind
    rank: int = 0
    body: bytes = b""
    fds: tuple[int, ...] = ()


class Channel:
    """One end of a Unix stream socket that carries Messages. Closing it is how either side says "stop"."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> None:
        """Block until the message is sent. Raises OSError if the other side is gone."""
        frame = _FRAME.pack(message.kind, len(message.fds), message.rank, len(message.body)) + message.body
        sent = socket.send_fds(self.sock, [frame], message.fds) if message.fds else 0
        self.sock.sendall(memoryview(frame)[sent:])

    def receive(self) -> Message:
        """Block until a whole message is there. Raises EOFError if the other side closed first."""
        while (message := self._next()) is None:
            data, fds, _, _ = socket.recv_fds(self.sock, _CHUNK, 253)
            if not data:
                raise EOFError("the other side closed the channel")
            self._fds.extend(fds)
            self._bytes += data
        return message

    def _next(self) -> Message | None:
        if len(self._bytes) < _FRAME.size:
            return None
        kind, nfds, rank, length = _FRAME.unpack_from(self._bytes)
        end = _FRAME.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_FRAME.size : end])
        del self._bytes[:end]
        return Message(Kind(kind), rank, body, tuple(self._fds.popleft() for _ in range(nfds)))

    def close(self) -> None:
        self.sock.close()
