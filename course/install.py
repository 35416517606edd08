"""Set up .venv with the tested versions. Run by make; where there is no make: python course/install.py

It needs nothing but Python itself, is done at once when nothing changed, and starts over when an earlier set-up was
cut short. Kept to syntax that any Python 3 can read, so that it can say which Python is needed.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST = (3, 11)


def main(root=ROOT):
    """Bring root/.venv up to date; exits with a message when it cannot."""
    if sys.version_info < OLDEST:
        sys.exit(
            f"minidist needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}.\n"
            "Install one (python.org, your system's packages, or conda) and name it: make PYTHON=python3.12 ..."
        )
    venv = os.path.join(root, ".venv")
    with only_one_at_a_time(root):
        if read(stamp_file(venv)) == fingerprint(root) and os.path.exists(python_of(venv)):
            return
        started = time.monotonic()
        make_venv(venv)
        install(root, venv)
        write(stamp_file(venv), fingerprint(root))
        os.remove(unfinished_file(venv))
        print(f"Set up in .venv after {time.monotonic() - started:.0f} s.", flush=True)


def fingerprint(root):
    """What the environment depends on: the Python version and the two files that say what to install."""
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read().replace(b"\r\n", b"\n"))
    return digest.hexdigest()


def make_venv(venv):
    """Create the environment; an unusable one is cleared: cut short, without pip, or of another Python."""
    import venv as builder

    usable = (
        os.path.exists(python_of(venv))
        and not os.path.exists(unfinished_file(venv))
        and version_of(venv) == "{}.{}".format(*sys.version_info[:2])
        and subprocess.call([python_of(venv), "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0
    )
    if not usable:
        print(f"Creating .venv with Python {sys.version.split()[0]}", flush=True)
        if os.path.exists(venv):
            shutil.rmtree(venv)
        os.makedirs(venv)
    write(unfinished_file(venv), "")
    if not usable:
        builder.create(venv, with_pip=True, symlinks=os.name != "nt")


def install(root, venv):
    """Install the package, with what the lessons and the tests need, at the versions of constraints.txt."""
    print("Installing the tested versions (the first time takes some minutes)", flush=True)
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    command = [python_of(venv), "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt"]
    if subprocess.call([*command, *quiet, "-e", ".[course,grading,test]"], cwd=root) != 0:
        sys.exit("The set-up failed: pip's message is above. Nothing is broken; run the same command again.")


def python_of(venv):
    return os.path.join(venv, "Scripts", "python.exe") if os.name == "nt" else os.path.join(venv, "bin", "python")


def stamp_file(venv):
    return os.path.join(venv, "minidist-installed")


def unfinished_file(venv):
    return os.path.join(venv, "minidist-unfinished")


def version_of(venv):
    """The major.minor version that .venv was made with, "" if it cannot be told."""
    for line in read(os.path.join(venv, "pyvenv.cfg")).splitlines():
        key, _, value = line.partition("=")
        if key.strip() in ("version", "version_info"):
            return ".".join(value.strip().split(".")[:2])
    return ""


@contextlib.contextmanager
def only_one_at_a_time(root):
    """Two set-ups of one tree wait for each other (not on Windows, where a folder cannot be locked)."""
    if os.name == "nt":
        yield
        return
    import fcntl

    folder = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Another set-up of this folder is running; waiting for it", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def read(path):
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
