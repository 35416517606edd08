"""Two dozen honest and hostile submissions of one assignment, graded together: each gets its verdict."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.notebooknode import NotebookNode

from grading.answers import Attempt, Submission, encode
from grading.bank import Bank
from grading.course.grade import Graded, grade
from grading.course.nbgrader_settings import gradebook
from grading.course.new_course import new_course
from grading.course.record import graded_notebooks, outcomes
from grading.course.release import release
from grading.course.settings import Course, load
from grading.draw import variant_for
from grading.fill import variants
from grading.question import Choice, key

SMALL = Path(__file__).parent / "small_course"

RIGHT_PASS = """
def pass_on(comm, x):
    buffer = torch.empty_like(x)
    receiving = comm.irecv(buffer, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    receiving.wait()
    return buffer
"""
RIGHT_TOTAL = """
def total(comm, x):
    result, moving = x.clone(), x
    for _ in range(comm.size - 1):
        moving = pass_on(comm, moving)
        result = result + moving
    return result
"""
HANG = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException:
        pass
"""
LOOK = (
    """
import os, socket
seen = []
for folder, _, files in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/dev", "/usr")) or "-packages" in folder:
        continue
    wanted = ("gradebook.db", "course.toml", "small.py", "ps02.py")
    seen += [os.path.join(folder, name) for name in files if name in wanted]
print("SEEN", seen)
try:
    socket.create_connection(("127.0.0.1", 9), timeout=2)
    print("CONNECTED")
except OSError:
    print("NO NETWORK")
"""
    + RIGHT_TOTAL
)
DETACHED = (
    """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; marker = 'left-behind-by-a-learner'; time.sleep(300)"],
                 start_new_session=True)
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; m = 'left-behind-by-a-learner'; time.sleep(300)"])
    os._exit(0)
"""
    + RIGHT_TOTAL
)
NO_ASSERT = """
import ast
class Drop(ast.NodeTransformer):
    def visit_Assert(self, node): return ast.Pass()
    def visit_Raise(self, node): return ast.Pass()
    def visit_Expr(self, node):
        return ast.parse("99").body[0] if "check" in ast.dump(node) else node
get_ipython().ast_transformers.append(Drop())
def check(name): return 99
"""
PICKLED = """
class Trap:
    def __call__(self, comm, x): return x
    def __reduce__(self):
        import os
        return (os.system, ("touch MARK; kill -9 -1",))
total = Trap()
"""
BAD_RANKS = """
def total(comm, x):
    import os
    os._exit(3)
"""
DEADLOCK = """
def total(comm, x):
    comm.irecv(x.clone(), (comm.rank - 1) % comm.size).wait()
    return x
"""
FORGED = """
import cloudpickle, grading.pack
cloudpickle.dumps = lambda *a, **k: b"not a pickle"
grading.pack.pack = lambda function: b"not a pickle"
def total(comm, x): return x
"""

KILLS = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):  # also the process that its ranks would be forked from
    if int(pid) not in (1, os.getpid()):
        os.kill(int(pid), signal.SIGKILL)
"""
SHOWS = """
from IPython.display import display
display({"text/plain": 5}, raw=True)  # no notebook can hold this
"""
SENDS = """
kernel = get_ipython().kernel
kernel.session.send(kernel.iopub_socket, "display_data", content={}, parent=kernel.get_parent())
"""
ANSWERS = """
get_ipython().user_expressions = lambda wanted: [1]
"""

Edit = Callable[[NotebookNode], None]


def put(**sources: str) -> Edit:
    """Replace the source of solution cells."""

    def edit(notebook: NotebookNode) -> None:
        for cell in notebook.cells:
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            if name in sources:
                cell.source = sources[name].strip("\n")

    return edit


def cell_of(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == name)


def good(notebook: NotebookNode) -> None:
    put(pass_on=RIGHT_PASS, total=RIGHT_TOTAL, messages="n - 1: each tensor has to pass everyone.")(notebook)


def with_total(source: str) -> Edit:
    return put(pass_on=RIGHT_PASS, total=source)


def both(body: str) -> Edit:
    return put(pass_on=f"def pass_on(comm, x):\n    {body}", total=f"def total(comm, x):\n    {body}")


def copied_check(notebook: NotebookNode) -> None:
    good(notebook)
    for number in range(2):
        copy = nbformat.from_dict(cell_of(notebook, "check-S-2"))
        copy["id"] = f"copy-{number}"
        notebook.cells.append(copy)


def split_solution(notebook: NotebookNode) -> None:
    good(notebook)
    cell = cell_of(notebook, "total")
    second = nbformat.from_dict(cell)
    second["id"] = "second"
    cell.source, second.source = (
        "def helper(a, b):\n    return a + b",
        RIGHT_TOTAL.replace("result + moving", "helper(result, moving)"),
    )
    notebook.cells.insert(notebook.cells.index(cell) + 1, second)


def skipped(notebook: NotebookNode) -> None:
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata["tags"] = ["skip-execution", "raises-exception"]


def deleted_check(notebook: NotebookNode) -> None:
    good(notebook)
    notebook.cells = [
        cell
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("grade_id") not in ("check-S-1", "setup")
    ]


def changed_points(notebook: NotebookNode) -> None:
    cell = cell_of(notebook, "check-S-1")
    cell.metadata.nbgrader.update(points=1000, solution=True)
    cell.source = "1000"


def no_metadata(notebook: NotebookNode) -> None:
    good(notebook)
    for number, cell in enumerate(notebook.cells):
        cell.metadata = NotebookNode()
        cell["id"] = f"x{number}"


def moved(notebook: NotebookNode) -> None:
    good(notebook)
    cell = cell_of(notebook, "check-S-2")
    notebook.cells.remove(cell)
    notebook.cells.insert(0, cell)


# name: (how the empty release is edited, points of S.1, of S.2, words of the notes)
NOTEBOOKS: dict[str, tuple[Edit, float, float, tuple[str, ...]]] = {
    "reference": (good, 3, 5, ()),
    "empty": (lambda notebook: None, 0, 0, ()),
    "none": (both("return None"), 0, 0, ()),
    "same": (both("return x"), 0, 0, ()),
    "exits": (with_total("import os; os._exit(1)"), 3, 0, ()),
    "crashes": (with_total("import ctypes; ctypes.string_at(0)"), 3, 0, ()),
    "hangs": (with_total(HANG), 3, 0, ()),
    "copied": (copied_check, 3, 5, ("check-S-2 was there more than once",)),
    "split": (split_solution, 3, 5, ("total was there more than once",)),
    "skips": (skipped, 0, 0, ()),
    "transforms": (put(pass_on=NO_ASSERT, total=NO_ASSERT), 0, 0, ()),
    "warns": (with_total("import sys; print('careful', file=sys.stderr)" + RIGHT_TOTAL), 3, 5, ()),
    "looks": (with_total(LOOK), 3, 5, ()),
    "detaches": (with_total(DETACHED), 3, 5, ()),
    "floods": (with_total("print('x' * 10_000_000)" + RIGHT_TOTAL), 3, 5, ()),
    "deleted": (deleted_check, 3, 5, ("setup was missing", "check-S-1 was missing")),
    "points": (changed_points, 0, 0, ("check-S-1 had been changed",)),
    "stripped": (no_metadata, 3, 5, ()),
    "moved": (moved, 3, 5, ("put back in their order",)),
    "pickled": (with_total(PICKLED), 3, 0, ()),
    "lost": (with_total(BAD_RANKS), 3, 0, ()),
    "deadlocks": (with_total(DEADLOCK), 3, 0, ()),
    "forged": (with_total(FORGED), 3, 0, ()),
    "shows": (with_total(SHOWS + RIGHT_TOTAL), 3, 5, ()),
    "sends": (with_total(SENDS + RIGHT_TOTAL), 3, 5, ()),
    "answers": (with_total(ANSWERS + RIGHT_TOTAL), 3, 0, ()),
    "kills": (with_total(KILLS + RIGHT_TOTAL), 3, 5, ()),
}  # fmt: skip
FILES = {"renamed", "broken", "foreign", "helper", "linked", "folderless"}


def answers(bank: Bank, learner: str, right: int, edition: str) -> str:
    """A submitted test with so many right answers."""
    questions = bank.of("90", "test")
    drawn = {each.id: variant_for(each.id, learner, 0, len(variants(each))) for each in questions}
    given = {}
    for place, question in enumerate(questions):
        if isinstance(question.body, Choice):
            option = next(each for each in question.body.options if each.right == (place < right))
            given[question.id] = key(question.id, option.value)
        else:
            given[question.id] = 4.0 * variants(question)[drawn[question.id]]["count"] if place < right else 1.0
    return encode(Submission("90", learner, (Attempt(drawn, given, time.time()),), edition))


def hand_in(course: Course, who: str, edit: Edit, name: str = "small.ipynb") -> Path:
    folder = course.folder("submitted", "small", who)
    folder.mkdir(parents=True)
    notebook = nbformat.read(course.folder("release", "small") / "small.ipynb", as_version=4)
    edit(notebook)
    nbformat.write(notebook, folder / name)
    return folder


def hand_in_files(course: Course) -> None:
    """Submissions that are not just an edited notebook."""
    hand_in(course, "renamed", good, "Small (2) final.ipynb")
    broken = hand_in(course, "broken", good) / "small.ipynb"
    broken.write_text(broken.read_text()[:-400])
    foreign = course.folder("submitted", "small", "foreign")
    foreign.mkdir(parents=True)
    other = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print('my thesis')")])
    nbformat.write(other, foreign / "small.ipynb")
    helper = hand_in(course, "helper", with_total("from ring_helper import total"))
    (helper / "ring_helper.py").write_text(
        "def add(a, b):\n    return a + b\n"
        + RIGHT_TOTAL.replace("pass_on(comm, moving)", "step(comm, moving)").replace(
            "result + moving", "add(result, moving)"
        )
        + RIGHT_PASS.replace("pass_on", "step").replace("\ndef", "\nimport torch\ndef", 1)
    )
    linked = hand_in(course, "linked", good)
    os.symlink(course.root / "gradebook.db", linked / "book.db")
    (course.folder("submitted", "small", "folderless")).mkdir(parents=True)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Course, dict[str, Graded], float, list[int]]:
    """The class, graded; how long that took; and processes left."""
    root = tmp_path_factory.mktemp("class") / "course"
    new_course(root)
    import shutil

    shutil.copytree(SMALL, root, dirs_exist_ok=True)
    names = sorted({*NOTEBOOKS, *FILES})
    (root / "roster.csv").write_text("id,first_name,last_name,email\n" + "".join(f"{name},,,\n" for name in names))
    text = (root / "course.toml").read_text().replace("cell_s = 20", "cell_s = 10")
    (root / "course.toml").write_text(text)
    course = load(root)
    release(course, "small")
    for who, (edit, *_) in NOTEBOOKS.items():
        hand_in(course, who, edit)
    hand_in_files(course)
    notebook = nbformat.read(course.folder("submitted", "small", "reference") / "small.ipynb", as_version=4)
    bank = Bank.load(*course.questions, seed=course.seed)
    cell = next(cell for cell in notebook.cells if cell.source == 'submit("90")')
    cell.source = f'submit("90", "{answers(bank, "abcd1234", 2, bank.edition)}")'
    nbformat.write(notebook, course.folder("submitted", "small", "reference") / "small.ipynb")
    beside = answers(bank, "ffff0000", 3, Bank().edition)  # to the public questions
    (course.folder("submitted", "small", "warns") / "answers-90.txt").write_text(beside + "\n")
    before = processes()
    started = time.monotonic()
    results = {each.learner: each for each in grade(course, "small", jobs=2)}
    seconds = time.monotonic() - started
    return course, results, seconds, sorted(processes() - before)


def processes() -> set[int]:
    """Our children, and everything that a learner started."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
            line = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if int(stat[1]) == os.getpid() or b"left-behind-by-a-learner" in line:
            found.add(int(name))
    return found


def points(course: Course, who: str) -> dict[str, float]:
    (notebook,) = graded_notebooks(course.folder("autograded", "small", who)).values()
    return {outcome.part: outcome.points for outcome in outcomes(notebook).values()}


def printed(course: Course, who: str) -> str:
    (notebook,) = graded_notebooks(course.folder("autograded", "small", who)).values()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.get("text", "") or output.get("evalue", "") for output in outputs)


@pytest.mark.slow
class TestClass:
    def test_everyone_gets_a_verdict(self, graded):
        _, results, _, _ = graded
        assert len(results) == len(NOTEBOOKS) + len(FILES) >= 22
        assert [who for who, each in results.items() if each.score is None] == []

    @pytest.mark.parametrize("who", sorted(NOTEBOOKS))
    def test_points_and_notes(self, graded, who: str):
        course, results, _, _ = graded
        _, first, second, notes = NOTEBOOKS[who]
        got = points(course, who)
        assert (got["S.1"], got["S.2"]) == (first, second), printed(course, who)
        for words in notes:
            assert words in "\n".join(results[who].notes)

    def test_strange_files(self, graded):
        course, results, _, _ = graded
        expected = {"renamed": 8, "broken": 0, "foreign": 0, "helper": 8, "linked": 8, "folderless": 0}
        got = {who: points(course, who)["S.1"] + points(course, who)["S.2"] for who in expected}
        assert got == expected
        notes = {who: "\n".join(results[who].notes) for who in expected}
        assert "was graded as small.ipynb" in notes["renamed"]
        assert "no JSON" in notes["broken"]
        assert "not the notebook that was handed out" in notes["foreign"]
        assert "no notebook small.ipynb was handed in" in notes["folderless"]
        assert not (course.folder("autograded", "small", "linked") / "book.db").exists()

    def test_the_kernel_sees_no_course_and_no_network(self, graded):
        course, _, _, _ = graded
        said = printed(course, "looks")
        assert "SEEN []" in said
        assert "NO NETWORK" in said or "NameError" in said

    def test_a_dead_or_stuck_kernel_is_one_failed_cell(self, graded):
        course, _, _, _ = graded
        for who, words in {
            "exits": "ended its Python process",
            "crashes": "ended its Python process",
            "hangs": "could not be interrupted",
        }.items():
            assert words in printed(course, who)

    def test_nothing_is_left_running(self, graded):
        assert graded[3] == []

    def test_a_flood_is_cut(self, graded):
        course, _, _, _ = graded
        size = (course.folder("autograded", "small", "floods") / "small.ipynb").stat().st_size
        assert 100_000 < size < 300_000

    def test_ranks_say_what_went_wrong(self, graded):
        course, _, _, _ = graded
        assert "wait" in printed(course, "deadlocks")
        assert "S.2 basic: failed" in printed(course, "lost")

    def test_the_test_is_graded_from_the_notebook_or_the_file_beside_it(self, graded):
        course, results, _, _ = graded
        assert points(course, "reference")["test-90"] == 2
        assert points(course, "warns")["test-90"] == 3
        assert "answers-90.txt" in "\n".join(results["warns"].notes)
        assert "other questions than this course's" in "\n".join(results["warns"].notes)
        assert points(course, "empty")["test-90"] == 0
        assert "Not right." in printed(course, "reference")

    def test_the_gradebook_has_the_same(self, graded):
        course, _, _, _ = graded
        with gradebook(course) as book:
            for who in [*NOTEBOOKS, *FILES]:
                submission = book.find_submission("small", who)
                (notebook,) = submission.notebooks
                scores = {grade.name: grade.auto_score for grade in notebook.grades}
                mine = points(course, who)
                assert (scores["check-S-1"], scores["check-S-2"], scores["test-90"]) == tuple(
                    mine[part] for part in ("S.1", "S.2", "test-90")
                )
            for who, what in {"reference": {"messages"}, "warns": {"test-90"}}.items():
                grades = book.find_submission_notebook("small", "small", who).grades
                assert {grade.name for grade in grades if grade.needs_manual_grade} == what

    def test_twenty_two_are_graded_within_90_seconds(self, graded):
        print(f"{len(graded[1])} submissions in {graded[2]:.0f} s")
        if os.getloadavg()[0] > 3:  # two jobs alone make 2
            pytest.skip(f"others use this machine too, so it took {graded[2]:.0f} s")
        assert graded[2] * 22 / len(graded[1]) < 90
