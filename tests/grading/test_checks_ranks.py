"""Whatever a learner's function does in its ranks: a verdict comes soon, names the place, nothing is left."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import minidist as md
from grading.course import sandbox
from grading.pack import pack
from grading.ranks import relay
from grading.ranks.host import NoRanks, RankHost
from grading.ranks.run import Job, Limits, Run

QUICK = Limits(seconds=1.5, cpu_seconds=1, memory_bytes=1 << 28, file_bytes=1 << 16)


@pytest.fixture(scope="module")
def host():
    with RankHost() as one:
        yield one


def run(
    host: RankHost, function, ranks: int = 2, limits: Limits = QUICK, calls: int = 1, allowed=("isend", "irecv")
) -> Run:
    inputs = [[{"x": torch.arange(3.0) + 10 * rank} for rank in range(ranks)]] * calls
    start = time.monotonic()
    found = host.run(Job(pack(function), inputs, frozenset(allowed), limits=limits))
    assert time.monotonic() - start < 15
    return found


def shift(comm, x):
    received = torch.empty_like(x)
    receiving = comm.irecv(received, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    return receiving.wait()


def test_results_and_the_log(host: RankHost):
    found = run(host, shift, ranks=3, calls=2)
    assert found.verdict == "ok"
    assert [rank.tolist() for rank in found.results[1]] == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]
    assert sorted((m.call, m.src, m.dst, m.elements) for m in found.messages) == [
        (call, rank, (rank + 1) % 3, 3) for call in range(2) for rank in range(3)
    ]


def test_the_package_itself_runs_on_these_ranks(host: RankHost):
    def all_of_them(comm, x):
        whole = md.algorithms.ring_all_reduce(x.clone(), comm)
        assert torch.equal(whole, comm.all_reduce(x.clone()))
        assert torch.equal(comm.reduce_scatter(x), md.algorithms.ring_reduce_scatter(x, comm))
        gathered = comm.all_gather(x[: comm.rank + 1])
        assert gathered.tolist() == [0, 10, 11, 20, 21, 22]
        assert comm.lengths(comm.rank) == [0, 1, 2]
        comm.barrier()
        assert comm.broadcast(x.clone(), src=1).tolist() == [10, 11, 12]
        assert comm.all_to_all(x).tolist() == [comm.rank, 10 + comm.rank, 20 + comm.rank]
        reduced = comm.reduce(x.clone(), dst=2, op="max")
        return reduced, comm.all_reduce(x, op="mean", async_op=True).wait()

    every = ("isend", "irecv", "all_reduce", "reduce_scatter", "all_gather", "lengths", "barrier", "broadcast")
    found = run(host, all_of_them, ranks=3, allowed=(*every, "all_to_all", "reduce"))
    assert found.verdict == "ok", found.why
    assert [reduced.tolist() for reduced, _ in found.results[0]] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert found.results[0][0][1].tolist() == [10, 11, 12]


def test_a_deadlock_names_ranks_calls_and_lines(host: RankHost):
    def waits(comm, x):
        comm.isend(x, (comm.rank + 1) % comm.size).wait()  # the culprit
        return comm.irecv(x, (comm.rank - 1) % comm.size).wait()

    found = run(host, waits, ranks=3)
    assert found.verdict == "deadlock"
    assert found.seconds < 1.5
    assert "rank 2 waits for its isend to rank 0 (line " in found.why
    assert "comm.isend(x, (comm.rank + 1) % comm.size).wait()  # the culprit" in found.why


def test_a_message_under_another_tag_is_named(host: RankHost):
    def waits_for_the_send(comm, x):
        return comm.isend(x, 1, tag=3).wait() if comm.rank == 0 else comm.irecv(x, 0, tag=5).wait()

    def sends_and_returns(comm, x):
        return comm.isend(x, 1, tag=3) and x if comm.rank == 0 else comm.irecv(x, 0, tag=5).wait()

    def sends_first(comm, x):
        received = comm.irecv(torch.empty_like(x), 1 - comm.rank, tag=comm.rank)
        comm.isend(x, 1 - comm.rank, tag=7 + comm.rank).wait()
        return received.wait()

    for function in (waits_for_the_send, sends_and_returns):
        found = run(host, function)
        assert (found.verdict, found.mistake) == ("deadlock", "mismatched-messages")
        assert "a message from rank 0 to rank 1, sent with tag 3, but rank 1 asks for tag 5." in found.why
    assert "from rank 0 to rank 1, sent with tag 7, but rank 1 asks for tag 1." in run(host, sends_first).why


def test_an_exception_shows_the_learners_lines_only(host: RankHost):
    def deep(x):
        return x[9]

    def wrong(comm, x):
        return deep(x) if comm.rank == 1 else shift(comm, x)

    found = run(host, wrong)
    assert found.verdict == "error"
    assert found.rank == 1
    assert "rank 1 raised IndexError" in found.why
    assert "return x[9]" not in found.why or "deep" in found.why
    assert "grading" not in found.why
    assert "rank.py" not in found.why


def test_there_is_no_process_group_and_none_can_be_made(host: RankHost):
    def raw(comm, x):
        dist.all_reduce(x)

    def makes_one(comm, x):
        dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size, init_method="file:///tmp/never")

    for function in (raw, makes_one):
        found = run(host, function)
        assert found.verdict == "error"
        assert "There is no torch.distributed process group in these ranks" in found.why


def test_a_library_collective_is_a_shortcut(host: RankHost):
    def calls(comm, x):
        return comm.all_gather(x)

    found = run(host, calls)
    assert found.verdict == "shortcut"
    assert "called comm.all_gather (line" in found.why


def test_ways_to_end_early(host: RankHost):
    def leaves(comm, x):
        if comm.rank == 1:
            os._exit(3)
        return shift(comm, x)

    def exits(comm, x):
        sys.exit("enough")

    def crashes(comm, x):
        import ctypes

        ctypes.string_at(0)

    def killed(comm, x):
        os.kill(os.getpid(), signal.SIGKILL)

    class Speechless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def speechless(comm, x):
        raise Speechless

    def leaves_a_thread(comm, x):
        threading.Thread(target=time.sleep, args=(9,), name="mine").start()
        return x

    assert "raised Speechless: (its __str__ raises RuntimeError)" in run(host, speechless).why
    assert "mine, a thread that it started, still runs: wait for it with join()" in run(host, leaves_a_thread).why
    assert "rank 1 ended its own process with exit code 3" in run(host, leaves).why
    assert "SystemExit: enough" in run(host, exits).why
    assert "crashed" in run(host, crashes).why
    assert "was killed" in run(host, killed).why


def test_loops_that_do_not_end(host: RankHost, monkeypatch: pytest.MonkeyPatch):
    def spins(comm, x):
        while True:
            pass

    def swallows(comm, x):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue

    def sleeps(comm, x):
        if comm.rank == 1:
            time.sleep(100)
        return shift(comm, x)

    def cannot_be_interrupted(comm, x):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGXCPU])
        time.sleep(100)

    def sends_for_ever(comm, x):
        while True:
            comm.isend(x, 1 - comm.rank)

    monkeypatch.setattr(relay, "MOST_EVENTS", 1000)
    quick, patient = Limits(seconds=1, cpu_seconds=1), Limits(seconds=60, cpu_seconds=1)
    for function, words, limits in (
        (spins, "processor time, which looks like a loop that does not end\n    line ", patient),
        (swallows, "had not ended after 1 s", quick),
        (sleeps, "rank 1: it had not ended after 1 s", quick),
        (cannot_be_interrupted, "does not react", quick),
        (sends_for_ever, "does not end", Limits()),
    ):
        found = run(host, function, limits=limits)
        assert found.verdict == "timeout", (function, found)
        assert words in found.why


def test_who_waits_is_told_what_for(host: RankHost):
    def slow(comm, x):
        time.sleep(2.3 if comm.rank == 1 else 0)
        return x

    words: list[str] = []
    inputs = [[{"x": torch.arange(3.0)} for _ in range(3)]]
    assert host.run(Job(pack(slow), inputs, frozenset()), words.append).ok
    assert words == ["rank 1 has not returned after 2 s; after 12 s the run is ended, and the report says where."]


def test_too_much_of_everything(host: RankHost, tmp_path: Path):
    def prints(comm, x):
        print("y" * 10_000_000)
        return x

    def eats(comm, x):
        return torch.ones(10**9).sum()

    def fills_the_disk(comm, x):
        (tmp_path / f"{comm.rank}").write_bytes(b"0" * 10**7)

    def returns_a_lot(comm, x):
        return torch.zeros((1 << 26) + 1, dtype=torch.int8)

    def returns_no_data(comm, x):
        return lambda: x

    found = run(host, prints)
    assert found.ok
    assert len(found.printed[0]) < 5_000
    assert "bytes more" in found.printed[0]
    assert "alloc" in run(host, eats).why
    assert "File too large" in run(host, fills_the_disk).why
    assert "more than a message may hold" in run(host, returns_a_lot).why
    assert "no plain data" in run(host, returns_no_data).why


def test_bytes_that_are_no_message(host: RankHost):
    def talks_nonsense(comm, x):
        import socket

        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                socket.socket(fileno=fd).sendall(b"\x80\x04cos\nsystem\nnonsense" * 10)
        time.sleep(1)

    def forges_a_result(comm, x):
        sock = comm.group.line
        sock.say({"op": "returned", "value": x, "rank": 1 - comm.rank})
        sock.say({"op": "returned", "value": x})
        time.sleep(1)

    assert "no message" in run(host, talks_nonsense).why
    assert "no message" in run(host, forges_a_result).why


def left_over(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or [])]


def test_nothing_is_left_running(host: RankHost):
    def leaves_children(comm, x):
        subprocess.Popen(["sleep", "31.4159"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.execvp("sleep", ["sleep", "31.4159"])
        time.sleep(0.1)
        return x

    assert run(host, leaves_children).ok
    assert left_over("31.4159") == []


def test_forks_without_end_are_ended_soon_and_nothing_is_left(host: RankHost):
    def forks(comm, x):
        room = mmap.mmap(-1, 8)  # shared, so that a host which lets this pass gets a few hundred processes and no more
        while int.from_bytes(room, "little") < 400:
            room[:8] = (int.from_bytes(room, "little") + 1).to_bytes(8, "little")
            os.fork()
        time.sleep(20)

    found = run(host, forks, limits=Limits(cpu_seconds=1))
    assert found.verdict == "error"
    assert "more than 64 processes were started" in found.why
    assert len(left_over(host._mark)) == 1  # the warm process itself
    assert run(host, shift).ok


def test_a_host_that_cannot_start_says_why():
    with pytest.raises(NoRanks, match="cannot start no-such-command"):
        RankHost(["no-such-command"]).start()
    with pytest.raises(NoRanks, match="no sandbox today"):
        RankHost(["sh", "-c", "echo no sandbox today >&2; exit 1"]).start()


@pytest.mark.skipif(bool(sandbox.problem()), reason=f"no sandbox here: {sandbox.problem()}")
def test_in_a_sandbox():
    def looks(comm, x):
        return os.getpid() < 100, os.path.exists("/proc/1/cmdline"), shift(comm, x)

    with RankHost(sandbox.command()) as host:
        found = run(host, looks)
    assert found.ok, found.why
    assert found.results[0][0][0]


def test_calls_of_different_sizes_share_a_world_and_are_taken_apart(host: RankHost):
    def fails_with_three(comm, x):
        if comm.size == 3:
            raise ValueError("three")
        return shift(comm, x) if comm.size > 1 else x

    inputs = [[{"x": torch.tensor([10.0 * size + rank])} for rank in range(size)] for size in (2, 1, 4, 3, 2)]
    found = host.run(Job(pack(fails_with_three), inputs, frozenset({"isend", "irecv"}), limits=QUICK))
    assert [[x.item() for x in call] for call in found.results] == [[21, 20], [10], [43, 40, 41, 42]]
    assert (found.verdict, found.call) == ("error", 3)
    fine, wrong = found.part(2, 3), found.part(3, 4)
    assert fine.ok
    assert sorted((m.call, m.src, m.dst) for m in fine.messages) == [(0, rank, (rank + 1) % 4) for rank in range(4)]
    assert not wrong.ok
    assert wrong.call == 0
    assert "ValueError: three" in wrong.why


def test_a_rank_that_a_call_leaves_out_is_nobody_to_wait_for(host: RankHost):
    def sends_to_the_third(comm, x):
        return comm.irecv(x, 2 if comm.size == 3 else 1 - comm.rank).wait() if comm.rank == 0 else shift(comm, x)

    inputs = [[{"x": torch.ones(1)}] * 2, [{"x": torch.ones(1)}] * 3]
    found = host.run(Job(pack(sends_to_the_third), inputs, frozenset({"isend", "irecv"}), limits=QUICK))
    assert found.verdict == "deadlock"
    assert "rank 2" not in found.why


def test_an_interrupt_ends_the_ranks(host: RankHost):
    def sleeps(comm, x):
        subprocess.Popen(["sleep", "14.1421"], start_new_session=True)
        time.sleep(100)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        run(host, sleeps, limits=Limits())
    signal.signal(signal.SIGALRM, before)
    assert left_over("14.1421") == []
    assert run(host, shift).ok


def test_seeds_and_inputs_are_each_ranks_own(host: RankHost):
    def draws(comm, x):
        return torch.rand(1, generator=comm.generator), torch.rand(1), x

    ranks = run(host, draws).results[0]
    assert ranks[0][0] != ranks[1][0]
    assert ranks[0][1] == ranks[1][1]
    assert not torch.equal(ranks[0][2], ranks[1][2])


def test_the_warm_process_is_killed_and_the_next_run_works(host: RankHost):
    def kills_its_parent(comm, x):
        subprocess.Popen(["sleep", "27.1828"], start_new_session=True)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(3)

    found = run(host, kills_its_parent)
    assert found.verdict == "lost"
    assert left_over("27.1828") == []
    assert run(host, shift).ok
    assert left_over(host._mark)
    host.close()
    assert left_over(host._mark) == []
