"""Who waits for whom, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MOST_RANKS = 4  # named one by one


@dataclass(frozen=True)
class Place:
    """A line of the learner's code. Empty function: not known."""

    function: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        if not self.function:
            return "somewhere in your code"
        text = f": {self.text}" if self.text else ""
        return f"line {self.line} of {self.function}{text}"


def place_of(said: Any) -> Place:
    """What a rank said about where it is; nothing where that makes no sense."""
    if not isinstance(said, list | tuple) or [type(part) for part in said] != [str, int, str]:
        return Place()
    function, line, text = said
    return Place(function[:60], line, text.strip()[:100])


def stuck(seats: Sequence[Any]) -> tuple[str, str]:
    """The sentence for ranks of which none can go on, and the id of the mistake that it usually is."""
    waiting = [rank for rank, seat in enumerate(seats) if seat.state == "waiting"]
    returned = [rank for rank, seat in enumerate(seats) if seat.state == "returned"]
    lines = [f"    rank {rank} waits for {_what(seats[rank])}" for rank in waiting[:_MOST_RANKS]]
    if len(waiting) > _MOST_RANKS:
        lines.append(f"    and so do {len(waiting) - _MOST_RANKS} more")
    if returned:
        ranks = ", ".join(map(str, returned))
        lines.append(f"    rank {ranks} has returned" if len(returned) == 1 else f"    ranks {ranks} have returned")
    mistake, cause = _another_tag(seats) or _cause(
        [seats[rank].waits for rank in waiting], [seats[rank] for rank in returned]
    )
    return "Deadlock: nobody can go on.\n" + "\n".join(lines) + f"\n  {cause}", mistake


def _what(seat: Any) -> str:
    post = seat.waits
    end = {"isend": f"its isend to rank {post.peer}", "irecv": f"a message from rank {post.peer}"}
    return f"{end.get(post.what, f'the others in {post.what}')} ({seat.at})"


def _another_tag(seats: Sequence[Any]) -> tuple[str, str] | None:
    """The sentence for a message that is there, under another tag than its receiver asks for; None if there is none."""
    for rank, seat in enumerate(seats):
        post = seat.waits
        if seat.state != "waiting" or post.what not in ("isend", "irecv") or not 0 <= post.peer < len(seats):
            continue
        opposite = "irecv" if post.what == "isend" else "isend"
        for other in seats[post.peer].posts.values():
            if (other.what, other.peer) == (opposite, rank) and not other.over and other.tag != post.tag:
                src, dst = (rank, post.peer) if post.what == "isend" else (post.peer, rank)
                sent, wanted = (post.tag, other.tag) if post.what == "isend" else (other.tag, post.tag)
                return "mismatched-messages", (
                    f"There is a message from rank {src} to rank {dst}, sent with tag {sent}, but rank {dst} asks for "
                    f"tag {wanted}. A message is received under the tag that it was sent with."
                )
    return None


def _cause(waits: Sequence[Any], returned: Sequence[Any]) -> tuple[str, str]:
    kinds = {post.what for post in waits}
    if kinds == {"isend"} and not returned:
        return "wait-before-receive", (
            "Everyone waits for its own isend before it has asked for a message. A send is over only when the other "
            "side receives: call irecv as well, and only then wait for either."
        )
    if kinds == {"irecv"} and not returned:
        return "receive-first-is-safe", (
            "Everyone waits for a message and nobody has sent one. Call isend before waiting for the irecv."
        )
    if kinds - {"isend", "irecv"}:
        return "not-all-join", (
            "A collective is over only when every rank has called it: the same calls in the same order on all ranks, "
            "also on one that has nothing to contribute."
        )
    if returned:
        return "unequal-message-counts", (
            "A message needs two: what one rank sends the other receives, as often and with the same tag. Count the "
            "sends and receives of each pair of ranks."
        )
    return "mismatched-messages", (
        "Sends and receives do not meet: check source, destination, tag and order on both sides."
    )
