"""grading doctor: can this machine grade? Everything is tried, and what is missing comes with the one thing to do."""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grading.course import sandbox
from grading.course.settings import CourseError, load

NEEDED_BYTES = 1 << 30
SETTINGS = {  # what a system can set against sandboxes: the value that allows them, and how to set it
    "kernel.apparmor_restrict_unprivileged_userns": "0",
    "kernel.unprivileged_userns_clone": "1",
}
INSTALL = {
    "apt-get": "sudo apt-get install bubblewrap",
    "dnf": "sudo dnf install bubblewrap",
    "pacman": "sudo pacman -S bubblewrap",
    "zypper": "sudo zypper install bubblewrap",
    "apk": "sudo apk add bubblewrap",
}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. fix: what to do about it, "" if all is well. optional: grading works without."""

    name: str
    what: str
    fix: str = ""
    optional: bool = False

    def line(self) -> str:
        state = "ok" if not self.fix else ("note" if self.optional else "MISSING")
        return f"{state:8}{self.name:12}{self.what}" + (f"\n{'':20}do this: {self.fix}" if self.fix else "")


def main(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="grading doctor", description="Say what this machine lacks for grading.").parse_args(
        argv
    )
    findings = examine(Path.cwd())
    for finding in findings:
        print(finding.line(), flush=True)
    bad = [finding for finding in findings if finding.fix and not finding.optional]
    print("This machine can grade." if not bad else f"{len(bad)} missing: do the first, then run this again.")
    return 1 if bad else 0


def examine(folder: Path) -> list[Finding]:
    """Look at everything grading needs, in the order in which to mend it."""
    parts: Sequence[Callable[[], Finding]] = (
        python,
        packages,
        bubblewrap,
        kernel,
        ranks,
        disk,
        lambda: course(folder),
    )
    return [part() for part in parts]


def python() -> Finding:
    return Finding("Python", f"{sys.version.split()[0]} at {sys.prefix}")


def packages() -> Finding:
    """nbgrader, and the command that it runs by name."""
    try:
        version = importlib.metadata.version("nbgrader")
    except importlib.metadata.PackageNotFoundError:
        return Finding("nbgrader", "is not installed", "make setup")
    if not (Path(sys.executable).parent / "alembic").exists() and not shutil.which("alembic"):
        return Finding("nbgrader", "its command alembic is missing", "make setup")
    return Finding("nbgrader", version)


def bubblewrap() -> Finding:
    """Start a real sandbox, look from inside at what must not be seen, and name what stands in the way."""
    problem = sandbox.problem()
    if problem:
        return Finding("sandbox", problem, sandbox_fix(problem))
    look = (
        "import os, socket, json; "
        "print(json.dumps([os.path.exists(p) for p in __import__('sys').argv[1:]] + [len(socket.if_nameindex())]))"
    )
    hidden = [
        str(Path.home() / ".ssh"),
        str(Path.cwd() / "course.toml"),
        str(sandbox.ROOT / "grading" / "checks" / "__init__.py"),
    ]
    run = subprocess.run(
        [*sandbox.command(), sys.executable, "-c", look, *hidden], capture_output=True, text=True, check=False
    )
    try:
        *seen, interfaces = json.loads(run.stdout)
    except ValueError:
        return Finding(
            "sandbox", f"answers strangely: {run.stderr.strip()[-200:]}", "report this, with what is printed here"
        )
    if any(seen) or interfaces > 1:
        what = [path for path, there in zip(hidden, seen, strict=True) if there] + ["a network"] * (interfaces > 1)
        where = "move the course folder and the repository out of Python's own folder and the system's"
        return Finding("sandbox", f"shows a learner's code {', '.join(what)}", where)
    return Finding("sandbox", "bubblewrap works: no network, no course folder, no checks inside")


def sandbox_fix(problem: str) -> str:
    """The one thing to do about a sandbox that does not start on this machine."""
    if not sys.platform.startswith("linux"):
        return "grade in the container: docs/instructor.md, section Containers"
    if shutil.which("bwrap") is None:
        return next((command for tool, command in INSTALL.items() if shutil.which(tool)), "install bubblewrap")
    for name, allowed in SETTINGS.items():
        path = Path("/proc/sys") / name.replace(".", "/")
        if path.exists() and path.read_text().strip() != allowed:
            return (
                f"sudo sysctl -w {name}={allowed}   (to keep it, put {name}={allowed} into /etc/sysctl.d/60-box.conf)"
            )
    most = Path("/proc/sys/user/max_user_namespaces")
    if most.exists() and most.read_text().strip() == "0":
        return "sudo sysctl -w user.max_user_namespaces=15000"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "start the container with --security-opt seccomp=unconfined --security-opt systempaths=unconfined"
    return f"bwrap says: {problem}. Grade in the container (docs/instructor.md), or on another machine"


def kernel() -> Finding:
    """Run a cell in a kernel as learners' cells are run."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    from grading.course.kernel import Place

    place = Place(None, sandboxed=sandbox.available())
    try:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)")])
        client = NotebookClient(
            notebook, km=place.manager(), timeout=60, resources={"metadata": {"path": str(place.work)}}
        )
        client.execute()
        said = "".join(output.get("text", "") for output in notebook.cells[0].outputs)
    except (CellExecutionError, DeadKernelError, TimeoutError, RuntimeError, OSError) as error:
        return Finding("kernel", f"does not answer ({error})", "make setup; then run this again")
    finally:
        place.close()
    return Finding(
        "kernel", "answers" if said.strip() == "42" else f"said {said!r}", "" if said.strip() == "42" else "make setup"
    )


def ranks() -> Finding:
    """Start the process that ranks are forked from."""
    from grading.ranks.host import NoRanks, RankHost

    try:
        with RankHost(sandbox.command() if sandbox.available() else ()):
            return Finding("ranks", "start")
    except NoRanks as error:
        return Finding("ranks", str(error), "grade in the container: docs/instructor.md, section Containers")


def disk() -> Finding:
    """Space here and for temporary files."""
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        free = shutil.disk_usage(folder).free
        if free < NEEDED_BYTES:
            return Finding("disk", f"{free / 1e9:.1f} GB free in {folder}", "free at least 1 GB there")
        if not os.access(folder, os.W_OK):
            return Finding("disk", f"{folder} cannot be written to", f"chmod u+w {folder}, or work elsewhere")
    return Finding("disk", "enough space, and writable")


def course(folder: Path) -> Finding:
    """The course folder this was started in, if it is one."""
    try:
        found = load(folder)
        learners = found.roster()
    except CourseError as error:
        return Finding("course", str(error).splitlines()[0], "cd into your course folder", optional=True)
    if not learners:
        return Finding(
            "course", "roster.csv has no learners", "add a line for each: id,first_name,last_name,email", True
        )
    return Finding("course", f"{found.id}: {len(learners)} learners")
