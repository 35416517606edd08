"""What must not be in any file of this repository."""

import re
import subprocess
from pathlib import Path

import pytest

from course.files import ROOT

# Written so that this file does not match itself.
MACHINE_PATHS = r"(?<![\w.])/(?:(?:ro[o]t|wor[k]|opt/wheel[s])\b|hom[e]/\w|User[s]/\w)|[A-Z]:\\User[s]"
EMOJI = "[\U0001f300-\U0001faff\U00002600-\U000027bf\U0001f1e6-\U0001f1ff\U00002b50\U00002b55]"
NETWORK_COPY = r"cdn\.|cdnjs|unpk[g]|jsdelivr|googleapis|<scrip[t][^>]+src=|@impor[t] url"


def tracked() -> list[Path]:
    """Every file that git has, or would take, that is text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    binary = {".png", ".jpg", ".gif", ".pt"}
    return [ROOT / name for name in listed if name and (ROOT / name).is_file() and Path(name).suffix not in binary]


def matches(pattern: str, text: str) -> list[str]:
    return [line.strip()[:120] for line in text.splitlines() if re.search(pattern, line)]


def found(pattern: str, *folders: str) -> dict[str, list[str]]:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in tracked()}
    hits = {name: matches(pattern, text) for name, text in texts.items() if name.startswith(folders or "")}
    return {name: lines for name, lines in hits.items() if lines}


def test_no_path_of_somebodys_machine():
    assert found(MACHINE_PATHS) == {}


def test_no_emoji():
    assert found(EMOJI) == {}


def test_nothing_is_loaded_from_the_network_at_run_time():
    assert found(NETWORK_COPY, "course/", "minidist/") == {}


@pytest.mark.parametrize(
    ("pattern", "planted"),
    [
        (MACHINE_PATHS, "see /ro" + "ot/x.py"),
        (MACHINE_PATHS, "'/hom" + "e/ada/minidist'"),
        (MACHINE_PATHS, "C:\\User" + "s\\ada"),
        (EMOJI, "done \N{ROCKET}"),
        (EMOJI, "done \N{WHITE HEAVY CHECK MARK}"),
        (NETWORK_COPY, '<scrip' + 't src="https://x.org/a.js">'),
        (NETWORK_COPY, "https://cdn" + ".x.org/d3.js"),
    ],
)  # fmt: skip
def test_a_planted_one_is_noticed(pattern: str, planted: str):
    assert matches(pattern, planted)
