"""Paced runs: tensors are really sent, and every communication also takes its time on a modelled cluster.

The rest of the time is slept, so that a laptop with fewer cores than ranks shows what two machines of four chips would.
"""

from collections.abc import Sequence
from time import monotonic, sleep

from minidist.plan import cost
from minidist.plan.hardware import Cluster

RECEIVES = ("recv", "irecv")
MESSAGES = ("send", "isend", *RECEIVES)


def sleep_until(end: float) -> None:
    """Return when `time.monotonic` has reached `end`."""
    while (left := end - monotonic()) > 0:
        sleep(left)


class Pace:
    """The modelled times of one rank on a cluster.

    A communication begins when the last of those who take part has called and this rank's outgoing link is free; it
    then takes its alpha-beta seconds and keeps the link busy. A rank has two outgoing links, one inside its machine and
    one between machines, which work at the same time. A collective is timed as a ring (broadcast and reduce: a tree)
    whose every hop is the slowest link among its ranks.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._reserved: dict[str, float] = {}  # until when each outgoing link is taken, as far as known when calling
        self._ended: dict[str, float] = {}  # when the last communication that is over ended on it

    def lane(self, ranks: Sequence[int]) -> str:
        """Which of a rank's outgoing links a communication among these world ranks takes."""
        return "inside" if len({self.cluster.machine(rank) for rank in ranks}) == 1 else "between"

    def seconds(self, op: str, nbytes: int, ranks: Sequence[int]) -> float:
        """What the communication takes; for a message `ranks` are its two ends."""
        link = self.cluster.slowest(tuple(ranks), nbytes)
        return link.seconds(nbytes) if op in MESSAGES else cost.seconds(op, nbytes, len(ranks), link)

    def call(self, op: str, nbytes: int, ranks: Sequence[int]) -> float:
        """When a communication called now can begin, as far as this rank knows; it takes the link from then on."""
        if op in RECEIVES:
            return monotonic()
        lane = self.lane(ranks)
        ready = max(monotonic(), self._reserved.get(lane, 0.0), self._ended.get(lane, 0.0))
        self._reserved[lane] = ready + self.seconds(op, nbytes, ranks)
        return ready

    def times(self, op: str, nbytes: int, ranks: Sequence[int], ready: float) -> tuple[float, float]:
        """Start and end of the communication. ready: the latest of what those who take part got from `call`."""
        seconds = self.seconds(op, nbytes, ranks)
        if op in RECEIVES:
            return ready, ready + seconds
        lane = self.lane(ranks)
        start = max(ready, self._ended.get(lane, 0.0))
        self._ended[lane] = start + seconds
        return start, start + seconds

    def compute_seconds(self, flops: float | None, seconds: float | None) -> float:
        """What a computation takes, by its operations or as given; 0 where neither is."""
        if seconds is not None:
            return seconds
        return 0.0 if flops is None else self.cluster.chip.seconds(flops)
