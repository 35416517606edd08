"""What ranks print: whole lines with their rank, in time, and not without end."""

import io
import os
import sys
import threading
import time

import pytest

import minidist as md
from minidist.launcher.output import Output


def test_lines_are_labelled_and_whole(capsys: pytest.CaptureFixture[str]):
    def talks(world):
        for number in range(50):
            print("line", number, "of", world.rank)
        print("half a line", end="")
        print("to stderr", world.rank, file=sys.stderr)
        os.write(1, b" and bytes \xff\n")
        print("unfinished ü", end="")

    md.launch(talks, ranks=3)
    out, err = capsys.readouterr()
    for rank in range(3):
        mine = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine[:50] == [f"[rank {rank}] line {number} of {rank}" for number in range(50)]
        assert mine[50:] == [f"[rank {rank}] half a line and bytes \ufffd", f"[rank {rank}] unfinished ü"]
        assert f"[rank {rank}] to stderr {rank}\n" in err
    assert len(out.splitlines()) == 3 * 52


def test_it_comes_while_the_ranks_run(monkeypatch: pytest.MonkeyPatch):
    seen = io.StringIO()

    def watch():
        while "now" not in seen.getvalue():
            time.sleep(0.01)
        times.append(time.monotonic())

    def speaks(world):
        print("now")
        time.sleep(1)

    times: list[float] = []
    watcher = threading.Thread(target=watch)
    watcher.start()
    monkeypatch.setattr(sys, "stdout", seen)
    md.launch(speaks, ranks=1)
    watcher.join(5)
    assert time.monotonic() - times[0] > 0.5


def test_ten_megabytes(capsys: pytest.CaptureFixture[str]):
    def floods(world):
        if world.rank == 0:
            for _ in range(100_000):
                print("x" * 99)
            print("the end")
        else:
            print("one line")
        return world.rank

    start = time.monotonic()
    assert md.launch(floods, ranks=2) == [0, 1]
    assert time.monotonic() - start < 10
    out = capsys.readouterr().out
    assert 100_000 < len(out) < 150_000
    assert "[rank 1] one line\n" in out
    assert "bytes of output not shown ...\n" in out
    assert out.splitlines()[-1] in ("[rank 0] the end", "[rank 1] one line")
    assert "[rank 0] the end" in out


def test_the_cut_in_small():
    output = Output(limit=10)
    assert output.add("out", b"12345\n") == b"12345\n"
    assert output.add("out", b"678\n12345\n") == b"678\n"
    assert output.add("out", b"more\n" * 1000) == b""
    assert output.add("err", b"still\n") == b""
    rest = output.rest("out")
    assert rest.startswith(b"... 3")
    assert rest.endswith(b"more\nmore\n")
    assert output.last_errors == "still\n"


def test_progress_bars_do_not_flood():
    output = Output(limit=1000)
    assert output.add("err", b"1%\r2%\r") == b""
    assert output.add("err", b"3%\n") == b"3%\n"
