"""The learner's log: nothing that was answered is lost, whatever the disk, a crash or a second kernel does."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from course.files import ROOT
from grading import files, log
from grading.log import Log, home, record


def numbers(folder: Path) -> list[int]:
    return [entry["number"] for entry in Log(folder).entries()]


def test_entries_come_back_in_order(tmp_path: Path):
    mine = Log(tmp_path)
    assert [mine.append("seen", number=i) for i in range(3)] == ["", "", ""]
    assert numbers(tmp_path) == [0, 1, 2]
    assert all(entry["kind"] == "seen" and entry["at"] > 1e9 for entry in mine.entries())


def test_what_is_there_is_only_added_to(tmp_path: Path):
    mine, path = Log(tmp_path), tmp_path / log.FILE
    mine.append("seen", number=0)
    before = path.read_bytes()
    mine.append("seen", number=1)
    assert path.read_bytes().startswith(before)


@pytest.mark.parametrize("half", [b'{"id": "a", "at": 1.0, "ki', b"\xff\xfe{", b"[1, 2]", b'{"id": "a"}', b"null"])
def test_a_half_written_or_foreign_line_costs_itself_alone(tmp_path: Path, half: bytes):
    Log(tmp_path).append("seen", number=0)
    with open(tmp_path / log.FILE, "ab") as file:
        file.write(half)  # without the end of the line, as a crash leaves it
    assert numbers(tmp_path) == [0]
    Log(tmp_path).append("seen", number=1)
    assert numbers(tmp_path) == [0, 1]
    assert half in (tmp_path / log.FILE).read_bytes()  # nothing is ever deleted


def test_two_kernels_and_many_threads_write_one_file(tmp_path: Path):
    code = "import sys; from pathlib import Path; from grading.log import Log; mine = Log(Path(sys.argv[1]))\n"
    code += "for i in range(60): assert mine.append('seen', number=i, text='x' * 5000) == ''"
    run = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.Popen(run, cwd=ROOT)
    mine = Log(tmp_path)
    threads = [
        threading.Thread(target=lambda: [mine.append("seen", number=i, text="y" * 5000) for i in range(30)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert other.wait(60) == 0
    lines = (tmp_path / log.FILE).read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 60 + 4 * 30


def test_a_disk_that_takes_half_a_line(tmp_path: Path):
    pytest.importorskip("resource")
    code = """
import resource, signal, sys
from pathlib import Path
from grading.log import Log
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
mine, path = Log(Path(sys.argv[1])), Path(sys.argv[1]) / "progress.jsonl"
mine.append("seen", number=0)
size = path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))  # ten bytes are left
assert "is full. Free some space" in mine.append("seen", number=1)
assert path.stat().st_size == size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert mine.append("seen", number=2) == ""
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    assert numbers(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "is full"), (errno.EROFS, "Make it writable"), (errno.EACCES, "Make it writable")],
)
def test_what_cannot_be_written_is_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
):
    mine = Log(tmp_path)
    mine.append("seen", number=0)
    before = (tmp_path / log.FILE).read_bytes()

    def refuse(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        problem = mine.append("seen", number=1)
        assert said in problem
        assert "Nothing is lost" in problem
        assert (tmp_path / log.FILE).read_bytes() == before  # no half of it stays
        assert [entry["number"] for entry in mine.entries()] == [0, 1]
        assert mine.append("seen", number=2)
    assert mine.append("seen", number=3) == ""
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_a_file_system_without_locks_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert Log(tmp_path).append("seen", number=0) == ""
    assert numbers(tmp_path) == [0]
    monkeypatch.setattr(files, "NO_LOCKS_HERE", ())
    assert Log(tmp_path).append("seen", number=1)  # any other trouble is told


def test_without_a_workspace_it_says_so_once_and_keeps_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    log._log_in.cache_clear()
    assert "Run `make course`" in record("seen", number=0)
    record("seen", number=1)
    assert capsys.readouterr().out.count("there is no workspace at or above") == 1
    assert [entry["number"] for entry in log.log().entries()] == [0, 1]
    (tmp_path / ".minidist").mkdir()  # made meanwhile
    assert record("seen", number=2) == ""
    assert numbers(tmp_path / ".minidist") == [0, 1, 2]


def test_the_outermost_folder_keeps_the_progress(tmp_path: Path):
    inner = tmp_path / "assignments" / "ps03"
    (inner / ".minidist").mkdir(parents=True)
    (tmp_path / ".minidist").mkdir()
    assert home(inner) == tmp_path / ".minidist"
    assert log.shelves(inner) == [inner / ".minidist", tmp_path / ".minidist"]
    assert home(tmp_path.parent) != tmp_path / ".minidist"


def test_a_learner_keeps_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = Log(tmp_path).learner()
    assert Log(tmp_path).learner() == name
    assert Log(None).learner() == Log(None).learner() != name  # nothing can be saved: it follows the user
    with monkeypatch.context() as patch:
        patch.setattr(log.secrets, "token_hex", lambda n: "ab" * n)
        Log(tmp_path).append("learner", name="second")  # another kernel drew one at the same time
    assert Log(tmp_path).learner() == name


def test_an_entry_that_cannot_be_written_as_json_is_refused_at_once(tmp_path: Path):
    mine = Log(tmp_path)
    with pytest.raises(TypeError):
        mine.append("seen", number=object())
    assert mine.append("seen", number=1) == ""
    assert numbers(tmp_path) == [1]
