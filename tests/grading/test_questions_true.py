"""What the questions say happens, run: the answers of traces and numbers against the package that they are about."""

import pytest
import torch

import minidist as md
from grading.bank import Bank
from grading.draw import drawn
from grading.fill import Filled, all_draws
from grading.verdict import entries
from minidist.plan import cost
from minidist.plan.step import buckets

BANK = Bank.load()


def every_draw(question_id):
    """Each draw of a question: its values, and what it takes to be right (a number, or the texts of the rows)."""
    question = BANK.question(question_id)
    for draw in all_draws(question):
        filled = Filled(question, draw)
        if question.kind == "number":
            yield filled.names, entries(filled)[0].value
        else:
            shown = drawn(filled, 0)
            yield filled.names, [shown.text(entry.value) for entry in entries(filled)]


# ---- collectives -----------------------------------------------------------------------------------------------------


def holdings(world):
    """What this rank holds at the moments that the questions of module 02 ask about, as the marks 1, 10, 100, 1000."""
    rank = world.rank
    pieces = list(torch.full((4,), 10**rank).split(1))
    sums = []

    class Watched:
        size, device = world.size, world.device
        irecv = world.irecv

        def __init__(self):
            self.rank = rank

        def isend(self, x, dst):
            sums.append([int(piece) for piece in pieces])  # as they are before each step
            return world.isend(x, dst)

    md.algorithms.reduce_around(pieces, Watched())
    sums.append([int(piece) for piece in pieces])
    names = torch.tensor([10 * slice_ + rank for slice_ in range(4)])  # slice C of rank 3 is 23
    once = world.all_to_all(names)
    x = torch.tensor(10**rank)
    reduced = [world.reduce(x.clone(), dst=dst).item() for dst in (1, 2)]
    return sums, once.tolist(), world.all_to_all(once).tolist(), reduced


@pytest.fixture(scope="module")
def held():
    return md.launch(holdings, ranks=4)


def whose(total):
    """The ranks in a sum of marks.

    >>> whose(1011)
    {0, 1, 3}
    """
    return {rank for rank, digit in enumerate(reversed(str(total))) if digit == "1"}


def test_first_half_of_the_ring(held):
    for names, rows in every_draw("ring-first-half"):
        rank = names["rank"]
        steps = held[rank][0]
        asked = [(1, rank - 2), (2, rank - 3), (3, rank), (3, rank - 1)]
        for (step, piece), said in zip(asked, rows, strict=True):
            ranks = whose(steps[step][piece % 4])
            told = {int(word) for word in said.replace(",", "").split() if word.isdigit()}
            assert ranks == (set(range(4)) if "all four" in said else told)


def test_transposition(held):
    for names, rows in every_draw("transposition"):
        _, once, twice, _ = held[names["rank"]]
        name = lambda number: "ABCD"[number // 10] + str(number % 10)
        assert rows == [name(once[0]), name(once[1]), name(once[3]), name(twice[3])]


def test_who_holds_the_sum(held):
    for names, rows in every_draw("who-holds-the-sum"):
        dst = names["dst"]
        after = [held[rank][3][dst - 1] for rank in range(4)]
        assert rows == [str(after[dst]), str(after[0]), str(after[3]), str(after[dst])]


def test_slices_of_the_sum():
    def run(world):
        x = torch.tensor([1, 2, 3]) * 10**world.rank
        piece = world.reduce_scatter(x)
        return piece.tolist(), world.all_gather(piece).tolist()

    results = md.launch(run, ranks=3)
    for names, rows in every_draw("slices-of-the-sum"):
        expected = [results[0][0], results[2][0], results[1][1]]
        assert rows == [str([names["k"] * number for number in numbers]) for numbers in expected]


def test_ranks_in_groups():
    def run(world):
        group = world.subgroups([[0, 2, 4], [1, 3, 5]], name="side")
        return [(group.rank, group.all_reduce(torch.tensor(base + world.rank)).item()) for base in (1, 10, 20)]

    results = md.launch(run, ranks=6)
    for i, (_, rows) in enumerate(every_draw("ranks-in-groups")):
        assert rows == [str(number) for rank in (4, 3) for number in results[rank][i]]


def test_a_skipped_call_pairs_with_the_next_one():
    def run(world):
        for batch in range(4):
            x = torch.tensor(10.0**batch)
            if not (batch == 1 and world.rank == 2):
                world.all_reduce(x)
                if batch == 2 and world.rank == 2:
                    raise ValueError(f"rank 2's sum is {x.item():g}")

    with pytest.raises(md.LaunchError, match="rank 2's sum is 130"):  # its 100 and the others' 10, without an error
        md.launch(run, ranks=4)


# ---- what communication costs ----------------------------------------------------------------------------------------


def test_costs():
    for names, ms in every_draw("price-of-a-ring"):
        link = md.Link(names["alpha_s"], names["gbit"] / 8 * 1e9)
        assert ms == pytest.approx(1e3 * cost.seconds("all_reduce", int(names["size"]), names["ranks"], link), rel=1e-6)
    for names, ms in every_draw("between-machines"):
        far = md.Link(0, names["gb_per_s"] * 1e9)
        size = int(names["size_gb"] * 1e9)
        assert ms == pytest.approx(1e3 * cost.hierarchical_seconds(size, names["machines"], 8, md.Link(), far))
    for names, gb in every_draw("gather-the-weights"):
        assert gb == cost.bytes_sent("all_gather", int(names["size_gb"] * 1e9), names["ranks"]) / 1e9
    for names, gb_per_s in every_draw("bus-bandwidth"):
        assert gb_per_s == pytest.approx(float(cost.bus_factor("all_reduce", names["ranks"])) * names["algorithm"])
    for names, ratio in every_draw("one-number"):
        link = md.Link(1e-5, 1e30)
        ring, tree = (cost.seconds("all_reduce", 1, names["ranks"], link, by) for by in ("ring", "tree"))
        assert ratio == pytest.approx(ring / tree)


def test_the_crossover_is_where_both_take_as_long():
    for names, size in every_draw("crossover-here"):
        link = md.Link(names["alpha_s"], names["rate"])
        ring, tree = (cost.seconds("all_reduce", round(size), 8, link, by) for by in ("ring", "tree"))
        assert ring == pytest.approx(tree, rel=1e-4)


# ---- data parallelism ------------------------------------------------------------------------------------------------


def test_parts():
    for names, count in every_draw("last-part"):
        last = md.partition(names["length"], names["ranks"])[-1]
        assert count == last.stop - last.start


def test_buckets_and_overlap():
    places = ["the first", "the second", "the third", "the fourth"]
    for names, rows in every_draw("filling-buckets"):
        sizes = [names["mb"], names["mb"], names["mb"], names["large"], names["mb"]]
        filled = buckets(sizes, names["limit"])
        assert rows == [places[next(i for i, b in enumerate(filled) if layer in b)] for layer in reversed(range(5))]
    for names, ms in every_draw("length-with-overlap"):
        layers, average = names["layers"], float(names["average_ms"]).__mul__  # a bucket of 1, one for each layer
        step = md.data_parallel_step([0] * layers, [names["backward_ms"]] * layers, [1] * layers, average, 1)
        assert ms == step.makespan


def after_training(make, when, steps=4, ranks=3):
    """Weights of replicas that average gradients before, or weights after, every optimizer step."""
    torch.manual_seed(0)
    data = torch.randn(steps, ranks, 5, dtype=torch.float64)
    models = [torch.ones(5, dtype=torch.float64, requires_grad=True) for _ in range(ranks)]
    optimizers = [make([model]) for model in models]
    for step in range(steps):
        for model, x in zip(models, data[step], strict=True):
            model.grad = torch.autograd.grad((model * x).sum().sin(), model)[0]
        if when == "before":
            mean = torch.stack([model.grad for model in models]).mean(0)
            for model in models:
                model.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if when == "after":
            mean = torch.stack([model.detach() for model in models]).mean(0)
            for model in models:
                model.data.copy_(mean)
    return models[0].detach()


def test_averaging_weights_is_the_same_for_sgd_with_momentum_but_not_for_adamw():
    sgd = lambda parameters: md.SGD(parameters, lr=0.3, momentum=0.9)
    adamw = lambda parameters: md.AdamW(parameters, lr=0.3)
    assert torch.allclose(after_training(sgd, "before"), after_training(sgd, "after"), rtol=1e-12)
    assert not torch.allclose(after_training(adamw, "before"), after_training(adamw, "after"), rtol=1e-3)


def test_predictions_name_the_models_of_their_lessons():
    count = sum(p.numel() for p in md.GPT(md.GPTConfig(layers=2, dim=64, heads=4)).parameters())
    assert BANK.question("ring-bytes-here").params["parameters"] == (count,)
    deep = md.GPT(md.GPTConfig(layers=8, dim=64, heads=4, seq=32))
    params = BANK.question("overlap-step-here").params
    assert params["last_bytes"] == (deep.embed.weight.nbytes,)
    assert params["layer_bytes"] == (sum(p.nbytes for p in deep.blocks[0].parameters()),)


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


def test_prefetched_forward_passes_are_as_long_as_predicted():
    for names, answer in every_draw("one-layer-ahead"):
        layers, forward, gather = names["layers"], names["forward_ms"], names["gather_ms"]
        step = md.sharded_step(
            [forward] * layers, [0] * layers, [1] * layers, lambda _, gather=gather: gather, lambda _: 0
        )
        forwards = [span.end for span in step.lane(0, "compute") if str(span.action).startswith("forward")]
        assert answer == max(forwards), names


def test_bytes_sent_in_stage_3_are_those_of_the_package():
    for names, answer in every_draw("gigabytes-in-stage-3"):
        assert answer == pytest.approx(2 * md.zero_traffic(names["params_b"], names["ranks"], 3)), names
    for names, answer in every_draw("link-for-stage-3"):
        sent = 2 * md.zero_traffic(names["params_b"], names["ranks"], 3)
        assert answer == pytest.approx(sent / names["compute_s"]), names
    for names, answer in every_draw("stage-3-traffic-here"):
        assert answer == md.zero_traffic(1, names["ranks"], 3)


def test_most_parameters_of_stage_3_are_two_layers_beside_the_slices():
    """The question's model in small: a layer of 400 numbers in place of 400 MB."""
    for names, answer in every_draw("most-parameters-at-once"):
        if names["ranks"] > 8:
            continue
        most = md.launch(_most_parameters, ranks=names["ranks"], args=(names["layers"], names["layer_mb"]))
        assert max(most) == answer, names


def _most_parameters(world, layers, size):
    model = torch.nn.Sequential(*(_Layer(size) for _ in range(layers)))
    z, held = md.Zero(model, world, 3), []
    for layer in model:
        layer.inside.register_forward_hook(lambda *_: held.append(z.memory()["params"]))
    z(torch.ones(1)).sum().backward()
    return max(held) / 4


class _Layer(torch.nn.Module):
    """`size` parameters that the input is multiplied by; `inside` is called while the layer computes."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.inside = torch.nn.Parameter(torch.ones(size)), torch.nn.Identity()

    def forward(self, x):
        return self.inside(x * self.weight).mean()[None]


def test_a_bfloat16_weight_forgets_the_steps_that_the_questions_name():
    question = BANK.question("small-step-large-weight")
    for names in (Filled(question, draw).names for draw in all_draws(question)):
        weight, step = names["weight"], names["gap"] / 5
        narrow, wide = torch.tensor([float(weight)], dtype=torch.bfloat16), torch.tensor([float(weight)])
        following = torch.tensor([float(weight)], dtype=torch.bfloat16) + names["gap"]
        assert following.item() == weight + names["gap"]  # the next number there is
        for _ in range(100):
            narrow += step
            wide += step
        assert narrow.item() == weight
        assert wide.item() == pytest.approx(weight + 20 * names["gap"], rel=1e-3)


# ---- pipelines -------------------------------------------------------------------------------------------------------

schedule = md.schedule


def right_options(question_id):
    """Each draw of a choice or several: its values, and the texts of the right options."""
    question = BANK.question(question_id)
    for filled in (Filled(question, draw) for draw in all_draws(question)):
        yield filled.names, [entry.part.text for entry in entries(filled) if entry.part.right]


def test_steps_of_pipelines_are_as_long_as_simulated():
    for names, ms in every_draw("step-of-a-pipeline-here"):
        forward, half = names["forward_ms"], names["backward_ms"] / 2
        for name in ("gpipe", "1f1b"):
            program = schedule.build(name, names["ranks"], names["micro_batches"])
            assert ms == schedule.simulate(program, forward, half, half).makespan
    for names, ms in every_draw("interleaved-step-here"):
        forward, half = names["forward_ms"], names["backward_ms"] / 2
        program = schedule.build("interleaved", names["ranks"], names["micro_batches"], names["stages"])
        assert ms == schedule.simulate(program, forward, half, half).makespan
        whole = schedule.simulate(
            schedule.build("gpipe", names["ranks"], names["micro_batches"]), 2 * forward, 2 * half, 2 * half
        )
        assert whole.makespan == names["work_ms"] + names["stages"] * names["idle_ms"]  # the first prediction's
    for names, ms in every_draw("step-of-zb-h1"):
        each = [names["each_ms"]] * 3
        program = schedule.build("zb_h1", names["ranks"], names["micro_batches"])
        assert ms == schedule.simulate(program, *each).makespan
        plain = schedule.simulate(schedule.build("1f1b", names["ranks"], names["micro_batches"]), *each)
        assert plain.makespan == names["work_ms"] + names["idle_ms"]
    for names, best in every_draw("best-of-five"):
        steps = {
            m: schedule.simulate(schedule.build("1f1b", names["ranks"], m), *[2 + names["batch"] / m] * 3).makespan
            for m in (4, 8, 16, 32, 64)
        }
        assert best == min(steps, key=steps.__getitem__)
        assert [names[f"t{m}"] for m in steps] == pytest.approx(list(steps.values()))


def test_idle_shares_are_those_of_the_simulator():
    for names, percent in every_draw("idle-percent"):
        program = schedule.build("1f1b", names["ranks"], names["micro_batches"])
        assert percent == pytest.approx(100 * schedule.simulate(program, 1, 0.7, 1.6).bubble)
    for names, least in every_draw("micro-batches-for-a-bubble"):
        share = lambda m, ranks=names["ranks"]: 100 * schedule.simulate(schedule.build("1f1b", ranks, m)).bubble
        assert share(round(least)) == pytest.approx(names["percent"])
        assert share(round(least) - 1) > names["percent"]
    for names, _ in right_options("what-zero-means"):
        timeline = schedule.simulate(schedule.build("zb_h2", names["ranks"], 2 * names["ranks"]))
        assert names["share"] == pytest.approx(100 * timeline.bubble)
        assert timeline.bubble_rate == pytest.approx(0)
    for names, _ in right_options("more-and-smaller"):
        shares = [schedule.simulate(schedule.build("1f1b", 4, m)).bubble for m in (8, names["batch"])]
        assert [100 * share for share in shares] == pytest.approx([27.27, names["most"]], rel=1e-3)


def test_when_actions_of_gpipe_begin():
    for names, rows in every_draw("when-it-begins"):
        timeline = schedule.simulate(schedule.build("gpipe", 3, names["micro_batches"]))
        start = {str(span.action): span.start for span in timeline.spans}
        assert rows == [f"{s:g}" for s in (start["2F3"], start["2B0"], start["0B0"], timeline.makespan)]


def test_what_ranks_hold_is_what_the_simulator_counts():
    def held(name, names, stages_per_rank=1):
        program = schedule.build(name, names["ranks"], names["micro_batches"], stages_per_rank)
        return schedule.simulate(program).peak_in_flight

    for names, rows in every_draw("held-at-once"):
        gpipe, one = held("gpipe", names), held("1f1b", names)
        assert rows == [str(most) for most in (gpipe[0], gpipe[-1], one[0], one[1], one[-1])]
    for names, gb in every_draw("gigabytes-of-1f1b"):
        assert gb == held("1f1b", names)[names["rank"]] * names["gb"]
    for names, right in right_options("schedule-that-fits"):
        ranks, m = names["ranks"], names["micro_batches"]
        options = {
            "GPipe": ("gpipe", 1),
            "1F1B": ("1f1b", 1),
            "interleaved 1F1B, two stages a rank": ("interleaved", 2),
            "ZB-H2": ("zb_h2", 1),
        }
        fitting = {}
        for text, (name, v) in options.items():
            timeline = schedule.simulate(schedule.build(name, ranks, m, v), *[1 / v] * 3)
            if max(timeline.peak_in_flight) / v <= names["room"]:
                fitting[text] = 100 * timeline.bubble
        assert right == [min(fitting, key=fitting.__getitem__)]
        assert [fitting["1F1B"], fitting[right[0]]] == pytest.approx([names["long"], names["short"]])
        assert max(held("interleaved", names, 2)) == 3 * ranks - 1
        assert max(held("zb_h2", names)) == 2 * ranks - 1
    for names, _ in right_options("twice-the-stages"):
        program = schedule.build("interleaved", names["ranks"], 2 * names["ranks"], 2)
        assert max(schedule.simulate(program).peak_in_flight) == 3 * names["ranks"] - 1


def test_messages_of_pipelines():
    for names, count in every_draw("messages-of-a-step"):
        program = schedule.build("interleaved", names["ranks"], names["micro_batches"], names["stages"])
        assert count == len(schedule.messages(program))


def test_programs_in_questions_read_as_told():
    question = BANK.question("actions-of-1f1b")
    items = [entry.part.text for entry in entries(Filled(question, {}))]
    assert [f"0{item.replace(' ', '')}" for item in items] == [str(a) for a in schedule.build("1f1b", 2, 3)[0]]
    for _, rows in every_draw("how-a-rank-begins"):
        assert rows == ["zero bubble, ZB-H1", "GPipe", "interleaved 1F1B", "1F1B"]


def program_in(question_id, **draw):
    """The program in the stem of a question."""
    question = BANK.question(question_id)
    stem = Filled(question, draw).text("stem", question.stem)
    return schedule.parse("\n".join(line.split(":")[1] for line in stem.splitlines() if line.startswith("    rank")))


def test_programs_in_questions_stop_where_the_right_options_say():
    for names, right in right_options("cannot-go-on"):
        assert right == ["rank 0 stops before 0B0, rank 1 before 1F1"]
        with pytest.raises(ValueError, match=r"cannot go on: rank 0 at 0B0 for .*; rank 1 at 1F1 for"):
            schedule.validate(program_in("cannot-go-on", more=names["more"]))
    for names, _ in right_options("a-missing-half"):
        m = names["m"]
        with pytest.raises(ValueError, match=f"micro-batch {m} at stage 1 has 1F{m}, 1I{m}: it needs"):
            schedule.validate(program_in("a-missing-half", m=m))


def test_a_missing_w_goes_unnoticed_where_nobody_looks():
    for m in (0, 1):
        rows = md.launch(_without_looking, ranks=2, args=(program_in("a-missing-half", m=m), m))
        assert rows == [True, True]


def _without_looking(world, program, missing):
    """Whether this rank's gradients are what the right option says: of both micro-batches, or on rank 1 of one."""
    from minidist.parallel import pipeline

    pipeline.validate = lambda program: None
    torch.manual_seed(0)
    stages = [torch.nn.Linear(3, 3, bias=False) for _ in range(2)]
    x, targets = torch.randn(2, 3), torch.randn(2, 3)
    loss_fn = lambda out, target: ((out - target) ** 2).sum(-1).mean()
    loss = md.PipelineParallel([stages[world.rank]], program, world, loss_fn).step(x, targets)
    found = stages[world.rank].weight.grad.clone()
    outs = torch.nn.Sequential(*stages)(x)
    losses = [loss_fn(outs[m : m + 1], targets[m : m + 1]) / 2 for m in (0, 1)]
    counted = sum(losses) if world.rank == 0 else losses[1 - missing]
    expected = torch.autograd.grad(counted, stages[world.rank].weight, retain_graph=True)[0]
    return torch.allclose(found, expected) and abs(loss - sum(losses).item()) < 1e-6


def test_which_programs_hang_with_blocking_sends():
    for names, right in right_options("which-would-hang"):
        ranks, many = names["ranks"], 2 * names["ranks"]
        programs = {
            f"GPipe, {many} micro-batches": schedule.build("gpipe", ranks, many),
            f"1F1B, {many} micro-batches": schedule.build("1f1b", ranks, many),
            "1F1B, a single micro-batch": schedule.build("1f1b", ranks, 1),
            f"ZB-H1, {many} micro-batches": schedule.build("zb_h1", ranks, many),
            "the forward passes of 1F1B alone, for evaluation": schedule.build("1f1b", ranks, many).forward(),
        }
        hang = {text for text, program in programs.items() if schedule.validate(program).blocking_hangs}
        assert hang == set(right)


def test_what_two_ranks_stand_at_when_sends_block():
    """C23, step by step: a send and its receive happen together, when both ranks stand at them."""
    words = {("send", "x"): "sends the output", ("send", "g"): "sends the gradient"}
    words |= {("recv", "x"): "receives the output", ("recv", "g"): "receives the gradient"}
    say = lambda step: f"{words[step.kind, step.message.tensor.role]} of micro-batch {step.message.tensor.microbatch}"
    for names, rows in every_draw("where-they-stand"):
        program = schedule.build("1f1b", 2, names["micro_batches"])
        left = [[step for step in row if hasattr(step, "message")] for row in schedule.lower(program)]
        while left[0][0].message == left[1][0].message:
            left = [row[1:] for row in left]
        assert rows == [say(left[0][0]), say(left[1][0]), say(left[0][1]), say(left[1][1])]


def test_what_brings_idle_time_back_to_zb_h2():
    for names, right in right_options("idle-again"):
        ranks, m = names["ranks"], 3 * names["ranks"]
        zb = lambda m=m, ranks=ranks, **costs: schedule.simulate(schedule.build("zb_h2", ranks, m), **costs)
        assert zb().bubble_rate == pytest.approx(0)
        assert max(zb().peak_in_flight) == 2 * ranks - 1
        idle = {
            "W takes half as long as F and I": zb(W=0.5).bubble_rate,
            "a message takes a fifth of F": zb(comm=0.2).bubble_rate,
            "F, I and W all take twice as long": zb(F=2, I=2, W=2).bubble_rate,
            "there are twice as many micro-batches": zb(m=2 * m).bubble_rate,
            "before it changes any weight, the optimizer needs the norm of all gradients": zb().bubble,
            f"a rank has room for {ranks} micro-batches only": schedule.simulate(
                schedule.greedy(ranks, m, limit=lambda rank, ranks=ranks: ranks, split=True)
            ).bubble_rate,
        }
        assert {text for text, share in idle.items() if share > 1e-9} == set(right)


def test_what_a_batch_and_a_tied_parameter_come_to():
    for names, loss in every_draw("loss-of-the-batch"):
        few, many = names["few"], names["many"]
        assert loss == pytest.approx(torch.tensor([5.0] * few + [3.0] * many).mean().item())
    for names, weight in every_draw("weight-after-a-step"):
        w = torch.tensor(2.0, requires_grad=True)
        (names["first"] * w + names["last"] * w).backward()
        md.SGD([w], lr=0.1).step()
        assert weight == pytest.approx(w.item())
