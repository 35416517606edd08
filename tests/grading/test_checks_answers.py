"""Answers to the exercises: right ones earn everything, empty ones nothing, each mistake costs its own criterion."""

import ast
import pickle
import random
import re
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

import grading
import minidist as md
from grading.check import CheckFailed, exercises, find, judge
from grading.exercise import Case, Exercise, Finding
from grading.mutants import Mutant, mutants
from grading.pack import pack
from grading.ranks.host import RankHost
from grading.report import Report

ROOT = Path(grading.__file__).parent
SOURCES = {
    "02": "ps02_collectives",
    "03": "ps03_data_parallelism",
    "04": "ps04_zero",
    "05": "ps05_tensor_parallelism",
    "06": "ps06_pipeline_parallelism",
}
IDS = [
    f"{number}.{i}"
    for number, most in (("02", 4), ("03", 4), ("04", 4), ("05", 5), ("06", 5))
    for i in range(1, most + 1)
]


@pytest.fixture(scope="module")
def host():
    with RankHost() as one:
        yield one


@cache
def solutions() -> dict[str, Any]:
    """The functions that the assignments' sources define, with the solutions that a release takes out."""
    found: dict[str, Any] = {}
    for name in SOURCES.values():
        cells = re.split(r"^# %%.*$", (ROOT / "src" / f"{name}.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
        space = {"torch": torch, "F": F, "md": md, "Action": md.schedule.Action, "__name__": "__main__"}
        exec("\n".join(cell for cell in cells if "### BEGIN SOLUTION" in cell), space)
        found |= space
    return found


def judged(host: RankHost, exercise: str, function: Any, seed: int | None = None) -> Report:
    return judge(exercise, {find(exercise).function: pack(function)}, host, seed)


def test_there_are_these_exercises():
    assert sorted(exercises()) == IDS
    with pytest.raises(ValueError, match=r"no exercise '02.9': they are 02.1"):
        find("02.9")


@pytest.mark.parametrize("exercise", IDS)
def test_the_reference_earns_everything(host: RankHost, exercise: str):
    report = judged(host, exercise, solutions()[find(exercise).function])
    assert report.passed, report.text()
    assert report.points == report.most == find(exercise).points


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("exercise", IDS)
def test_the_reference_earns_everything_with_many_seeds(host: RankHost, exercise: str, seed: int):
    assert judged(host, exercise, solutions()[find(exercise).function], seed).passed


@pytest.mark.parametrize("exercise", IDS)
def test_empty_answers_earn_nothing(host: RankHost, exercise: str):
    def returns_none(*args):
        return None

    def returns_x(comm, x, *args):
        return x

    def release(*args):
        raise NotImplementedError

    for function in (returns_none, returns_x, release):
        report = judged(host, exercise, function)
        assert report.points == 0, (function, report.text())
        assert report.results[0].text
    assert report.results[0].mistake == "not-written"
    assert judge(exercise, {}, host).points == 0


def loses_its_own(host: RankHost, mutant: Mutant) -> None:
    report = judged(host, mutant.exercise, mutant.function)
    assert report.lost() == mutant.loses([each.name for each in report.results]), report.text()
    result = report.result(mutant.criterion)
    assert result.mistake == mutant.mistake, report.text()
    assert len(result.text.splitlines()) > 1


@pytest.mark.parametrize("mutant", [m for m in mutants("ps02") if m.exercise == "02.3"], ids=lambda m: m.name)
def test_a_mutant_loses_its_own_criterion(host: RankHost, mutant: Mutant):
    loses_its_own(host, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in mutants() if m.exercise != "02.3"], ids=lambda m: m.name)
def test_every_mutant_loses_its_own_criterion(host: RankHost, mutant: Mutant):
    loses_its_own(host, mutant)


@pytest.mark.parametrize("exercise", IDS)
def test_every_criterion_has_three_mutants(exercise: str):
    for criterion in find(exercise).criteria:
        found = [m for m in mutants() if (m.exercise, m.criterion) == (exercise, criterion.name)]
        assert len(found) >= 3, criterion.name
    assert {m.criterion for m in mutants() if m.exercise == exercise} <= {c.name for c in find(exercise).criteria}


def test_every_mistake_is_in_the_catalogue():
    catalogue = {entry["id"] for entry in yaml.safe_load((ROOT / "misconceptions.yaml").read_text(encoding="utf-8"))}
    assert {m.mistake for m in mutants()} <= catalogue
    named = set()
    for path in [*ROOT.glob("checks/*.py"), *ROOT.glob("ranks/*.py"), ROOT / "check.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"^[a-z]+(?:-[a-z]+)+$", node.value))
    assert len(named & catalogue) > 50
    assert named - catalogue <= {"utf-8", "process-ended", "rest-to"}


# ---- what a report says ----------------------------------------------------------------------------------------------


def test_a_failing_check_reads_like_this(host: RankHost):
    cuts = next(m for m in mutants("ps02") if m.mistake == "tensor-split")
    text = judged(host, "02.3", cuts.function).text()
    assert "02.3 reduce_scatter: 8 of 10 points" in text
    assert "  any N                    failed   0 of 2" in text
    assert re.search(r"02\.3 any N: failed\.  n = 3, N = 7, rank 1\n  expected  \[\d+\., \d+\., \d+\.\] +got  \[", text)
    assert "That is how torch.tensor_split cuts" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_wrong_earlier_part_does_not_cost_twice(host: RankHost):
    space = {"torch": torch, "__name__": "__main__"}
    source = (
        "def all_gather(comm, x):\n    raise RuntimeError('broken')\n"
        "def reduce_scatter(comm, x):\n    return x\n"
        "def all_reduce(comm, x):\n"
        "    full = torch.cat([x, x.new_zeros(-len(x) % comm.size)])\n"
        "    return all_gather(comm, reduce_scatter(comm, full))[: len(x)]\n"
    )
    exec(source, space)
    assert judged(host, "02.4", space["all_reduce"]).passed
    assert judged(host, "02.2", space["all_gather"]).points == 0


def test_a_stored_answer_is_wrong_the_next_time(host: RankHost):
    answers = {}

    def stored(comm, x):
        return answers.get((comm.rank, comm.size), x)

    for case in find("02.2").draw(random.Random(5))["basic"]:
        for rank, right in enumerate(case.facts[0]):
            answers[rank, case.ranks] = right
    assert judged(host, "02.2", stored, seed=5).result("basic").state == "failed"  # right, and no message brought it
    assert judged(host, "02.2", stored, seed=5).result("basic").mistake == "not-by-messages"
    assert judged(host, "02.2", stored).result("basic").mistake == "sends-nothing"


def test_numbers_that_came_another_way_are_seen(host: RankHost, tmp_path: Path):
    def by_files(comm, x):
        (tmp_path / f"{comm.size} {comm.rank} {len(x)}").write_text(str(x.tolist()))
        return x

    def by_names_of_folders(comm, x):
        """Beside messages that carry nothing."""
        (tmp_path / f"{comm.size} {len(x)} {comm.rank} {' '.join(map(str, x.tolist()))}").mkdir(exist_ok=True)
        for _ in range(comm.size - 1):
            received = comm.irecv(x[:0].clone(), (comm.rank - 1) % comm.size)
            comm.isend(x[:0].clone(), (comm.rank + 1) % comm.size).wait()
            received.wait()
        time.sleep(0.5)
        found = sorted(tmp_path.glob(f"{comm.size} {len(x)} *"), key=lambda path: int(path.name.split()[2]))
        return torch.tensor([float(word) for path in found for word in path.name.split()[3:]])

    assert "File too large" in judged(host, "02.2", by_files).text()
    report = judged(host, "02.2", by_names_of_folders)
    assert report.points == 0
    assert report.results[0].mistake == "not-by-messages"


def test_results_that_were_forged_or_make_no_sense_earn_nothing(host: RankHost):
    def transport():
        frame = sys._getframe(1)
        while "transport" not in frame.f_locals or "job" not in frame.f_locals:
            frame = frame.f_back
        return frame.f_locals["transport"], frame.f_locals["job"]

    def no_steps(*args):
        """All is asked for as if a backward pass ran, and a list without a step returned."""
        through, job = transport()
        for call in job["calls"]:
            if call is not None:  # else this rank is left out
                group = md.Comm(through, tuple(range(call[0])), job["rank"])
                group.all_reduce(torch.zeros(14), async_op=True)
                for name in reversed(call[1]["order"]):
                    through.ask(f"0 {name}")
                through.line.say({"op": "returned", "value": []})
            through.line.hear()

    def five(*args):
        for _ in range(9):
            transport()[0].line.say({"op": "returned", "value": 5})
            transport()[0].line.hear()

    def by_another_name(comm, x):
        through, _ = transport()
        with through.given("reduce_scatter"):
            return comm.all_reduce(x.clone())

    def nonsense(name):
        def say(comm, x):
            transport()[0].line.say(
                {"op": "collective", "id": 9, "name": name, "args": {"op": ["a"]}, "x": x, "at": ("", 0, "")}
            )
            time.sleep(1)

        return say

    for exercise, function in (
        ("03.3", no_steps),
        ("02.4", by_another_name),
        ("02.2", nonsense(["x"])),
        ("02.2", nonsense("all_reduce")),
        ("03.4", five),
        ("03.4", lambda *args: None),
    ):
        assert judged(host, exercise, function).points == 0, exercise


def test_who_sends_nothing_is_told_so(host: RankHost):
    report = judged(host, "02.3", lambda comm, x: x[md.partition(len(x), comm.size)[comm.rank]].clone())
    assert report.points == 0
    assert report.results[0].mistake == "sends-nothing"
    assert [row.split()[-4] for row in report.text().splitlines()[2:7]] == ["waits"] * 5


def test_where_no_ranks_can_be_started_everything_is_blocked():
    report = judged(RankHost(["no-such-command"]), "02.1", solutions()["shift"])
    assert [result.state for result in report.results] == ["blocked"] * 3
    assert report.points == 0
    assert not report.passed
    assert "cannot start no-such-command" in report.text()


def test_variants(host: RankHost):
    from grading.checks.ps02 import VARIANTS

    def left(comm, x):
        rank, n = comm.rank, comm.size
        pieces = [x.clone()[part] for part in md.partition(len(x), n)]
        for step in range(1, n):
            own = pieces[(rank + step + 1) % n]
            received = torch.empty_like(own)
            receiving = comm.irecv(received, (rank + 1) % n)
            comm.isend(pieces[(rank + step) % n], (rank - 1) % n).wait()
            own += receiving.wait()
        return pieces[rank].clone()

    def owns_next(comm, x):
        rank, n = comm.rank, comm.size
        pieces = [x.clone()[part] for part in md.partition(len(x), n)]
        for step in range(1, n):
            own = pieces[(rank - step) % n]
            received = torch.empty_like(own)
            receiving = comm.irecv(received, (rank - 1) % n)
            comm.isend(pieces[(rank - step + 1) % n], (rank + 1) % n).wait()
            own += receiving.wait()
        return pieces[(rank + 1) % n].clone()

    def points(variant: str, function: Any) -> tuple[int, int]:
        report = judge(VARIANTS[variant], {"reduce_scatter": pack(function)}, host)
        return report.points, report.most

    assert points("02.3-left", left) == (11, 11)
    assert points("02.3-left", solutions()["reduce_scatter"]) == (10, 11)
    assert points("02.3-next", owns_next) == (10, 10)
    assert points("02.3-next", solutions()["reduce_scatter"])[0] == 0


def test_variants_of_zero(host: RankHost):
    from grading.checks.ps04 import VARIANTS

    def nesterov(comm, weight, grad, momentum, lr, mu):
        mine = weight[md.partition(len(weight), comm.size)[comm.rank]]
        mean = comm.reduce_scatter(grad, op="mean")
        momentum *= mu
        momentum += mean
        weight.copy_(comm.all_gather(mine - lr * (mean + mu * momentum)))

    def keeps_the_last(comm, layers, shards, x, loss_gradient):
        inputs, grads = [x], []
        for layer, shard in zip(layers, shards, strict=True):
            weight = comm.all_gather(shard)
            inputs.append(layer.forward(weight, inputs[-1]))
        grad = loss_gradient(inputs.pop())
        for layer, shard in zip(reversed(layers), reversed(shards), strict=True):
            weight = comm.all_gather(shard) if grads else weight
            grad, of_weight = layer.backward(weight, inputs.pop(), grad)
            grads.append(comm.reduce_scatter(of_weight, op="mean"))
            del of_weight
        return grads[::-1]

    def points(variant: str, function: Any) -> tuple[int, int]:
        exercise = VARIANTS[variant]
        report = judge(exercise, {exercise.function: pack(function)}, host)
        return report.points, report.most

    assert points("04.1-nesterov", nesterov) == (9, 9)
    assert points("04.1-nesterov", solutions()["stage1_step"]) == (0, 9)
    assert points("04.3-last", keeps_the_last) == (11, 11)
    assert points("04.3-last", solutions()["stage3_gradients"]) == (10, 11)


def test_variants_of_tensor_parallelism(host: RankHost):
    from grading.checks.ps05 import VARIANTS

    reference = solutions()

    def everyone_sees(comm, x, qkv, out, heads):
        if heads % comm.size:
            raise ValueError(f"{heads} heads, {comm.size} ranks")
        size, own = x.shape[-1] // heads, md.partition(heads, comm.size)[comm.rank]
        mine = slice(own.start * size, own.stop * size)
        parts = column(comm, x, torch.cat([third[mine] for third in qkv.chunk(3)])).chunk(3, dim=-1)  # noqa: F821
        y = F.scaled_dot_product_attention(*(part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts))
        return row(comm, y.transpose(1, 2).flatten(2), out[:, mine])  # noqa: F821

    def adds_up(comm, logits, targets, vocab):
        return vocab_loss(comm, logits, targets, vocab) * (targets != -100).sum()

    vocab_loss = reference["vocab_loss"]

    def points(variant: str, function: Any) -> tuple[int, int]:
        exercise = VARIANTS[variant]
        report = judge(exercise, {exercise.function: pack(function)}, host)
        return report.points, report.most

    assert points("05.3-all", everyone_sees) == (8, 8)
    assert points("05.3-all", reference["attention"]) == (0, 8)
    assert points("05.4-sum", adds_up) == (11, 11)
    assert points("05.4-sum", reference["vocab_loss"]) == (0, 11)


def test_oracles_of_norms_and_losses(host: RankHost):
    """Cases worked out by hand: what the checks take to be right."""
    from grading.checks import linear, norm, vocab

    three, four, twelve = (torch.tensor([x]) for x in (3.0, 4.0, 12.0))
    assert norm.right([[three], [four]], []) == 5
    assert norm.right([[three], [four]], [twelve]) == 13
    weight = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "bias": torch.tensor([10.0, 20.0])}
    assert linear._linear(torch.ones(2), **weight).tolist() == [13, 27]
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)
    assert vocab.loss(logits, torch.tensor([4])).item() == pytest.approx(1.419416, abs=1e-6)
    large = torch.arange(1000.0, 1005.0, dtype=torch.float64)[None]
    assert vocab.loss(large, torch.tensor([4])).item() == pytest.approx(0.4519, abs=1e-4)
    assert vocab.loss(logits, torch.tensor([-100])).item() == 0


def test_other_right_answers_earn_everything(host: RankHost):
    def prefetches(comm, layers, shards, x, loss_gradient):
        """The next weight is on its way while a layer is computed, and so is the last gradient."""
        sizes = [comm.lengths(len(shard)) for shard in shards]

        def begin(i):
            return comm.all_gather(shards[i], sizes[i], async_op=True) if 0 <= i < len(shards) else None

        inputs, grads, leaving, handle = [x], [], None, begin(0)
        for i, layer in enumerate(layers):
            weight, handle = handle.wait(), begin(i + 1)
            inputs.append(layer.forward(weight, inputs[-1]))
        grad, handle = loss_gradient(inputs.pop()), begin(len(layers) - 1)
        for i in reversed(range(len(layers))):
            weight, handle = handle.wait(), begin(i - 1)
            grad, of_weight = layers[i].backward(weight, inputs.pop(), grad)
            grads += [leaving.wait()] if leaving else []
            leaving = comm.reduce_scatter(of_weight, op="mean", async_op=True)
            del of_weight
        return [leaving.wait(), *grads[::-1]]

    def empties_storages(comm, layers, shards, x, loss_gradient):
        """Names stay, memory goes."""
        inputs, grads, weights = [x], [], []
        for layer, shard in zip(layers, shards, strict=True):
            weights.append(comm.all_gather(shard))
            inputs.append(layer.forward(weights[-1], inputs[-1]))
            weights[-1].untyped_storage().resize_(0)
        grad = loss_gradient(inputs.pop())
        for layer, shard in zip(reversed(layers), reversed(shards), strict=True):
            weights.append(comm.all_gather(shard))
            grad, of_weight = layer.backward(weights[-1], inputs.pop(), grad)
            grads.insert(0, comm.reduce_scatter(of_weight, op="mean"))
            for full in (weights[-1], of_weight):
                full.untyped_storage().resize_(0)
        return grads

    def waits_a_layer_later(module, comm, shards):
        """As in a backward pass that overlaps: one reduce-scatter is under way."""
        parameters = list(module.parameters())
        waiting, under_way = list(range(len(parameters))), []

        def take():
            i, handle = under_way.pop()
            shards[i] += handle.wait()

        def send():
            i = waiting.pop()
            grad = torch.zeros_like(parameters[i]) if parameters[i].grad is None else parameters[i].grad
            parameters[i].grad = None
            if under_way:
                take()
            under_way.append((i, comm.reduce_scatter(grad.flatten(), op="mean", async_op=True)))

        def hook(parameter):
            while parameter.grad is not None:
                send()

        def finish():
            while waiting:
                send()
            take()
            waiting.extend(range(len(parameters)))

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)
        return finish

    def one_function(comm, x, weight, bias=None):
        class Column(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias):
                ctx.save_for_backward(x, weight)
                return F.linear(x, weight, bias)

            @staticmethod
            def backward(ctx, grad):
                x, weight = ctx.saved_tensors
                rows = grad.flatten(0, -2)
                return comm.all_reduce(grad @ weight), rows.T @ x.flatten(0, -2), rows.sum(0)

        return Column.apply(x, weight, bias)

    def by_hand(comm, logits, targets, vocab):
        """A softmax that is its own backward, one message for two sums."""

        class Loss(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits):
                part = md.partition(vocab, comm.size)[comm.rank]
                most = comm.all_reduce(logits.amax(-1), op="max")
                exps = (logits - most[:, None]).exp()
                hot = (targets[:, None] == torch.arange(part.start, part.stop)).to(logits.dtype)
                both = comm.all_reduce(torch.stack([exps.sum(-1), (hot * (logits - most[:, None])).sum(-1)]))
                valid = targets != -100
                count = valid.sum().clamp(min=1)
                ctx.save_for_backward((exps / both[0, :, None] - hot) * valid[:, None] / count)
                return ((both[0].log() - both[1]) * valid).sum() / count

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0]

        return Loss.apply(logits)

    for exercise, function in (
        ("04.3", prefetches),
        ("04.3", empties_storages),
        ("04.2", waits_a_layer_later),
        ("05.1", one_function),
        ("05.4", by_hand),
    ):
        report = judged(host, exercise, function)
        assert report.passed, (function, report.text())


def test_ranks_need_not_import_a_check():
    """In a sandbox they cannot."""
    ours = [each for name in IDS for each in (find(name).body, *find(name).given.values())]
    packed = [sys.modules["grading.check"]._by_value(each) for each in ours]
    code = (
        "import pickle, sys, torch, minidist\n"
        "sys.modules['grading.checks'] = None\n"
        "for each in pickle.load(sys.stdin.buffer): pickle.loads(each)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(packed), capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()


def test_what_a_check_defines_is_not_shown_as_the_learners_lines(host: RankHost):
    shard = next(m for m in mutants("ps04") if m.mistake == "shard-for-whole")
    text = judged(host, "04.3", shard.function).text()
    assert "line" in text
    assert "of computes_with_the_shard" in text
    assert "Layer." not in text


# ---- exercises as data -----------------------------------------------------------------------------------------------


def test_an_exercise_that_cannot_be_is_refused():
    shift = find("02.1")
    with pytest.raises(ValueError, match="the first criterion is the basic one"):
        Exercise("x", "f", "", shift.criteria[1:], shift.draw, shift.body)
    with pytest.raises(ValueError, match="two criteria have one name"):
        Exercise("x", "f", "", (*shift.criteria, shift.criteria[1]), shift.draw, shift.body)
    with pytest.raises(ValueError, match="as many facts"):
        Case((({},),), (), ())
    assert shift.cell == "check-02-1"


def test_a_finding_wraps_its_prose():
    text = Finding("word " * 60, "wrong-values", expected="1" * 60, got="2" * 60).text()
    assert max(map(len, text.splitlines())) <= 100


# ---- in a notebook ---------------------------------------------------------------------------------------------------


def test_check_and_hint_in_a_notebook(host: RankHost, desk: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    module = sys.modules["grading.check"]
    space: dict[str, Any] = {}
    monkeypatch.setattr(module, "_host", lambda: host)
    monkeypatch.setattr(module, "_namespace", lambda: space)
    with pytest.raises(CheckFailed, match="run the cell that defines shift first"):
        grading.check("02.1")
    space["shift"] = solutions()["shift"]
    assert grading.check("02.1") is None
    assert "4 of 4 points" in capsys.readouterr().out
    space["shift"] = lambda comm, x: x
    with pytest.raises(CheckFailed, match=r"02.1: 0 of 4 points") as caught:
        grading.check("02.1")
    assert caught.value._render_traceback_() == ["CheckFailed: 02.1: 0 of 4 points; the report is above"]
    assert [entry["passed"] for entry in desk.entries("checked")] == [True, False]
    lock = threading.Lock()
    space["shift"] = lambda comm, x: lock
    with pytest.raises(CheckFailed, match="cannot be sent to ranks"):
        grading.check("02.1")
    capsys.readouterr()
    said = []
    for name in ("02.1", "2.1", "02.1", 2.1, "02.1"):
        grading.hint(name)
        desk.restart()  # the ladder goes on in the next kernel
        said.append(capsys.readouterr().out)
    assert [text.splitlines()[0] for text in said[:4]] == [
        "02.1, hint 1 of 4: a question",
        "02.1, hint 2 of 4: a picture",
        "02.1, hint 3 of 4: the invariant",
        "02.1, hint 4 of 4: the first line",
    ]
    assert said[4] == said[0]
    with pytest.raises(ValueError, match="there is no exercise '7"):
        grading.hint("7.1")


def test_a_check_that_takes_long_says_what_it_waits_for_and_takes_it_back(
    host: RankHost, desk: Any, monkeypatch: pytest.MonkeyPatch
):
    module = sys.modules["grading.check"]
    lines: list[str] = []
    line = SimpleNamespace(update=lambda data, raw: lines.append(data["text/plain"]))
    monkeypatch.setattr(module, "shell", lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setattr("IPython.display.display", lambda data, **_: lines.append(data["text/plain"]) or line)
    monkeypatch.setattr(module, "_host", lambda: host)
    monkeypatch.setattr(module, "_namespace", lambda: {"shift": lambda comm, x: time.sleep(3) or x})
    with pytest.raises(CheckFailed):
        grading.check("02.1")
    assert re.fullmatch(r"02\.1: ranks? [\d, ]+ ha\w+ not returned after 2 s; after 12 s the run is ended.*", lines[0])
    assert lines[-1] == ""


@pytest.mark.parametrize("exercise", IDS)
def test_every_exercise_has_a_ladder_of_hints(exercise: str):
    rungs = sys.modules["grading.check"]._hints(exercise)
    assert list(rungs) == ["a question", "a picture", "the invariant", "the first line"]
    source = (ROOT / "src" / f"{SOURCES[exercise[:2]]}.py").read_text(encoding="utf-8")
    assert rungs["the first line"] in source


def test_the_sources_say_the_points_and_check_every_exercise():
    for number, name in SOURCES.items():
        source = (ROOT / "src" / f"{name}.py").read_text(encoding="utf-8")
        for exercise in [find(each) for each in IDS if each.startswith(number)]:
            assert re.search(rf"^# ## {exercise.id} .*\({exercise.points} points\)$", source, flags=re.MULTILINE)
            assert f'\ncheck("{exercise.id}")\n' in source
            assert f"def {exercise.function}(" in source
        cells = re.split(r"^# %%.*$", source, flags=re.MULTILINE)
        asked = sum(each.startswith(number) for each in IDS)
        assert sum("### BEGIN SOLUTION" in cell for cell in cells) == asked
        assert source.count("### BEGIN SOLUTION") == source.count("### END SOLUTION")
