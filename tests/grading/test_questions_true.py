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
