"""A learner's desk: a workspace with sealed questions, in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grading import log, shelf, text
from grading.bank import Bank
from grading.course import sandbox
from grading.seal import seal

SAMPLE = Path(__file__).parent / "sample" / "questions"


@dataclass
class Desk:
    """The workspace in use, and what a learner's session would hold."""

    root: Path
    patch: pytest.MonkeyPatch

    @property
    def file(self) -> Path:
        return self.root / ".minidist" / "progress.jsonl"

    def entries(self, kind: str) -> list[Any]:
        return [entry for entry in log.log().entries() if entry["kind"] == kind]

    def restart(self) -> None:
        """As after a restart of the kernel: nothing is left but the files."""
        log._log_in.cache_clear()
        log._say_once.cache_clear()
        shelf._read.cache_clear()

    def widgets(self, run: bool) -> None:
        """Whether widgets can be shown."""
        self.patch.setattr(text, "widgets_run", lambda: run)

    def hand_out(self, tests: bool = True) -> None:
        """Put the sample's sealed questions here; tests=False withholds the verdicts of its test."""
        folder = self.root / ".minidist" / "questions"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "77.json").write_bytes(seal(Bank.load(SAMPLE), "77", verdicts_for_tests=tests))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    made = Desk(tmp_path, monkeypatch)
    made.hand_out()
    made.restart()
    yield made
    made.restart()


IN_A_SANDBOX = ("test_course_flow", "test_course_submissions", "test_course_guide")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Grading runs learners' code in a sandbox. Where none can be had, its tests are left out, and say so."""
    ours = [item for item in items if item.path.stem in IN_A_SANDBOX]
    if ours and (why := sandbox.problem()):
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no sandbox can be had here ({why}): see `grading doctor`"))
