"""What the environment says about the world: torchrun's variables, else Slurm's, else a world of one. Pure functions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """A process's place in a world that something else started. ``source`` is torchrun, slurm or alone."""

    rank: int
    size: int
    local_rank: int
    source: str
    master: str = ""  # host:port where the ranks meet
    notes: tuple[str, ...] = ()  # what the user should know about how this was found

    @property
    def alone(self) -> bool:
        """Whether nothing started several ranks."""
        return self.source == "alone"

    def table(self) -> str:
        """The resolved values, a line each."""
        rows = [
            ("rank", f"{self.rank} of {self.size}"),
            ("local rank", str(self.local_rank)),
            ("found by", self.source),
        ]
        rows += [("ranks meet at", self.master)] if self.master else []
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<14}{value}" for name, value in rows)


def resolve(env: Mapping[str, str]) -> Environment:
    """Who am I? torchrun's variables win over Slurm's. Raises RuntimeError where they are half set or impossible.

    >>> resolve({"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}).local_rank
    0
    >>> resolve({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4"}).rank
    3
    >>> resolve({}).alone
    True
    """
    slurm = _slurm(env)
    torchrun = _torchrun(env)
    if torchrun is None:
        return slurm
    if not slurm.alone and (slurm.rank, slurm.size) != (torchrun.rank, torchrun.size):
        note = (
            f"torchrun says rank {torchrun.rank} of {torchrun.size}, Slurm says {slurm.rank} of {slurm.size}: "
            "torchrun's is used"
        )
        return Environment(**{**vars(torchrun), "notes": (*torchrun.notes, note)})
    return torchrun


def _torchrun(env: Mapping[str, str]) -> Environment | None:
    names = ("RANK", "WORLD_SIZE")
    if not any(name in env for name in (*names, "LOCAL_RANK")):
        return None
    missing = [name for name in names if name not in env]
    if missing:
        present = [name for name in (*names, "LOCAL_RANK") if name in env]
        raise RuntimeError(
            f"the environment is half set: {', '.join(present)} without {', '.join(missing)}. "
            "Start with torchrun, which sets all of them, or unset what is there."
        )
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    notes = () if "LOCAL_RANK" in env else ("LOCAL_RANK is not set: RANK is used, right on one machine only",)
    _check("RANK", rank, "WORLD_SIZE", size)
    master = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{env.get('MASTER_PORT', '29500')}"
    return Environment(rank, size, local, "torchrun", master, notes)


def _slurm(env: Mapping[str, str]) -> Environment:
    if "SLURM_PROCID" not in env:
        return Environment(0, 1, 0, "alone")
    if "SLURM_STEP_NUM_TASKS" not in env:
        hint = "inside a Slurm job, but not started by srun: this is a world of one. Start with srun for more."
        return Environment(0, 1, 0, "alone", notes=(hint,))
    rank, size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if size == 1:
        return Environment(0, 1, 0, "alone", notes=("srun started one task: this is a world of one",))
    _check("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
    if "SLURM_LOCALID" not in env:
        raise RuntimeError("the environment is half set: SLURM_PROCID without SLURM_LOCALID. Start with srun.")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    host = env.get("MASTER_ADDR") or first_host(nodes)
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or 0)
    step = int(re.sub(r"\D", "", env.get("SLURM_STEP_ID", "0")) or 0)
    port = env.get("MASTER_PORT") or str(20_000 + (job * 31 + step) % 20_000)
    return Environment(rank, size, _number(env, "SLURM_LOCALID"), "slurm", f"{host}:{port}")


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,a2"), first_host("n[3]-ib"), first_host("one")
    ('gpu07', 'a1', 'n3-ib', 'one')
    """
    first = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,]*)", nodes)
    assert first is not None
    head, numbers, tail = first.groups()
    return head + (re.split(r"[,-]", numbers)[0] if numbers else "") + tail


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise RuntimeError(f"{name} must be a whole number, and is {env[name]!r}") from None


def _check(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise RuntimeError(
            f"{rank_name}={rank} and {size_name}={size} do not fit: ranks are counted from 0 to size - 1"
        )
