"""The sandbox: what a learner's process sees and can do; and the one fix that doctor names where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grading.course import doctor, sandbox
from grading.course.kernel import Place, copy_files
from grading.course.settings import Limits

LOOK = """
import json, os, socket, sys
def writable(path):
    try:
        open(os.path.join(path, "x"), "w").close()
        return True
    except OSError:
        return False
def connects():
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=2).close()
        return True
    except OSError:
        return False
import importlib.util
root = os.path.dirname(os.path.dirname(importlib.util.find_spec("grading").origin))
assert importlib.util.find_spec("minidist").origin.startswith(root)
print(json.dumps({
    "here": os.getcwd(), "home": os.environ["HOME"],
    "root": sorted(os.listdir(root)), "secret": os.environ.get("SECRET"),
    "checks": [name for folder in ("checks", "src", "mutants", "course", "questions")
               for name in os.listdir(os.path.join(root, "grading", folder))],
    "writable": [path for path in ("/", "/usr", root, os.path.join(root, "minidist"), "/tmp", "/box")
                 if writable(path)],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")), "connects": connects(), "user": os.getuid(),
}))
"""


@pytest.fixture(scope="module")
def inside() -> dict[str, object]:
    if sandbox.problem():
        pytest.skip(f"no sandbox can be had here: {sandbox.problem()}")
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        run = subprocess.run(
            [*sandbox.command(), sys.executable, "-c", LOOK, port],
            env={**os.environ, "SECRET": "token"}, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_it_holds_the_package_and_nothing_that_only_graders_have(inside):
    assert {"minidist", "grading"} <= set(inside["root"]) <= {"minidist", "grading", ".venv"}
    assert inside["checks"] == []


def test_it_has_no_network_no_environment_no_other_processes_and_writes_in_memory_only(inside):
    assert inside["connects"] is False
    assert inside["secret"] is None
    assert inside["processes"] <= 3
    # A repository that lies below /tmp is there as an empty folder in memory.
    assert [path for path in inside["writable"] if path == "/tmp" or not path.startswith("/tmp/")] == ["/tmp", "/box"]
    assert (inside["here"], inside["home"], inside["user"]) == ("/box", "/box", 1000)


def test_links_and_what_only_the_grader_needs_are_not_copied(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    source = tmp_path / "in"
    (source / "data").mkdir(parents=True)
    (source / "data" / "table.csv").write_text("1")
    (source / "hw.ipynb").write_text("{}")
    (source / "timestamp.txt").write_text("now")
    os.symlink(tmp_path / "secret", source / "data" / "link")
    os.symlink(tmp_path, source / "folder")
    os.mkfifo(source / "pipe")
    copy_files(source, tmp_path / "out")
    copied = [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")]
    assert sorted(copied) == ["data", "data/table.csv"]


def test_a_place_for_a_kernel_is_gone_when_closed():
    place = Place(None, sandboxed=False)
    assert len(str(place.folder / "s1" / "k-12345")) < 100  # a socket's path
    place.close()
    assert not place.folder.exists()


@pytest.mark.parametrize(
    ("platform", "bwrap", "settings", "fix"),
    [
        ("darwin", None, {}, "docs/instructor.md, section Containers"),
        ("linux", None, {}, "bubblewrap"),
        ("linux", "bwrap", {"kernel.apparmor_restrict_unprivileged_userns": "1"}, "sysctl -w kernel.apparmor_restrict"),
        ("linux", "bwrap", {"kernel.unprivileged_userns_clone": "0"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("linux", "bwrap", {"user.max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=15000"),
    ],
)
def test_doctor_names_one_fix(
    platform: str, bwrap: str | None, settings: dict[str, str], fix: str, tmp_path: Path, monkeypatch
):
    real = Path

    def elsewhere(*parts: object) -> Path:
        path = real(*parts)  # type: ignore[arg-type]
        return tmp_path / path.relative_to("/") if str(path).startswith("/") else path

    for name, value in settings.items():
        file = tmp_path / "proc" / "sys" / name.replace(".", "/")
        file.parent.mkdir(parents=True)
        file.write_text(value + "\n")
    monkeypatch.setattr(doctor, "Path", elsewhere)
    monkeypatch.setattr(doctor.sys, "platform", platform)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: bwrap if name == "bwrap" else None)
    assert fix in doctor.sandbox_fix("some reason")


def test_doctor_fails_with_the_fix_in_sight(monkeypatch, capsys):
    bad = doctor.Finding("sandbox", "bwrap is not installed", "sudo apt-get install bubblewrap")
    note = doctor.Finding("course", "no course here", "cd into it", optional=True)
    monkeypatch.setattr(doctor, "examine", lambda folder: [bad, note])
    assert doctor.main([]) == 1
    assert "do this: sudo apt-get install bubblewrap" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "examine", lambda folder: [note])
    assert doctor.main([]) == 0


def test_a_busy_machine_gives_everyone_more_time(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    assert Limits().on_a_busy_machine() == Limits()
    monkeypatch.setattr(os, "getloadavg", lambda: (8.0, 0.0, 0.0))
    assert Limits().on_a_busy_machine() == Limits(80, 480, 960)
