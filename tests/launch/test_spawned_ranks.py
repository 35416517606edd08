"""Ranks without fork, as on Windows and macOS, forced here: the same answers, later."""

import os
import sys
import time

import psutil
import pytest
import torch

import minidist as md
from minidist.launcher.parent import Launcher


@pytest.fixture(autouse=True)
def spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["minidist.launch"], "_launcher", Launcher(forks=False))


def work(world, x):
    print("hello from", world.rank)
    return world.all_reduce(x + world.rank), world.rank, os.getpid()


def test_values_and_output(capsys: pytest.CaptureFixture[str]):
    x = torch.ones(1_000_000)
    results = md.launch(work, ranks=2, args=(x,))
    assert [rank for _, rank, _ in results] == [0, 1]
    assert all(torch.equal(total, x * 2 + 1) for total, _, _ in results)
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert not any(psutil.pid_exists(pid) for _, _, pid in results)


def test_a_deadlock():
    def stuck(world):
        if world.rank == 0:
            world.barrier()  # rank 1 forgot

    with pytest.raises(md.LaunchError) as caught:
        md.launch(stuck, ranks=2)
    assert caught.value.verdict == "deadlock"
    assert "in stuck:  world.barrier()  # rank 1 forgot" in str(caught.value)


@pytest.mark.slow
def test_other_verdicts():
    def boom(world):
        if world.rank == 1:
            raise ValueError("boom")
        world.barrier()

    def gone(world):
        if world.rank == 1:
            os._exit(3)
        world.barrier()

    def endless(world):
        while True:
            time.sleep(0.01)  # round and round

    for fn, timeout, said in (
        (boom, 60, "rank 1 raised ValueError: boom"),
        (gone, 60, "rank 1 ended itself with exit code 3"),
        (endless, 1, "time.sleep(0.01)  # round and round"),
    ):
        with pytest.raises(md.LaunchError) as caught:
            md.launch(fn, ranks=2, timeout=timeout)
        assert said in str(caught.value)
        assert "Connection" not in str(caught.value)
