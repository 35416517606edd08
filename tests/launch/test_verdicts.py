"""Every way in which a world can end badly: a verdict comes soon and says which rank and why; the next launch works."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import minidist as md


def fails(fn, ranks: int = 2, within: float = 5.0, **options) -> md.LaunchError:
    """The error of launching fn, which must come within so many seconds; the next launch must work."""
    start = time.monotonic()
    with pytest.raises(md.LaunchError) as caught:
        md.launch(fn, ranks=ranks, **options)
    assert time.monotonic() - start < within
    assert md.launch(lambda world: world.rank, ranks=2) == [0, 1]
    return caught.value


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The first launch of a process takes as long as importing torch."""
    md.launch(lambda world: None, ranks=1)


def raises_before_the_collective(world) -> None:
    if world.rank == 1:
        try:
            {}["key"]
        except KeyError as error:
            boom = ValueError("boom")
            boom.add_note("look into the config")
            raise boom from error
    world.all_reduce(torch.ones(2))


def test_a_rank_that_raises_is_shown_and_its_peers_are_not():
    error = fails(raises_before_the_collective)
    text = str(error)
    assert error.verdict == "error"
    assert text.startswith("rank 1 raised ValueError: boom\nlook into the config")
    assert "KeyError: 'key'" in text
    assert "direct cause" in text
    assert "raise boom from error" in text
    assert f"{os.path.basename(__file__)}" in text
    assert "rank 0" not in text
    assert "Connection" not in text
    assert "launcher" not in text  # no frame of ours


def test_the_same_error_on_all_ranks_is_said_once():
    def wrong(world):
        raise ValueError(f"no file for rank {world.rank}")

    text = str(fails(wrong, ranks=3))
    assert text.startswith("ranks 0-2 raised ValueError: no file for rank")
    assert text.count("Traceback") == 1


def test_a_stalled_rank_is_ended_at_the_deadline():
    def stalls(world):
        if world.rank == 1:
            time.sleep(300)  # forever, for a test
        world.barrier()

    error = fails(stalls, timeout=1, within=5)
    assert error.verdict == "timeout"
    assert "no result after 1 s" in str(error)
    assert "rank 0: waits in barrier" in str(error)
    assert "rank 1: runs its own code" in str(error)
    assert "time.sleep(300)  # forever, for a test" in str(error)


def exits(world) -> None:
    print("the last words", end="")
    if world.rank == 1:
        os._exit(3)
    world.all_reduce(torch.ones(2))


def test_a_rank_that_exits(capsys: pytest.CaptureFixture[str]):
    text = str(fails(exits))
    assert "rank 1 ended itself with exit code 3" in text
    assert "Connection" not in text
    assert "[rank 1] the last words\n" in capsys.readouterr().out


def test_a_rank_that_calls_sys_exit():
    def leaves(world):
        if world.rank == 0:
            sys.exit("enough")
        world.barrier()

    assert "rank 0 raised SystemExit: enough" in str(fails(leaves))


def test_a_rank_that_crashes():
    def crashes(world):
        if world.rank == 1:
            ctypes.string_at(0)  # reads address 0
        world.barrier()

    text = str(fails(crashes))
    assert "rank 1 crashed: segmentation fault" in text
    assert "ctypes.string_at(0)  # reads address 0" in text


def test_a_rank_that_the_system_kills():
    def killed(world):
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    text = str(fails(killed))
    assert "rank 1 was killed from outside (SIGKILL)" in text
    assert "memory" in text


def test_memory_that_there_is_not():
    def greedy(world):
        return torch.empty(10**15)

    assert "torch.empty(10**15)" in str(fails(greedy))


def test_mismatched_shapes_checked_and_raw():
    def mismatch(world):
        world.all_reduce(torch.ones(100 * (world.rank + 2)))

    text = str(fails(mismatch))
    assert "CommMismatch" in text
    assert "[200]" in text
    assert "[300]" in text

    def raw(world):
        dist.all_reduce(torch.ones(100 * (world.rank + 2)))  # gloo ends the process

    text = str(fails(raw))
    assert "crashed: native code gave up (SIGABRT)" in text
    assert "different shapes or dtypes" in text
    assert "# gloo ends the process" in text


def test_a_result_that_cannot_be_sent():
    text = str(fails(lambda world: (i for i in range(3))))
    assert "it returned a generator that cannot be sent back" in text


def test_exceptions_that_are_hard_to_print():
    class Weird(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def weird(world):
        raise Weird

    def deep(world):
        return deep(world)

    assert "Weird: <exception str() failed>" in str(fails(weird, ranks=1))
    assert "repeated" in str(fails(deep, ranks=1))
    text = str(fails(lambda world: exec("raise ValueError('x' * 10**6)"), ranks=1))
    assert len(text) < 20_000


def test_the_watcher_itself_is_killed():
    def kills_the_watcher(world):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    error = fails(kills_the_watcher)
    assert error.verdict == "lost"


def test_a_script_shows_the_message_last(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import minidist as md\ndef f(world):\n    raise ValueError('boom')\nmd.launch(f, ranks=2)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "minidist.LaunchError: ranks 0 and 1 raised ValueError: boom" in done.stderr
    assert done.stderr.rstrip().endswith("raise ValueError('boom')")
