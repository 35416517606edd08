"""Processes: none is left, none is in the way of another, and starting them touches nothing else."""

import itertools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import minidist as md

MARK = "minidist.launcher.zygote"


def relatives(of: int) -> list[psutil.Process]:
    """The zygote that serves process ``of``, its supervisors and ranks: all have its command line."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if MARK in command and command[-1] == str(of) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def eventually(condition, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def leaves_children(world) -> list[int]:
    """Children, detached children and orphans of a rank."""
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    plain, detached = (subprocess.Popen(sleep, start_new_session=new) for new in (False, True))
    orphan = subprocess.run(
        ["sh", "-c", "setsid sleep 300 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    return [os.getpid(), os.getppid(), plain.pid, detached.pid, int(orphan.stdout)]


def test_nothing_is_left():
    pids = list(itertools.chain(*md.launch(leaves_children, ranks=2)))
    assert len(set(pids)) == 9  # both ranks have the same supervisor
    assert eventually(lambda: not any(map(alive, pids)))
    assert psutil.Process().children(recursive=True) == []
    assert len(relatives(os.getpid())) == 1  # the zygote waits for the next launch


def test_nested_launches_are_refused():
    def nested(world):
        md.launch(lambda world: 1, ranks=1)

    with pytest.raises(md.LaunchError, match="launch was called on rank 0 of a launch; a rank cannot start ranks"):
        md.launch(nested, ranks=1)


def test_worlds_at_the_same_time():
    def work(world, number):
        return world.all_reduce(torch.tensor(number)).item()

    def one(number):
        results[number] = md.launch(work, ranks=2, args=(number,), concurrent=True)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 29500))  # torch's usual port
        for _ in range(5):
            results: dict[int, list[int]] = {}
            threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == {number: [2 * number] * 2 for number in range(3)}


def test_without_concurrent_threads_take_turns():
    def span(world):
        start = time.monotonic()
        time.sleep(0.2)
        return start, time.monotonic()

    spans = []
    threads = [threading.Thread(target=lambda: spans.extend(md.launch(span, ranks=1))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def launch_in_a_child(queue) -> None:
    queue.put(md.launch(lambda world: world.rank, ranks=2))


def test_a_forked_child_has_its_own_zygote():
    md.launch(lambda world: None, ranks=1)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=launch_in_a_child, args=(queue,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == [0, 1]
    assert md.launch(lambda world: world.rank, ranks=2) == [0, 1]
    assert eventually(lambda: not relatives(child.pid))


def test_after_the_zygote_was_killed_the_next_launch_works():
    md.launch(lambda world: None, ranks=1)
    for process in relatives(os.getpid()):
        process.kill()
    assert md.launch(lambda world: world.rank, ranks=2) == [0, 1]


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch):
    def threads(world):
        return torch.get_num_threads()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert md.launch(threads, ranks=4) == [max(1, cores // 4)] * 4
    assert md.launch(threads, ranks=1) == [cores]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert md.launch(threads, ranks=1) == [3]


def run_script(text: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(text)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_importing_touches_no_gpu_and_starts_nothing():
    script = """
        import os, threading, torch
        before = threading.active_count()
        import minidist as md
        assert not torch.cuda.is_initialized()
        assert threading.active_count() == before
        assert not os.path.exists(f"/proc/self/task/{os.getpid()}/children") or not open(
            f"/proc/self/task/{os.getpid()}/children").read()
        assert not torch.distributed.is_initialized()
    """
    process = run_script(script)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not relatives(process.pid)


def test_a_host_name_that_nobody_knows():
    script = """
        import ctypes, os, socket, sys
        libc = ctypes.CDLL(None, use_errno=True)
        name = b"nobody-knows-this-host"
        if libc.unshare(0x04000000) or libc.sethostname(name, len(name)):  # CLONE_NEWUTS
            sys.exit(77)
        import torch, minidist as md
        work = lambda world: (world.all_reduce(torch.ones(1)).item(), os.environ["GLOO_SOCKET_IFNAME"])
        print(md.launch(work, ranks=2))
        os.environ["GLOO_SOCKET_IFNAME"] = "mine"
        try:
            md.launch(work, ranks=2)
        except md.LaunchError as error:
            print("mine" in str(error))
    """
    environment = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}
    process = run_script(script, env=environment)
    out, err = process.communicate(timeout=120)
    if process.returncode == 77:
        pytest.skip("only root may give itself a host name")
    assert out.splitlines() == ["[(2.0, 'lo'), (2.0, 'lo')]", "True"], err


SLEEPER = """
    import os, time, minidist as md
    def sleeper(world):
        if os.fork() == 0:
            os.setsid()
            time.sleep(300)
        print("ready", os.getpid(), flush=True)
        time.sleep(300)  # until someone stops us
    try:
        md.launch(sleeper, ranks=2, timeout=300)
    except KeyboardInterrupt as stop:
        print(stop, flush=True)
    print(md.launch(lambda world: world.rank, ranks=2), flush=True)
    import psutil
    print(psutil.Process().children(recursive=True), flush=True)
    md.launch(sleeper, ranks=2, timeout=300)
"""


def test_an_interrupt_ends_the_ranks_and_a_kill_all(tmp_path: Path):
    process = run_script(SLEEPER, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert process.stdout
    read = process.stdout.readline
    try:
        assert all("ready" in read() for _ in range(2))
        assert len(relatives(process.pid)) == 1 + 1 + 2 + 2  # zygote, supervisor, ranks, their children
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        lines = [read() for _ in range(5)]
        assert time.monotonic() - start < 5
        assert lines[:2] == ["the launch was stopped, and so were its ranks.\n", "  rank 0: runs its own code\n"]
        assert "in sleeper" in lines[2]
        assert (read(), read()) == ("[0, 1]\n", "[]\n")
        assert all("ready" in read() for _ in range(2))
        assert len(relatives(process.pid)) == 6
        process.kill()
        assert eventually(lambda: not relatives(process.pid), seconds=3)
        assert list(tmp_path.iterdir()) == []  # no file is left either
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_warm_launch_is_quick():
    def work(world):
        return world.all_reduce(torch.ones(1)).item()

    def seconds() -> float:
        start = time.monotonic()
        assert md.launch(work) == [4.0] * 4
        return time.monotonic() - start

    assert min(seconds() for _ in range(20)) < 0.3  # 0.1 on a quiet machine
