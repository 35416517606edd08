"""make course: a real server on a free port, the lesson over HTTP, this environment's kernel, nothing left running."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from course import serve
from course.build import notebook_bytes

REPOSITORY = Path(serve.__file__).parents[1]
CODE = """
import os, sys
from pathlib import Path
from course.serve import open_course
open_course(os.environ, Path(sys.argv[1]))
"""


@dataclass
class Server:
    """A running `python -m course open`, the port it was asked for, what it printed, and its address."""

    process: subprocess.Popen[str]
    port: int
    printed: list[str]
    url: str

    def fetch(self, path: str, **options: object) -> bytes:
        request = urllib.request.Request(f"{self.base}{path}", **options)  # type: ignore[arg-type]
        request.add_header("Authorization", f"token {self.url.partition('token=')[2]}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    @property
    def base(self) -> str:
        return self.url.partition("/lab/")[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start the server with its first port taken, and a home whose own kernel named python3 must not be used."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "workspace").mkdir()
    (folder / "workspace" / "00_start.ipynb").write_bytes(notebook_bytes("# %%\n1 + 1\n"))
    foreign = folder / "data" / "kernels" / "python3"
    foreign.mkdir(parents=True)
    (foreign / "kernel.json").write_text(
        json.dumps({"argv": ["/bin/false"], "display_name": "Foreign", "language": "python"}), encoding="utf-8"
    )
    homes = {f"JUPYTER_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "data", "runtime")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(folder)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                **homes,
                "PORT": str(port),
                "SSH_CONNECTION": "10.0.0.9 5000 10.0.0.7 22",
                "USER": "ada",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed: list[str] = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout or ()), daemon=True)
        reader.start()
        try:
            yield Server(process, port, printed, wait_for_url(printed, process))
        finally:
            process.kill()
            process.wait()
            reader.join(timeout=5)


def wait_for_url(printed: list[str], process: subprocess.Popen[str], seconds: float = 120) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = re.search(r"http://127\.0\.0\.1:\d+/lab/tree/\S+token=\w+", "".join(list(printed)))
        if found:
            return found.group()
        assert process.poll() is None, "the server ended:\n" + "".join(printed)
        time.sleep(0.1)
    raise AssertionError("no URL within the deadline:\n" + "".join(printed))


def test_the_printed_url_serves_the_lesson(server: Server):
    with urllib.request.urlopen(server.url, timeout=20) as page:
        assert page.status == 200
        assert b"jupyter-config-data" in page.read()
    content = json.loads(server.fetch("/api/contents/workspace/00_start.ipynb"))
    assert content["content"]["cells"][0]["source"] == "1 + 1"


def test_nobody_enters_without_the_token(server: Server):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{server.base}/api/contents/", timeout=20)
    assert refused.value.code == 403
    token = server.url.partition("token=")[2]
    assert token not in " ".join(psutil.Process(server.process.pid).cmdline())  # which other users can read


def test_the_ssh_line_and_a_changed_port_are_printed(server: Server):
    port = server.base.rpartition(":")[2]
    assert f"Port {server.port} is taken; using {port}." in "".join(server.printed)
    assert f"ssh -N -L {port}:localhost:{port} ada@10.0.0.7" in "".join(server.printed)


def test_comms_wait_their_turn_and_no_news_is_fetched(server: Server):
    settings = {entry["id"]: entry for entry in json.loads(server.fetch("/lab/api/settings"))["settings"]}

    def default(plugin: str, key: str) -> object:
        return settings[f"@jupyterlab/apputils-extension:{plugin}"]["schema"]["properties"][key]["default"]

    assert default("kernels-settings", "commsOverSubshells") == "disabled"
    assert default("notification", "fetchNews") == "false"
    assert default("notification", "checkForUpdates") is False
    assert json.loads(server.fetch("/lab/api/update"))["notification"] is None
    page = server.fetch("/lab").decode()
    found = re.search(r'<script id="jupyter-config-data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    config = json.loads(found[1])
    assert config["news"] == {"disabled": True}
    assert "@jupyter/nbgrader" in config["disabledExtensions"]
    with pytest.raises(urllib.error.HTTPError) as missing:
        server.fetch("/formgrader")
    assert missing.value.code == 404


def test_kernels_are_this_python_and_end_with_the_server(server: Server):
    """Last in this file: it stops the server."""
    body = json.dumps({"name": "python3"}).encode()
    server.fetch("/api/kernels", data=body, method="POST", headers={"Content-Type": "application/json"})
    (kernel,) = psutil.Process(server.process.pid).children()
    assert kernel.cmdline()[0] == sys.executable
    until = time.monotonic() + 60
    while not kernel.net_connections("tcp"):
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(0.5)
    assert "IPKernelApp" not in "".join(server.printed)  # such as that its messages are not encrypted
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(timeout=30)
    kernel.wait(timeout=30)


def test_ports():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.free_port(port) > port
        with pytest.raises(OSError, match="all taken: name another with PORT="):
            serve.free_port(port, tries=1)
    assert serve.free_port(0) > 0
    for text in ("", "web", "-1", "65536", "88.8", "²"):
        with pytest.raises(ValueError, match="PORT="):
            serve.parse_port(text)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (serve.Place(ssh=False, container=False, root=False, browser=True), {"ip": "127.0.0.1", "browser": True}),
        (serve.Place(ssh=False, container=True, root=True, browser=False), {"ip": "0.0.0.0", "browser": False}),
    ],
)
def test_root_and_containers_get_what_jupyterlab_wants_there_only(place: serve.Place, expected: dict[str, object]):
    page = "/lab/tree/workspace/00_start.ipynb"
    line = serve.arguments(place, 8888, "secret", page, Path("/course"))
    assert ("--allow-root" in line) == place.root
    assert f"--ServerApp.ip={expected['ip']}" in line
    assert f"--ServerApp.open_browser={expected['browser']}" in line
    text = serve.message(place, 8888, "secret", page, "ada@host")
    assert "http://127.0.0.1:8888/lab/tree/workspace/00_start.ipynb?token=secret" in text
    assert ("docker run -p 8888:8888" in text) == place.container


def test_no_browser_over_ssh_or_without_a_display(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "has_browser", lambda: True)
    monkeypatch.setattr(serve.Path, "exists", lambda _: False)  # not in a container
    assert serve.find_place({"DISPLAY": ":0"}, platform="linux").browser
    assert not serve.find_place({}, platform="linux").browser
    assert not serve.find_place({"DISPLAY": ":0", "SSH_CONNECTION": "a 1 b 2"}, platform="linux").browser
    assert serve.find_place({}, platform="darwin").browser
    assert not serve.find_place({"container": "podman", "DISPLAY": ":0"}, platform="linux").browser


def test_an_empty_workspace_says_what_to_run(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="python -m course workspace"):
        serve.first_lesson(tmp_path)


def test_an_instructors_folder_is_opened_only_if_it_is_one(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="grading new-course"):
        serve.course_folder(tmp_path)
    (tmp_path / "nbgrader_config.py").touch()
    assert serve.course_folder(tmp_path) == tmp_path
