"""Where things lie. How files are written without anyone seeing half of one is in grading/files.py."""

from pathlib import Path

from grading.files import locked as locked
from grading.files import write_atomically as write_atomically

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "course" / "src"
NOTEBOOKS = ROOT / "course"
ASSIGNMENTS = ROOT / "grading" / "src"
WORKSPACE = ROOT / "workspace"
