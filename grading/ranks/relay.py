"""The grader's side of every message: matches sends with receives, does collectives, and knows who waits for whom.

A send is over when its receive has been asked for, and the other way round, so that a program which only works because
somebody buffers stands still here. When every rank waits, has returned or has failed, nothing can happen any more: a
deadlock is seen at once, without a clock. No process and no socket in this file.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grading.ranks import collectives
from grading.ranks.codec import Damaged, whole_number
from grading.ranks.explain import Place, place_of, stuck
from grading.ranks.run import Asked, Collective, Job, Message

Reply = tuple[int, dict[str, Any]]  # for which rank, and what it is told


MOST_EVENTS = 10_000  # that a run may have: more is a loop that does not end


class Wrong(Exception):
    """What ranks asked for does not fit together, or is not allowed. verdict, rank, why and mistake as in Run."""

    def __init__(self, rank: int, why: str, mistake: str, verdict: str = "error"):
        super().__init__(why)
        self.rank, self.why, self.mistake, self.verdict = rank, why, mistake, verdict


@dataclass(slots=True)
class Post:
    """One thing a rank began: a send, a receive or its part in a collective."""

    rank: int
    number: int
    what: str  # isend, irecv, or a collective's name
    peer: int
    at: Place
    data: Tensor
    tag: int = 0
    note: Any = None  # its line in the log
    args: Any = None
    over: bool = False
    answer: Any = None


@dataclass(slots=True)
class Seat:
    """What is known of one rank. state: running, waiting, returned, failed or lost."""

    state: str = "running"
    posts: dict[int, Post] = field(default_factory=dict)
    waits: Post | None = None
    at: Place | None = None  # where it waits
    joined: int = 0  # collectives of this call
    last: int = -1  # number of its latest communication
    value: Any = None
    why: str = ""
    kind: str = ""


class Relay:
    """The world as the grader sees it. `receive` takes what a rank said and returns whom to tell what."""

    def __init__(self, job: Job) -> None:
        self.job, self.call = job, 0
        self.seats = self._take_seats()
        self.messages: list[Message] = []
        self.collectives: list[Collective] = []
        self.asked: list[Asked] = []
        self.results: list[list[Any]] = []
        self.finished = False
        self._events = 0
        self._sends: dict[tuple[int, int, int], deque[Post]] = {}
        self._receives: dict[tuple[int, int, int], deque[Post]] = {}
        self._open: dict[int, list[Post]] = {}  # collectives that not all ranks have joined

    @property
    def size(self) -> int:
        """How many ranks take part in this call."""
        return len(self.job.calls[self.call])

    def _take_seats(self) -> list[Seat]:
        """Everyone's for this call; who is left out has nothing to do."""
        return [Seat("running" if rank < self.size else "returned") for rank in range(self.job.ranks)]

    # ---- what a rank can say -----------------------------------------------------------------------------------------

    def receive(self, rank: int, said: Any) -> list[Reply]:
        """Take in what this rank said. Raises Wrong, and Damaged where it makes no sense."""
        if not isinstance(said, dict) or self.seats[rank].state != "running":
            raise Damaged("it spoke when it had nothing to say")
        self._events += 1
        if self._events > MOST_EVENTS:
            why = f"More than {MOST_EVENTS:,} messages, waits and calls: this does not end."
            raise Wrong(rank, why, "endless-loop", "timeout")
        op = said.get("op")
        if op == "isend":
            return self._send(rank, said)
        if op == "irecv":
            return self._receive(rank, said)
        if op == "collective":
            return self._join(rank, said)
        if op == "wait":
            return self._wait(rank, said)
        if op == "ask":
            return self._ask(rank, said)
        if op == "returned":
            return self._returned(rank, said.get("value"))
        if op == "failed":
            return self._failed(rank, said)
        raise Damaged(f"it said {op!r:.40}")

    def lose(self, rank: int, why: str) -> None:
        """This rank's process is gone."""
        if self.seats[rank].state != "failed":
            self.seats[rank].state, self.seats[rank].why = "lost", why

    @property
    def settled(self) -> bool:
        """Whether nothing can happen any more."""
        return self.finished or all(seat.state != "running" for seat in self.seats)

    @property
    def bad(self) -> list[int]:
        """Ranks that failed or are gone."""
        return [rank for rank, seat in enumerate(self.seats) if seat.state in ("failed", "lost")]

    def stuck(self) -> tuple[str, str]:
        """Why nobody can go on, in words, and the mistake that it usually is."""
        return stuck(self.seats[: self.size])

    # ---- messages ----------------------------------------------------------------------------------------------------

    def _send(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        post = self._post(rank, said, "isend")
        post.tag = tag = whole_number(said.get("tag"), 2**31)
        x, dst = post.data, post.peer
        post.note = Message(self.call, rank, dst, tag, x.numel(), _dtype(x), self._events, given=_given(said))
        self.messages.append(post.note)
        self._sends.setdefault((rank, dst, tag), deque()).append(post)
        return self._match((rank, dst, tag))

    def _receive(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        post = self._post(rank, said, "irecv")
        post.tag = tag = whole_number(said.get("tag"), 2**31)
        post.args = self._events
        self._receives.setdefault((post.peer, rank, tag), deque()).append(post)
        return self._match((post.peer, rank, tag))

    def _match(self, ends: tuple[int, int, int]) -> list[Reply]:
        sends, receives = self._sends.get(ends), self._receives.get(ends)
        if not sends or not receives:
            return []
        send, receive = sends.popleft(), receives.popleft()
        out, into = send.data, receive.data
        for mistake, one, other in (
            ("wrong-buffer-dtype", _dtype(out), _dtype(into)),
            ("wrong-buffer-size", out.numel(), into.numel()),
        ):
            if one != other:
                sent, room = (f"{x.numel()} {_dtype(x)}" for x in (out, into))
                why = (
                    f"rank {ends[0]} sends {sent} to rank {ends[1]}, whose buffer for it holds {room} "
                    f"({receive.at or 'irecv'})."
                )
                raise Wrong(ends[1], why, mistake)
        send.note.posted = receive.args
        receive.note, receive.answer = send.note, out.reshape(-1)
        return [*self._complete(send), *self._complete(receive)]

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _join(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        name = said.get("name")
        if name not in collectives.NAMES:
            raise Damaged(f"it called {name!r:.40}")
        post = self._post(rank, said, name)
        x = post.data
        post.args = said.get("args")
        post.note = Collective(self.call, rank, name, x.numel(), x.nbytes, _dtype(x), self._events, given=_given(said))
        self.collectives.append(post.note)
        number, seat = self.seats[rank].joined, self.seats[rank]
        seat.joined += 1
        joined = self._open.setdefault(number, [])
        joined.append(post)
        if (first := joined[0]) is not post:
            self._compare(first, post, number)
        if len(joined) < self.size:
            return []
        del self._open[number]
        joined.sort(key=lambda each: each.rank)
        answers = collectives.answers(name, post.args, [each.data for each in joined])
        replies: list[Reply] = []
        for each, answer in zip(joined, answers, strict=True):
            each.answer = answer
            replies += self._complete(each)
        return replies

    def _compare(self, first: Post, post: Post, number: int) -> None:
        mistake = collectives.difference(
            (first.what, first.args, first.data), (post.what, post.args, post.data), (first.rank, post.rank)
        )
        if mistake:
            calls = [f"rank {each.rank}: {each.what} of {_shape(each.data)} ({each.at})" for each in (first, post)]
            why = f"Ranks call different things as their collective number {number + 1}.\n    " + "\n    ".join(calls)
            raise Wrong(post.rank, why, mistake)

    # ---- waiting, asking, ending -------------------------------------------------------------------------------------

    def _post(self, rank: int, said: dict[str, Any], what: str) -> Post:
        self._check_allowed(rank, what, said)
        x, number = said.get("x"), whole_number(said.get("id"))
        if not isinstance(x, Tensor) or number <= self.seats[rank].last:
            raise Damaged("a communication without a tensor, or one twice")
        self.seats[rank].last = number
        peer = whole_number(said.get("peer"), self.size - 1) if what in ("isend", "irecv") else -1
        post = Post(rank, number, what, peer, place_of(said.get("at")), x)
        self.seats[rank].posts[number] = post
        return post

    def _check_allowed(self, rank: int, what: str, said: dict[str, Any]) -> None:
        given = _given(said)
        if what in (self.job.given_calls.get(given, ()) if given else self.job.allowed):
            return
        may = ", ".join(f"comm.{name}" for name in sorted(self.job.allowed)) or "no call of comm"
        where = place_of(said.get("at"))
        why = f"rank {rank} called comm.{what} ({where}). The task is to build it; you may use {may}."
        raise Wrong(rank, why, "library-collective", "shortcut")

    def _wait(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        post = self.seats[rank].posts.get(whole_number(said.get("id")))
        if post is None:
            raise Damaged("it waits for something it never began")
        if post.what == "isend":
            post.note.changed |= said.get("changed") is True
        seat = self.seats[rank]
        seat.state, seat.waits, seat.at = "waiting", post, place_of(said.get("at"))
        return self._answer(post) if post.over else []

    def _complete(self, post: Post) -> list[Reply]:
        post.over = True
        return self._answer(post) if self.seats[post.rank].waits is post else []

    def _answer(self, post: Post) -> list[Reply]:
        """What a rank waits for is there: it runs again. It is told once."""
        seat = self.seats[post.rank]
        del seat.posts[post.number]
        seat.state, seat.waits = "running", None
        if post.what == "irecv":
            post.note.taken = self._events
        elif post.what != "isend":
            post.note.waited = self._events
        return [(post.rank, {"id": post.number, "x": post.answer})]

    def _ask(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        key = said.get("key")
        known = self.job.answers[self.call][rank] if self.job.answers else {}
        if not isinstance(key, str) or key not in known:
            raise Damaged(f"it asked for {key!r:.40}")
        self.asked.append(Asked(self.call, rank, key, self._events))
        return [(rank, {"x": known[key]})]

    def _failed(self, rank: int, said: dict[str, Any]) -> list[Reply]:
        seat = self.seats[rank]
        seat.state, seat.why, seat.kind = "failed", str(said.get("why"))[:4000], str(said.get("kind"))[:80]
        return []

    def _returned(self, rank: int, value: Any) -> list[Reply]:
        self.seats[rank].state, self.seats[rank].value = "returned", value
        if any(seat.state != "returned" for seat in self.seats):
            return []
        self.results.append([seat.value for seat in self.seats[: self.size]])
        for (src, dst, tag), posts in self._receives.items():
            for post in posts:
                x = post.data
                self.messages.append(Message(self.call, src, dst, tag, x.numel(), _dtype(x), posted=post.args))
        self._sends, self._receives, self._open = {}, {}, {}
        self.finished = self.call + 1 == len(self.job.calls)
        if not self.finished:
            self.call += 1
            self.seats = self._take_seats()
        return [(each, {"go": not self.finished}) for each in range(self.job.ranks)]


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _shape(x: Tensor) -> str:
    return f"{_dtype(x)} {list(x.shape)}"


def _given(said: dict[str, Any]) -> str:
    given = said.get("given", "")
    return given if isinstance(given, str) else ""
