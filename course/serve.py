"""Open the course in JupyterLab: on this machine, over ssh, in a container, with or without a browser.

The server's root is the repository, so that lessons can link to the package's files; it opens on the learner's copy of
the first lesson. Kernels are the Python that runs this, whatever other kernels the learner has.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from course.files import ROOT
from grading.course.scratch import exchange

SETTINGS = Path(__file__).parent / "jupyterlab"  # see there for what is switched off: in lessons, all of nbgrader
FORMGRADER = SETTINGS / "formgrader"  # what an instructor has beyond that
NBGRADER = ("formgrader", "validate_assignment", "assignment_list", "course_list")  # its extensions of the server
WARM = Path(sys.prefix) / "minidist-warm"  # left by the first start, whose imports take long


@dataclass(frozen=True)
class Place:
    """Where the server runs, as far as it decides how it is reached."""

    ssh: bool
    container: bool
    root: bool
    browser: bool

    @property
    def ip(self) -> str:
        """Only this machine may connect; a container's port is reached from outside it, so there any may."""
        return "0.0.0.0" if self.container else "127.0.0.1"


def find_place(environment: Mapping[str, str], *, platform: str = sys.platform) -> Place:
    """Look around. Over ssh, in a container, and on a Linux without a display, no browser is started."""
    ssh = bool(environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"))
    container = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")) or bool(
        environment.get("container") or environment.get("KUBERNETES_SERVICE_HOST")
    )
    display = platform in ("darwin", "win32") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    return Place(ssh=ssh, container=container, root=root, browser=display and not (ssh or container) and has_browser())


def has_browser() -> bool:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def free_port(wanted: int, ip: str = "127.0.0.1", tries: int = 50) -> int:
    """The first port from wanted upwards that nothing listens on; wanted = 0 takes any.

    Raises OSError if all of them are taken.
    """
    for port in range(wanted, min(wanted + tries, 65536)):
        with socket.socket() as probe:
            if port and probe.connect_ex(("127.0.0.1", port)) == 0:
                continue
        with socket.socket() as probe:
            if os.name != "nt":  # on Windows the option would allow a port that is taken
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"ports {wanted} to {wanted + tries - 1} are all taken: name another with PORT=")


def parse_port(text: str) -> int:
    """A port number from 0 to 65535, 0 meaning any.

    >>> parse_port("8888")
    8888
    """
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ValueError(f"PORT={text}: give a number from 1 to 65535, such as PORT=8888")
    return int(text)


def first_lesson(workspace: Path) -> Path:
    """The learner's copy of the first lesson. Raises FileNotFoundError with the command that makes it."""
    lessons = sorted(workspace.glob("[0-9][0-9]_*.ipynb"))
    if not lessons:
        raise FileNotFoundError(f"no lesson in {workspace}: run `python -m course workspace` first")
    return lessons[0]


def course_folder(folder: Path) -> Path:
    """An instructor's folder. Raises FileNotFoundError with the command that makes one."""
    if not (folder / "nbgrader_config.py").is_file():
        raise FileNotFoundError(f"{folder} is no course folder: make one with `grading new-course {folder}`")
    exchange(folder).mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def arguments(place: Place, port: int, token: str, page: str, root: Path, *, formgrader: bool = False) -> list[str]:
    """JupyterLab's command line: local, quiet, and asking no other machine for anything. page: what it opens on."""
    chosen = {
        "ServerApp.ip": place.ip,
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": root,
        "ServerApp.open_browser": place.browser,
        "ServerApp.log_level": "ERROR",
        "IdentityProvider.token": token,
        "PasswordIdentityProvider.hashed_password": "",
        "LabApp.log_level": "WARN",
        "LabApp.default_url": page,
        "LabApp.app_settings_dir": SETTINGS,
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.handlers.announcements.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
        "KernelSpecManager.ensure_native_kernel": True,
        "KernelManager.transport_encryption": "auto" if zmq.has("curve") else "disabled",  # else each kernel complains
    }
    line = [f"--{name}={value}" for name, value in chosen.items()]
    for name in NBGRADER:
        line.append(f"--ServerApp.jpserver_extensions=nbgrader.server_extensions.{name}={formgrader}")
    return [*line, "--allow-root"] if place.root else line


def message(place: Place, port: int, token: str, page: str, user_host: str) -> str:
    """What the learner reads once the server answers."""
    url = f"http://127.0.0.1:{port}{page}?token={token}"
    lines = ["", "The course is open at", f"    {url}"]
    if place.ssh:
        lines += ["On your own machine, first run", f"    ssh -N -L {port}:localhost:{port} {user_host}"]
    elif place.container:
        lines += [f"The container's port {port} must be published, as with docker run -p {port}:{port}."]
    return "\n".join([*lines, "Stop it with Ctrl-C, twice.", ""])


def user_and_host(environment: Mapping[str, str]) -> str:
    """user@host as the learner's ssh reached this machine: SSH_CONNECTION's third word is our address.

    >>> user_and_host({"USER": "ada", "SSH_CONNECTION": "10.0.0.9 50000 10.0.0.7 22"})
    'ada@10.0.0.7'
    """
    words = environment.get("SSH_CONNECTION", "").split()
    return f"{environment.get('USER', 'USER')}@{words[2] if len(words) == 4 else socket.gethostname()}"


def warm_up(mark: Path = WARM) -> None:
    """Import once what every lesson imports: the first time takes long, and a silent kernel would look stuck."""
    if mark.exists():
        return
    print("First start: loading PyTorch and the plotting fonts (up to a minute on a slow disk) ...", flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import minidist, torch, matplotlib.pyplot"], check=True)
    print(f"... ready after {time.monotonic() - started:.0f} s", flush=True)
    mark.touch()


def open_course(environment: Mapping[str, str], root: Path = ROOT, instructor: Path | None = None) -> None:
    """Serve the course until Ctrl-C. PORT in the environment is the port to try first.

    instructor: a course folder made by `grading new-course`, to open formgrader on instead of the lessons.
    """
    if instructor is None:
        page = f"/lab/tree/{first_lesson(root / 'workspace').relative_to(root).as_posix()}"
    else:
        from grading.course.nbgrader_settings import find_commands

        root, page = course_folder(instructor), "/formgrader"
        os.chdir(root)  # where nbgrader looks for its settings
        find_commands()
        more = [str(FORMGRADER), environment.get("JUPYTER_CONFIG_PATH", "")]
        os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, more))
    wanted = parse_port(environment.get("PORT", "8888"))
    place = find_place(environment)
    port = free_port(wanted, place.ip)
    if wanted not in (0, port):
        print(f"Port {wanted} is taken; using {port}.", flush=True)
    warm_up()

    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, before one of the same name in the home
    from jupyterlab.labapp import LabApp

    token = secrets.token_hex(24)
    # In this process: no second one to outlive it, and no token on a command line that other users can read.
    server = LabApp.initialize_server(arguments(place, port, token, page, root, formgrader=instructor is not None))
    text = message(place, port, token, page, user_and_host(environment))
    server.io_loop.add_callback(lambda: print(text, flush=True))
    server.start()
