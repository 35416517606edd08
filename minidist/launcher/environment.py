"""What the environment says about the world: torchrun's variables, else Slurm's, else a world of one."""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Environment:
    """A process's place in a world that something else started. ``source`` is torchrun, slurm, launch or alone."""

    rank: int
    size: int
    local_rank: int
    source: str
    local_size: int = 1  # ranks on this machine
    master: str = ""  # host:port where the ranks meet
    own_gpu: bool = False  # whether each rank sees only the GPU that is its own
    notes: tuple[str, ...] = ()  # what the user should know about how this was found

    @property
    def alone(self) -> bool:
        """Whether nothing started several ranks."""
        return self.source == "alone"

    def table(self) -> str:
        """The resolved values, a line each."""
        rows = [("rank", f"{self.rank} of {self.size}"), ("on this host", f"{self.local_rank} of {self.local_size}")]
        rows += [("found by", self.source)]
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
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else 29500
    if lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]:
        notes += (f"without {' and '.join(lacking)}: taken as for ranks on one machine. torchrun sets all of them",)
    master = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{port}"
    local_size = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else size
    return Environment(rank, size, local, "torchrun", local_size, master, notes=notes)


def _slurm(env: Mapping[str, str]) -> Environment:
    if "SLURM_PROCID" not in env:
        hint = "no torchrun or srun started this process: a world of one. md.launch(fn, ranks=4) starts ranks itself."
        return Environment(0, 1, 0, "alone", notes=(hint,))
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
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    local_size = tasks_on_node(per_node, int(env.get("SLURM_NODEID", "0") or 0))
    own_gpu = "SLURM_GPUS_PER_TASK" in env
    return Environment(rank, size, _number(env, "SLURM_LOCALID"), "slurm", local_size, f"{host}:{port}", own_gpu)


def place(here: Environment, backend: str | None, gpus: int) -> tuple[str, str]:
    """The backend and the device of this rank, where ``gpus`` are visible. backend: None chooses.

    >>> place(Environment(5, 8, 1, "torchrun", local_size=4), None, gpus=4)
    ('nccl', 'cuda:1')
    >>> place(Environment(5, 8, 1, "torchrun", local_size=4), None, gpus=1)
    ('gloo', 'cpu')
    """
    needed = 1 if here.own_gpu else here.local_size
    if backend is None:
        backend = "nccl" if not here.alone and 0 < needed <= gpus else "gloo"
    if backend == "nccl":
        check_devices(needed, backend, gpus)
        return backend, "cuda:0" if here.own_gpu else f"cuda:{here.local_rank}"
    return backend, "cpu"


def check_devices(ranks: int, backend: str, gpus: int) -> None:
    """Raise ValueError if ``ranks`` ranks of this machine want NCCL and there are fewer GPUs."""
    if backend == "nccl" and ranks > gpus:
        have = "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise ValueError(
            f"backend='nccl' needs a GPU for each of the {ranks} ranks, and this machine has {have}: "
            f"use {f'ranks={gpus}, or ' if gpus else ''}backend='gloo', which runs any number of ranks on the CPU"
        )


def threads(env: Mapping[str, str], cores: int, ranks: int) -> int:
    """Threads for each rank: what OMP_NUM_THREADS says, else an equal share of the cores, at least 1.

    >>> threads({}, cores=8, ranks=4), threads({}, cores=2, ranks=4), threads({"OMP_NUM_THREADS": "3"}, 8, 4)
    (2, 1, 3)
    """
    wanted = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else max(1, cores // ranks)


def loopback() -> str:
    """The name of the interface on which a machine talks to itself."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def tasks_on_node(per_node: str, node: int) -> int:
    """How many tasks Slurm put on a node, from its list such as 4(x2),1.

    >>> [tasks_on_node("4(x2),1", node) for node in range(3)]
    [4, 4, 1]
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(count)] * int(times or 1)
    return counts[min(node, len(counts) - 1)]


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
