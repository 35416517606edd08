"""The builder: same source, same bytes; ids that survive edits elsewhere; a check that names what is out of date."""

import json
from pathlib import Path

import nbformat
import pytest

from course import files
from course.__main__ import main
from course.build import LessonError, build, notebook_bytes

LESSON = """\
# %% [markdown]
# # Start
# A rank is a process: $n$ of them, `é` too.

# %% tags=["hide-input", "measure-bytes"]
x = 1 + 1
x

# %%
x

# %%
x
"""


def cells(source: str) -> list[nbformat.NotebookNode]:
    return nbformat.reads(notebook_bytes(source).decode(), as_version=4).cells


def test_a_lesson_becomes_a_clean_notebook():
    content = notebook_bytes(LESSON)
    assert content == notebook_bytes(LESSON)
    assert content.endswith(b"}\n")
    assert not content.endswith(b"\n\n")
    assert b"\r" not in content
    notebook = json.loads(content)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in notebook["cells"][1:])
    assert "".join(notebook["cells"][0]["source"]).endswith("`é` too.")


def test_ids_are_first_own_tags_or_content():
    before = [cell.id for cell in cells(LESSON)]
    assert before[1] == "measure-bytes"  # not hide-input, which any cell may carry
    assert len(set(before)) == 4
    assert before[3] == before[2] + "-2"  # the same cell twice
    after = [cell.id for cell in cells("# %% [markdown]\n# A cell more\n\n" + LESSON.replace("1 + 1", "2"))]
    assert after[1:] == before  # neither moving nor, for a tagged cell, editing changes an id


@pytest.mark.parametrize("tags", ['["one"]', '["hide-input", "one"]'])
def test_a_tag_used_twice_is_refused(tags: str):
    with pytest.raises(LessonError, match=r"03_x.py: two cells have 'one'"):
        notebook_bytes(f'# %% tags=["one"]\n1\n\n# %% tags={tags}\n2\n', "03_x.py")


def test_a_tag_that_cannot_be_an_id_is_refused():
    with pytest.raises(LessonError, match="letters, digits"):
        notebook_bytes('# %% tags=["two words"]\n1\n')


def test_check_names_stale_missing_and_orphaned_notebooks_and_writes_nothing(tmp_path: Path):
    sources, notebooks = tmp_path / "src", tmp_path / "course"
    sources.mkdir()
    notebooks.mkdir()
    for name in ("00_start", "02_collectives"):
        (sources / f"{name}.py").write_text(LESSON, encoding="utf-8")
    assert [path.name for path in build(sources, notebooks).stale] == ["00_start.ipynb", "02_collectives.ipynb"]
    assert build(sources, notebooks).stale == []  # nothing to do the second time

    (sources / "02_collectives.py").write_text(LESSON + "\n# %%\n3\n", encoding="utf-8")
    (sources / "03_new.py").write_text(LESSON, encoding="utf-8")
    (notebooks / "99_gone.ipynb").write_text("{}", encoding="utf-8")
    old = (notebooks / "02_collectives.ipynb").read_bytes()
    report = build(sources, notebooks, check=True)
    assert [path.name for path in report.stale] == ["02_collectives.ipynb", "03_new.ipynb"]
    assert [path.name for path in report.orphans] == ["99_gone.ipynb"]
    assert (notebooks / "02_collectives.ipynb").read_bytes() == old
    assert not (notebooks / "03_new.ipynb").exists()


def test_the_command_fails_only_when_checking_finds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(files, "SOURCES", tmp_path)
    monkeypatch.setattr(files, "NOTEBOOKS", tmp_path)
    (tmp_path / "00_start.py").write_text(LESSON, encoding="utf-8")
    assert main(["build", "--check"]) == 1
    assert "00_start.ipynb: out of date; run `python -m course build`" in capsys.readouterr().out
    assert main(["build"]) == 0
    assert main(["build", "--check"]) == 0
    (tmp_path / "00_start.py").write_text('# %% tags=["a b"]\n1\n', encoding="utf-8")
    with pytest.raises(SystemExit, match="the tag 'a b'"):
        main(["build"])
