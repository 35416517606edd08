"""What a result was measured on: without it a time means nothing."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy
import torch

from benchmarks.data_parallel import cores


def context(arguments: list[str]) -> dict[str, object]:
    """Machine, versions and command, as plain data; the load is that of the last minute, when the run starts."""
    return {
        "machine": {
            "processor": processor(),
            "cores": cores(),
            "memory_gib": memory_gib(),
            "system": f"{platform.system()} {platform.release()}",
            "load_1min": load_1min(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "minidist": version("minidist"),
        },
        "command": shlex.join([Path(sys.executable).name, "-m", "benchmarks", *arguments]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float | None:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    return round(int(meminfo.read_text().split()[1]) / 2**20, 1)


def load_1min() -> float | None:
    loadavg = Path("/proc/loadavg")
    return float(loadavg.read_text().split()[0]) if loadavg.exists() else None
