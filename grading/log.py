"""The learner's log: one line of JSON for each thing done, appended to `.minidist/progress.jsonl` in the workspace.

A line, once written, is never changed, and no update of the course touches the file. Kernels take turns at it, a half
written line (a crash, a full disk) costs that line alone, and what cannot be written is kept in memory and written with
the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from grading.files import locked

FOLDER = ".minidist"  # marks a workspace, and holds what the course keeps there
FILE = "progress.jsonl"

Entry = Mapping[str, Any]


class Log:
    """The log in one folder; without a folder it lives in memory only. Any thread may use it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._turn = threading.RLock()
        self._waiting: list[dict[str, Any]] = []  # what could not be written yet

    def append(self, kind: str, **fields: Any) -> str:
        """Add an entry; returns "" once it is on disk, else what stands in the way and what to do about it."""
        entry = {"id": secrets.token_hex(6), "at": round(time.time(), 3), "kind": kind, **fields}
        json.dumps(entry)  # a value that cannot be written raises here, not later
        with self._turn:
            self._waiting.append(entry)
            if self.folder is None:
                return (
                    f"Not saved: there is no workspace at or above {Path.cwd()}. What you answer is kept until this "
                    "kernel stops. Run `make course`, and open the lesson from workspace/."
                )
            try:
                self._write(self.folder / FILE)
            except OSError as error:
                return explain(error, self.folder)
            self._waiting.clear()
        return ""

    def _write(self, path: Path) -> None:
        """Put the waiting entries behind the last whole line, all of them or none."""
        lines = "".join(json.dumps(entry) + "\n" for entry in self._waiting).encode()
        with locked(path.parent), open(path, "ab+", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end and _last_byte(file, end) != b"\n":
                lines = b"\n" + lines  # ends the half line that a crash left
            try:
                if file.write(lines) != len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise

    def adopt(self, other: Log) -> None:
        """Take over what another log could not write: the workspace was made after the first answers."""
        with self._turn:
            self._waiting += other.hand_over()

    def hand_over(self) -> list[dict[str, Any]]:
        """What could not be written, which is no longer this log's concern."""
        with self._turn:
            waiting, self._waiting = self._waiting, []
        return waiting

    def entries(self) -> list[Entry]:
        """Everything logged, oldest first; lines that are not whole are passed over."""
        with self._turn:
            lines: list[str] = []
            if self.folder is not None:
                with contextlib.suppress(OSError):
                    lines = (self.folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
            found: list[Entry] = [entry for entry in map(_parse, lines) if entry is not None]
            found += self._waiting
        return list({entry["id"]: entry for entry in reversed(found)}.values())[::-1]

    def learner(self) -> str:
        """Eight letters that stand for this learner, drawn once; where nothing can be saved they follow the user."""
        known = [entry["name"] for entry in self.entries() if entry["kind"] == "learner"]
        if known:
            return known[0]  # the first, should two kernels have drawn one
        name = secrets.token_hex(4)
        if self.append("learner", name=name):
            with self._turn:
                self._waiting = [entry for entry in self._waiting if entry["kind"] != "learner"]
            return hashlib.sha256(f"{Path.home()}@{platform.node()}".encode()).hexdigest()[:8]
        return self.learner()


def explain(error: OSError, folder: Path) -> str:
    """What a failed write means for the learner."""
    kept = "Nothing is lost: your answers are kept in this kernel and saved with the next one that can be written."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Not saved: the disk that holds {folder} is full. Free some space. {kept}"
    reason = error.strerror or str(error)
    return f"Not saved: cannot write to {folder} ({reason}). Make it writable, or move the workspace. {kept}"


def _last_byte(file: Any, end: int) -> bytes:
    file.seek(end - 1)
    return file.read(1)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("at"), float | int):
        return None
    texts = ("id", "kind", "name") if entry.get("kind") == "learner" else ("id", "kind")
    return entry if all(isinstance(entry.get(key), str) for key in texts) else None


def home(start: Path | None = None) -> Path | None:
    """The folder that keeps this learner's progress: the outermost `.minidist` at or above start (default: here).

    The outermost, because an assignment inside the workspace has a `.minidist` of its own, for its questions.
    """
    return next(reversed(shelves(start)), None)


def shelves(start: Path | None = None) -> list[Path]:
    """Every `.minidist` at or above start (default: here), the nearest first."""
    start = (start or Path.cwd()).resolve()
    return [folder / FOLDER for folder in (start, *start.parents) if (folder / FOLDER).is_dir()]


@cache
def _log_in(folder: Path | None) -> Log:
    return Log(folder)


def log() -> Log:
    """The log of the workspace that this process stands in."""
    found = _log_in(home())
    if found.folder is not None:
        found.adopt(_log_in(None))
    return found


def record(kind: str, **fields: Any) -> str:
    """Log one thing that the learner did; returns "" or, printed once, what keeps it from being saved.

    module, concept and question, where they apply, are what the panel counts by.
    """
    problem = log().append(kind, **fields)
    if problem:
        _say_once(problem)
    return problem


@cache
def _say_once(problem: str) -> None:
    print(problem)
