"""One process per submission: each ends by its deadline, and nothing it started is left; others' processes are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grading.course.pool import descendants, run_each

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc"), reason="processes are looked up in /proc")


def sleeper() -> None:
    time.sleep(60)


def leaver() -> None:
    """Leaves a process behind in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "61.25"])
        os._exit(0)
    time.sleep(0.1)


def failer() -> None:
    raise ValueError("no")


def sleeping() -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            count += Path(f"/proc/{name}/cmdline").read_bytes() == b"sleep\x0061.25\x00"
        except OSError:
            continue
    return count


def test_each_ends_with_its_verdict_and_nothing_is_left(tmp_path: Path):
    before = set(descendants(os.getpid()))
    tasks = {"quick": lambda: print("done"), "stuck": sleeper, "fails": failer, "leaves": leaver}
    started = time.monotonic()
    ended = {each.name: each.code for each in run_each(tasks, 2, 1.0, tmp_path)}
    assert ended == {"quick": 0, "stuck": None, "fails": 1, "leaves": 0}
    assert time.monotonic() - started < 10
    assert set(descendants(os.getpid())) <= before
    assert sleeping() == 0
    assert (tmp_path / "quick.log").read_text() == "done\n"
    assert "ValueError: no" in (tmp_path / "fails.log").read_text()


def test_no_more_than_asked_run_at_a_time(tmp_path: Path):
    def task() -> None:
        print(time.monotonic())
        time.sleep(0.2)
        print(time.monotonic())

    list(run_each({str(n): task for n in range(4)}, 2, 10, tmp_path))
    spans = [tuple(map(float, (tmp_path / f"{n}.log").read_text().split())) for n in range(4)]
    assert max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans) == 2


def test_leaving_early_ends_what_runs(tmp_path: Path):
    before = set(descendants(os.getpid()))
    for _ in run_each({"quick": lambda: None, "stuck": sleeper}, 2, 60, tmp_path):
        break
    assert set(descendants(os.getpid())) <= before


def test_processes_of_others_are_left_alone(tmp_path: Path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        list(run_each({"leaves": leaver}, 1, 10, tmp_path))
        assert other.poll() is None
        assert sleeping() == 0
    finally:
        other.kill()
        other.wait()
