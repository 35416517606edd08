"""Running a learner's notebook so that it always ends with a verdict: nbgrader's Execute, made safe.

A kernel that died, or that hangs and cannot be interrupted, is one failed cell: it is ended with everything it
started, a new one runs what went well before, and grading goes on with the next cell. Cells that a trusted check or a
test judges are not run at all: the learner's functions leave the kernel as bytes, and what they earn is decided outside
(examine).
"""

import ast
import base64
import socket
import time
from pathlib import Path
from typing import Any, ClassVar

import nbformat
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat.notebooknode import NotebookNode
from nbgrader import utils
from nbgrader.preprocessors import Execute
from traitlets import Bool, Unicode

from grading.course import sandbox, settings
from grading.course.examine import Checks, Examiner
from grading.course.kernel import Place
from grading.course.outcome import Outcome, Uncollected, Unwritten
from grading.course.ranks import RanksBesideKernel

KEPT_BYTES = 100_000  # of a cell's outputs
KEPT_IN_ALL = 400_000  # of a notebook's
KEPT_OUTPUTS = 200  # of a cell
LARGEST_FUNCTION = 20 << 20  # bytes, in base64

# A cell of nothing but calls of these shows something to whoever sits there, and defines nothing.
SHOWING = {"card", "compare", "hint", "launch", "predict", "progress", "quiz", "review", "submit"}

DIED = "KernelDied", "this cell ended its Python process (os._exit, a crash in native code, or out of memory)"
STUCK = "CellTimeout", "this cell ran for more than {:g} s and could not be interrupted; it was ended by force"
UNREADABLE = "OutputError", "this cell sent something that no kernel sends ({}); it was ended there"
INVALID = "InvalidOutput", "an output of this cell is none that a notebook can hold, and was left out"

# Runs in the learner's kernel. Their helpers travel along by value, also those of modules handed in.
TAKE = """
def __take__(name):
    import base64, os, sys
    import cloudpickle
    from grading.pack import pack
    function = vars(sys.modules["__main__"]).get(name)
    if not callable(function):
        raise NameError(name)
    here = os.getcwd() + os.sep
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None) or "").startswith(here):
            cloudpickle.register_pickle_by_value(module)
    return base64.b64encode(pack(function)).decode()
"""


class SafeExecute(Execute):
    """Runs the learner's cells in a sandboxed kernel, and judges the others from outside it."""

    course_root = Unicode(help="the course folder").tag(config=True)
    sandboxed = Bool(True, help="run the learner's code in bubblewrap").tag(config=True)
    prepared: ClassVar[Checks | None] = None  # read before the forks, so that each need not read them again

    def preprocess(self, nb: NotebookNode, resources: Any = None, km: Any = None) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        course = settings.load(Path(self.course_root))
        limits = course.limits.on_a_busy_machine()
        self.timeout, self.whole = round(limits.cell_s), round(limits.notebook_s)
        self.timeout_func = self.seconds_for
        self.iopub_timeout = 3
        self.startup_timeout = 180  # it imports torch first
        self.shutdown_kernel = "immediate"
        self.deadline = time.monotonic() + limits.notebook_s
        self.went_well: list[str] = []  # the source of cells, to run again in a new kernel
        self.kept = 0
        self.untouched = untouched(nb, course.folder("release", names["assignment"]) / f"{names['notebook']}.ipynb")
        handed_in = Path(resources["metadata"]["path"])
        self.place = Place(handed_in, sandboxed=self.sandboxed)
        self.ranks = RanksBesideKernel(sandbox.command() if self.sandboxed else ())
        resources["metadata"]["path"] = str(self.place.work)
        try:
            checks = self.prepared or Checks.load(course, names["assignment"])
            self.examiner = Examiner(course, checks, names["assignment"], names["student"], nb, handed_in, self.ranks)
            if not self.untouched:
                return super().preprocess(nb, resources, km)
            for index, cell in enumerate(nb.cells):  # there is nothing to run
                self.preprocess_cell(cell, resources, index)
            return nb, resources
        finally:
            self.ranks.close()
            resources["metadata"]["path"] = str(handed_in)
            self.place.close()

    def seconds_for(self, cell: NotebookNode) -> int:
        """How long a cell may take. What is ours, such as the first imports, is no learner's fault."""
        about = cell.metadata.get("nbgrader", {})
        return self.whole if about.get("locked") and not about.get("grade") else self.timeout

    def create_kernel_manager(self) -> AsyncKernelManager:
        mine, self.theirs = socket.socketpair()
        self.ranks.adopt(mine)
        self.km = self.place.manager(self.theirs.fileno())
        return self.km

    async def async_start_new_kernel(self, **options: Any) -> None:
        with self.theirs:
            await super().async_start_new_kernel(pass_fds=[self.theirs.fileno()], **options)

    start_new_kernel = run_sync(async_start_new_kernel)

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        if cell.cell_type != "code" or not cell.source.strip():
            return cell, resources
        cell.outputs, cell.execution_count = [], None
        cell.metadata.pop("tags", None)  # one of them would switch execution off
        part = self.examiner.part(cell)
        if part is not None:
            outcome = self.examiner.judge(part, self.collect)
            cell.outputs = outputs_of(outcome)
            cell.metadata["grading"] = outcome.to_json()
        elif self.untouched or only_shows(cell.source):
            pass
        elif time.monotonic() > self.deadline:
            cell.outputs = [error_output("NotRun", "earlier cells used up the time for this notebook")]
        else:
            self.run_cell(cell, index)
        return cell, resources

    def run_cell(self, cell: NotebookNode, index: int) -> None:
        """Run one cell of the learner's; whatever it does, the next one finds a kernel."""
        why = self._execute(cell, index)
        failed = any(output.output_type == "error" for output in cell.outputs)
        if why is not None:
            cell.outputs = [*cell.outputs, error_output(*why)]
            self.start_over()
        elif not failed and not utils.is_grade(cell):
            self.went_well.append(cell.source)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.name = "stdout"  # a warning is no failure, and nbgrader would score it 0
        self.kept += sum(map(size_of, cell.outputs))
        self.nb.cells[index] = cell

    def _execute(self, cell: NotebookNode, index: int) -> tuple[str, str] | None:
        try:
            self.execute_cell(cell, index, store_history=True)
        except DeadKernelError:
            return DIED
        except (CellTimeoutError, TimeoutError):
            return STUCK[0], STUCK[1].format(self.seconds_for(cell))
        except Exception as error:
            return UNREADABLE[0], UNREADABLE[1].format(type(error).__name__)
        return None

    def start_over(self) -> None:
        """End the kernel with all it started, and bring a new one to where the old one was."""
        self._new_kernel()
        cells = list(self.nb.cells)
        for source in list(self.went_well):
            if time.monotonic() > self.deadline:
                break
            # Marked as ours: it ran in time before, and a new kernel has to import everything again.
            if self._execute(nbformat.v4.new_code_cell(source, metadata={"nbgrader": {"locked": True}}), 0) is not None:
                self._new_kernel()
                break
        self.nb.cells = cells

    def _new_kernel(self) -> None:
        if self.km is not None:
            self._cleanup_kernel()
        self.create_kernel_manager()
        self.start_new_kernel()
        self.start_new_kernel_client()

    def collect(self, names: list[str]) -> dict[str, bytes]:
        """The learner's functions of these names, pickled; those that cannot be had are left out.

        Raises Uncollected if the kernel is of no use any more.
        """
        if self.untouched:
            raise Unwritten("nothing was written in this notebook")
        if time.monotonic() > self.deadline:
            raise Uncollected("earlier cells used up the time for this notebook")
        assert self.kc is not None
        wanted = {name: f"__take__({name!r})" for name in names}
        try:
            request = self.kc.execute(TAKE, silent=True, store_history=False, user_expressions=wanted)
            reply = self.wait_for_reply(request)
        except DeadKernelError:
            reply = None
        if reply is None:
            self.start_over()
            raise Uncollected("your notebook's Python process did not answer when asked for it")
        return _unpacked(reply["content"].get("user_expressions") or {}, names)

    def output(self, outs: list[NotebookNode], msg: Any, display_id: str | None, cell_index: int) -> Any:
        """Keep what a cell shows within bounds, as it comes."""
        room = min(KEPT_BYTES, KEPT_IN_ALL - self.kept) - sum(map(size_of, outs))
        if room <= 0 or len(outs) >= KEPT_OUTPUTS:
            return None
        content = msg["content"]
        if len(str(content)) > room:
            text = content.get("text") or "\n".join(map(str, content.get("traceback") or ())) or "a large output"
            if msg["msg_type"] == "error":
                content["traceback"] = [text[-room:]]
                content["evalue"] = str(content.get("evalue", ""))[:1000]
            else:
                msg["msg_type"] = msg["header"]["msg_type"] = "stream"
                msg["content"] = {"name": "stdout", "text": f"{text[:room]}\n... the rest was cut by the grader ...\n"}
        try:
            return super().output(outs, msg, display_id, cell_index)
        except Exception:  # what a kernel sends is in the learner's hands
            outs.append(error_output(*INVALID))
            return None


def _unpacked(replies: Any, names: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in names:
        reply = replies.get(name) if isinstance(replies, dict) else None
        data = reply.get("data") if isinstance(reply, dict) else None
        text = data.get("text/plain") if isinstance(data, dict) else None
        if not isinstance(text, str):  # an error, or what a learner's code put in its place
            continue
        if len(text) > LARGEST_FUNCTION:
            raise Uncollected(f"{name} is larger than {LARGEST_FUNCTION >> 20} MB with all it uses")
        try:
            found[name] = base64.b64decode(ast.literal_eval(text), validate=True)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return found


def untouched(notebook: NotebookNode, release: Path) -> bool:
    """Whether all code of a notebook is as it was handed out, but for an answered test."""
    if not release.is_file():
        return False
    handed_out = {cell.source for cell in nbformat.read(release, as_version=4).cells}
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return all(source in handed_out or only_shows(source) for source in code)


def only_shows(source: str) -> bool:
    """Whether a cell is nothing but calls such as quiz("02") or md.launch(f, ranks=4).

    >>> only_shows('quiz("02")'), only_shows('x = md.launch(f, ranks=2)')
    (True, False)
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    called = [each.value.func for each in body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    names = {getattr(function, "id", getattr(function, "attr", "")) for function in called}
    return len(called) == len(body) and names <= SHOWING


def outputs_of(outcome: Outcome) -> list[NotebookNode]:
    """What stands below a judged cell: the report, and the points, which nbgrader reads."""
    return [
        NotebookNode(output_type="stream", name="stdout", text=outcome.text.rstrip("\n") + "\n"),
        NotebookNode(
            output_type="execute_result",
            execution_count=None,
            metadata={},
            data=NotebookNode({"text/plain": f"{outcome.points:g}"}),
        ),
    ]


def error_output(name: str, what: str) -> NotebookNode:
    return NotebookNode(output_type="error", ename=name, evalue=what, traceback=[f"{name}: {what}"])


def size_of(output: NotebookNode) -> int:
    return len(str(output))
