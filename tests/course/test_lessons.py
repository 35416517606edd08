"""Lessons: the form that every one has, and that they run from top to bottom."""

import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from course.build import notebook_bytes

COURSE = Path(__file__).parents[2] / "course"
LESSONS = ("00_start", "02_collectives", "03_data_parallelism")
SECONDS_TOGETHER = 180  # on two cores

# What each lesson has to cover, in the words of its head.
CONCEPTS = {
    "00_start": (
        "a rank is a process; world, group; same program, different data (SPMD); a collective needs everyone; "
        "deadlock; rendezvous"
    ),
    "02_collectives": (
        "reduce, all-reduce, reduce-scatter, all-gather, all-to-all, broadcast; ring in two halves; "
        "bytes per rank almost independent of n; latency against bandwidth (alpha-beta); tree against ring; "
        "algorithm against bus bandwidth; hierarchical when links differ"
    ),
    "03_data_parallelism": (
        "identical replicas; when the averaging happens (after backward, before the optimizer); averaging gradients "
        "equals one big batch (and when not: unequal token counts); twice the parameters per step; buckets; "
        "overlap with the backward pass; accumulation without synchronisation; throughput scales, memory does not; "
        "global batch and learning rate; uneven inputs"
    ),
}
NUMBER_OF_CONCEPTS = {"00_start": "Six", "02_collectives": "Twelve", "03_data_parallelism": "Ten"}

# Cells that questions, cards and other pages point to, and how each lesson proves its main claim.
TAGS = {
    "00_start": "machine first-world spmd groups measure-wait deadlock raises rendezvous train-four same-weights",
    "02_collectives": (
        "who-holds-what ring-halves measure-bytes naive-exchange measure-alpha-beta tree-ring bandwidths hierarchical"
    ),
    "03_data_parallelism": (
        "identical-replicas when-to-average token-mean gradients-equal measure-traffic buckets overlap-run "
        "timeline-paced timeline-unpaced accumulation throughput-memory batch-and-rate uneven-join"
    ),
}
ORDER = (
    "**The question.**",
    "**Predict.**",
    "### The idea",
    "### The code",
    "### Explore",
    "## Questions",
    "## Why not?",
)
LONGEST_CELL_IN_WORDS = 170


def lesson(name):
    return nbformat.reads(notebook_bytes((COURSE / "src" / f"{name}.py").read_text()).decode(), as_version=4)


def prose(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def tags_of(notebook):
    return [tag for cell in notebook.cells for tag in cell.metadata.get("tags", [])]


# ---- the form --------------------------------------------------------------------------------------------------------


def faults(name, notebook):
    """What is missing or wrong in the form of a lesson."""
    text, wrong, words = "\n".join(prose(notebook)), [], notebook.cells[0].source
    listed = [" ".join(item.split()) for item in re.findall(r"^- (.*(?:\n  .*)*)", words, re.M)]
    wrong += [f"the head does not list {c!r}" for c in CONCEPTS[name].split("; ") if c not in listed]
    if f"**{NUMBER_OF_CONCEPTS[name]} concepts**" not in words:
        wrong.append("the head does not say how many concepts there are")
    sittings = dict(re.findall(r"(\d) \*[^*]+\* (\d+) minutes", " ".join(words.split())))
    printed = dict(re.findall(r"^## Sitting (\d): .* \((\d+) minutes\)$", text, re.M))
    if not 1 <= len(sittings) <= 3 or sittings != printed or any(int(m) > 25 for m in sittings.values()):
        wrong.append(f"sittings in the head {sittings}, in the text {printed}: one to three, at most 25 minutes")
    places = [text.find(part) for part in ORDER]
    if -1 in places or places != sorted(places):
        wrong.append(f"parts out of order or missing: {dict(zip(ORDER, places, strict=True))}")
    tags = tags_of(notebook)
    wrong += [f"two cells have the tag {tag}" for tag in sorted(set(tags)) if tags.count(tag) > 1]
    wrong += [f"no cell has the tag {tag}" for tag in TAGS[name].split() if tag not in tags]
    wrong += [f"a question points to the missing cell {tag}" for tag in _pointers(text) if tag not in tags]
    wrong += [f"{len(cell.split())} words in one cell: {cell[:40]!r}" for cell in prose(notebook) if _too_long(cell)]
    wrong += [
        f"a character outside of plain text: {c!r}"
        for c in sorted(set(json.dumps(text, ensure_ascii=False)))
        if ord(c) > 0x2000
    ]
    return wrong + _open_predictions(notebook)


def _pointers(text):
    return [tag for group in re.findall(r"\(cells? ([^)]*)\)", text) for tag in re.findall(r"`([a-z-]+)`", group)]


def _too_long(cell):
    return len(cell.split()) > LONGEST_CELL_IN_WORDS


def _open_predictions(notebook):
    """A question in full, then the cell where the number goes, then the run that uses it; nothing between the two."""
    wrong = []
    for i, cell in enumerate(notebook.cells):
        tag = next((tag for tag in cell.metadata.get("tags", []) if tag.startswith("predict-")), None)
        if tag is None:
            continue
        number = re.search(r"^(prediction_\w+) = None", notebook.cells[i + 1].source, re.M)
        later = "\n".join(cell.source for cell in notebook.cells[i + 2 :] if cell.cell_type == "code")
        if cell.cell_type != "markdown" or "?" not in cell.source or number is None:
            wrong.append(f"{tag} is no question with a place for the answer")
        elif f"prediction={number[1]}" not in later:
            wrong.append(f"the answer to {tag} is never compared with a run")
    return wrong


@pytest.mark.parametrize("name", LESSONS)
def test_lesson_has_its_form(name):
    assert faults(name, lesson(name)) == []


def test_what_a_lesson_lacks_is_found():
    name = "02_collectives"
    whole = (COURSE / "src" / f"{name}.py").read_text()

    def after(old, new):
        assert old in whole
        return faults(name, nbformat.reads(notebook_bytes(whole.replace(old, new)).decode(), as_version=4))

    assert after("# - ring in two halves\n", "") == ["the head does not list 'ring in two halves'"]
    assert after("**Twelve concepts**", "**Concepts**") == ["the head does not say how many concepts there are"]
    assert "sittings" in after("2 *The ring* 25 minutes", "2 *The ring* 40 minutes")[0]
    assert "out of order" in after("## Why not?", "## Why?")[0]
    assert "no cell has the tag ring-halves" in after('tags=["ring-halves"]', 'tags=["halves"]')
    assert after("prediction_bytes = None", "guess = None") == [
        "predict-bytes is no question with a place for the answer"
    ]
    assert after("prediction=prediction_bytes", "prediction=None") == [
        "the answer to predict-bytes is never compared with a run"
    ]
    assert "outside of plain text" in after("# ## Why not?\n", "# ## Why not?\n#\n# \N{ROCKET}\n")[0]
    assert "words in one cell" in after("## Why not?", "## Why not?\n#\n# " + "word " * 200)[0]


def test_generated_notebooks_are_up_to_date():
    for name in LESSONS:
        built = notebook_bytes((COURSE / "src" / f"{name}.py").read_text(), f"{name}.py")
        assert (COURSE / f"{name}.ipynb").read_bytes() == built, f"course/{name}.ipynb: run `python -m course build`"


# ---- the run ---------------------------------------------------------------------------------------------------------


def run(notebook, folder):
    """Run all cells in a kernel of their own, as a learner does; errors stay in the outputs."""
    client = NotebookClient(
        notebook, timeout=90, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return notebook


def errors(notebook):
    return [
        f"{(cell.metadata.get('tags') or ['?'])[0]}: {output.ename}: {output.evalue}"
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    ]


def printed(notebook, tag):
    """What the cell with this tag printed."""
    (cell,) = (cell for cell in notebook.cells if tag in cell.metadata.get("tags", []))
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Every lesson after Run All, and the seconds each took."""
    folder = tmp_path_factory.mktemp("workspace")
    notebooks, seconds = {}, {}
    for name in LESSONS:
        start = time.perf_counter()
        notebooks[name] = run(lesson(name), folder)
        seconds[name] = time.perf_counter() - start
    print(", ".join(f"{name} {s:.0f} s" for name, s in seconds.items()), f"together {sum(seconds.values()):.0f} s")
    return notebooks, seconds


@pytest.mark.slow
def test_lessons_run_top_to_bottom(ran):
    assert {name: errors(notebook) for name, notebook in ran[0].items()} == {name: [] for name in LESSONS}


@pytest.mark.slow
def test_lessons_take_under_three_minutes_together(ran):
    assert sum(ran[1].values()) < SECONDS_TOGETHER, ran[1]


def test_an_error_in_a_cell_is_found(tmp_path):
    source = '# %% tags=["bad"]\nimport minidist as md\nmd.launch(lambda world: 1 / world.rank, ranks=1)\n'
    notebook = nbformat.reads(notebook_bytes(source).decode(), as_version=4)
    assert errors(run(notebook, tmp_path))[0].startswith("bad: LaunchError")


@pytest.mark.slow
def test_every_figure_is_also_a_static_image(ran):
    for name, notebook in ran[0].items():
        data = [o.data for c in notebook.cells if c.cell_type == "code" for o in c.outputs if "data" in o]
        figures = [d for d in data if "image/png" in d or "application/vnd.jupyter.widget-view+json" in d]
        assert len(figures) >= 4, name
        assert all("image/png" in d for d in figures), name
        assert any("application/vnd.jupyter.widget-view+json" in d for d in figures), f"{name} has no explorer"
        assert not any("<script" in str(d.get("text/html", "")) for d in data), f"{name} loads scripts"


@pytest.mark.slow
def test_four_ranks_and_one_process_get_the_same_weights(ran):
    differences = [
        float(x) for x in re.findall(r"one process ([\d.e+-]+)", printed(ran[0]["00_start"], "same-weights"))
    ]
    moved = float(re.search(r"up to ([\d.e+-]+)", printed(ran[0]["00_start"], "same-weights"))[1])
    assert len(differences) == 4
    assert max(differences) < 1e-10 < moved


@pytest.mark.slow
def test_deadlocks_are_reported_not_waited_for(ran):
    report = printed(ran[0]["00_start"], "deadlock")
    assert report.startswith("deadlock")
    assert all(f"rank {rank}" in report for rank in range(4))
    assert "world.all_reduce(loss)" in report  # the line of the learner's code
    assert "ZeroDivisionError" in printed(ran[0]["00_start"], "raises")
    assert "deadlock" in printed(ran[0]["03_data_parallelism"], "uneven-deadlock")


@pytest.mark.slow
def test_lesson_03_shows_what_it_claims(ran):
    notebook = ran[0]["03_data_parallelism"]
    assert "3.00" in printed(notebook, "token-mean")
    assert "2.50" in printed(notebook, "token-mean")
    right, wrong = (float(x) for x in re.findall(r"gradient ([\d.e+-]+)", printed(notebook, "gradients-equal")))
    assert right < 1e-12 < 1e-3 < wrong
    before, after, never = (
        float(x) for x in re.findall(r"differ by ([\d.e+-]+)", printed(notebook, "when-to-average"))
    )
    assert before == 0 < 1e-3 < min(after, never)
    (paced,) = re.findall(r"^paced .*: ([\d.]+) times", printed(notebook, "overlap-result"), re.M)
    assert float(paced) > 1.1  # overlap pays where computing and sending do not queue for the same cores
    first, second = re.search(r"\[([-\d.e]+), ([-\d.e]+)\]", printed(notebook, "uneven-join")).groups()
    assert first == second
