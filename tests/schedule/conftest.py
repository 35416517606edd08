"""Golden files: what a schedule looked like when a person last looked at it."""

import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"


@pytest.fixture
def golden():
    """golden(name, lines): whether these lines are those of golden/<name>.txt. GOLDEN=write writes them instead."""

    def check(name, lines):
        file, text = FOLDER / f"{name}.txt", "\n".join(line.rstrip() for line in lines) + "\n"
        if os.environ.get("GOLDEN") == "write":
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert text == file.read_text(), f"{file.name} shows another schedule: if that is meant, run GOLDEN=write"
        return True

    return check
