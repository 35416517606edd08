"""One process per submission: each ends by its deadline, and nothing it started is left; others' processes are."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grading import __main__ as command
from grading.course.pool import descendants, run_each, uninterrupted
from grading.course.scratch import scratch, short_scratch

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


LONG_RUN = """
import sys, time
from pathlib import Path
from grading.course.pool import run_each
from grading.course.scratch import scratch, short_scratch

def main(argv):
    def task():
        print("started", flush=True)
        time.sleep(62.5)

    with scratch(Path.cwd(), "ps02") as folder, short_scratch(folder) as short:
        (folder / "work").write_text("half of it")
        print(short, flush=True)
        for _ in run_each({"quick": lambda: None, "one": task, "two": task}, 3, 100, Path.cwd()):
            print("kept", flush=True)
    return 0

if __name__ == "__main__":
    from grading import __main__ as command
    sys.modules["long_run"] = sys.modules["__main__"]
    command.COMMANDS = {"grade": ("long_run", "")}
    sys.exit(command.main(["grade"]))
"""


def long_run(folder: Path) -> tuple["subprocess.Popen[str]", Path, list[int]]:
    """A run that has started its tasks: the process, its folder for sockets, and what is below it."""
    (folder / "long_run.py").write_text(LONG_RUN)
    process = subprocess.Popen(
        [sys.executable, "long_run.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    short = Path(process.stdout.readline().strip())
    assert process.stdout.readline() == "kept\n"
    until = time.monotonic() + 30
    while any("started" not in read(folder / f"{name}.log") for name in ("one", "two")):
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, short, descendants(process.pid)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def are_gone(pids: list[int]) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and ") Z " not in read(Path(f"/proc/{pid}/stat"))]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path):
    process, short, below = long_run(tmp_path)
    assert len(below) == 2
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "grading grade: stopped. What was done before is kept, and nothing is left running\n"
    assert are_gone(below)
    assert not short.exists()
    assert sorted(path.name for path in (tmp_path / ".grading").iterdir()) == [".lock"]


def test_what_a_killed_run_left_goes_with_the_next_and_what_runs_stays(tmp_path: Path):
    process, short, below = long_run(tmp_path)
    (mine,) = (tmp_path / ".grading").glob("ps02-*")
    (tmp_path / ".grading" / "logs").mkdir()
    with scratch(tmp_path, "ps02") as other:
        assert mine.exists()  # its process runs
        assert other.exists()
    assert not other.exists()
    process.kill()
    process.communicate(timeout=30)
    assert are_gone(below)
    assert short.exists()
    assert (mine / "work").exists()
    with scratch(tmp_path, "ps03") as other, short_scratch(other):
        assert not mine.exists()
        assert not short.exists()
        assert other.exists()
    assert sorted(path.name for path in (tmp_path / ".grading").iterdir()) == [".lock", "logs"]


def test_a_folder_that_is_named_and_is_not_ours_stays(tmp_path: Path):
    (tmp_path / "precious").mkdir()
    (tmp_path / ".grading" / "ps02-x").mkdir(parents=True)
    (tmp_path / ".grading" / "ps02-x" / ".elsewhere").write_text(str(tmp_path / "precious"))
    with scratch(tmp_path, "ps02"):
        assert not (tmp_path / ".grading" / "ps02-x").exists()
    assert (tmp_path / "precious").exists()


def test_ctrl_c_waits_for_what_is_done_as_a_whole():
    done: list[str] = []

    def whole() -> None:
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            done.append("all of it")
        done.append("more")

    with pytest.raises(KeyboardInterrupt):
        whole()
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_command_that_is_stopped_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("grading.course.doctor.main", stopped)
    assert command.main(["doctor"]) == 130
    assert "grading doctor: stopped" in capsys.readouterr().err
