"""Plans that do not fit a model or the ranks are refused before anything is sent, with what would fit."""

import pytest
from torch import nn

import minidist as md
from minidist.comm.comm import Comm
from minidist.sharded.roles import Between, Column, Enter, Inside, Row, Vocab, check_plan, copies, match


def gpt(**options):
    return md.GPT(md.GPTConfig(**{"layers": 1, "dim": 48, "heads": 4, "vocab": 30, **options}))


def checked(module, ranks, plan=None, sequence=False):
    roles = match(md.gpt_plan(module.config) if plan is None else plan, module)
    check_plan(roles, module, ranks, sequence)
    return roles


def pair():
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))


class Feed(nn.Module):
    def __init__(self, *inside):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), *inside, nn.Linear(8, 4))


FEED = {"body": Enter(), "body.0": Column(), "body.2": Row()}


@pytest.mark.parametrize(
    ("module", "ranks", "words"),
    [
        (
            gpt(heads=6, dim=48),
            4,
            "blocks.0.attn.q: 6 heads cannot be shared out to 4 ranks: use 3 or 6 ranks, or 4 or 8 heads",
        ),
        (
            gpt(heads=12, dim=48, kv_heads=3),
            4,
            "attn.k: 3 heads cannot be shared out to 4 ranks: use 3 or 6 ranks, or 2 or 4 heads",
        ),
        (gpt(heads=4, dim=24), 3, "attn.q: 4 heads cannot be shared out to 3 ranks: use 2 or 4 ranks, or 3 or 6 heads"),
        (gpt(heads=5, dim=10, mlp="gelu"), 5, None),
        (gpt(heads=3, dim=42), 3, "mlp.gate: 128 outputs cannot be shared out to 3 ranks"),
        (gpt(), 4, None),
        (gpt(kv_heads=1), 4, None),
        (gpt(kv_heads=2), 4, None),
        (gpt(vocab=3), 4, None),
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_sizes_of_a_gpt(module, ranks, words, sequence):
    if words is None:
        checked(module, ranks, sequence=sequence)
        return
    with pytest.raises(ValueError, match=words):
        checked(module, ranks, sequence=sequence)


def test_nothing_is_sent_or_changed_where_sizes_do_not_divide():
    """No Comm is asked for more than its size: a group that does not exist would raise otherwise."""
    module = gpt(heads=6)
    before = {name: p.shape for name, p in module.named_parameters()}

    class Nobody(Comm):
        def __init__(self):
            self.size, self.rank = 4, 0

    with pytest.raises(ValueError, match="6 heads cannot be shared out to 4 ranks"):
        md.tensor_parallel(module, Nobody())
    assert {name: p.shape for name, p in module.named_parameters()} == before
    assert type(module.blocks[0].attn.q) is nn.Linear


@pytest.mark.parametrize(
    ("module", "plan", "error", "words"),
    [
        (pair(), {"0": Column(), "3": Row()}, ValueError, "no module is named '3'"),
        (gpt(), {"block.*.attn": Enter()}, ValueError, "did you mean blocks.0.attn"),
        (gpt(), {"blocks.*.attn.q": Column(), "blocks.0.attn.q": Row()}, ValueError, "two lines of the plan"),
        (pair(), {"0": "column"}, TypeError, "must be a role such as"),
        (pair(), {"1": Column()}, TypeError, "is for a plain nn.Linear, and this is GELU"),
        (nn.Sequential(nn.Bilinear(2, 2, 2)), {"0": Row()}, TypeError, "this is Bilinear"),
        (nn.Sequential(pair()), {"0": Enter()}, ValueError, "no column-parallel layer is in it"),
        (nn.Sequential(pair()), {"0": Between()}, TypeError, "has parts: name those"),
        (nn.Sequential(nn.Linear(4, 9)), {"0": Column(heads=2)}, ValueError, "9 outputs are not 2 heads"),
        (nn.Sequential(nn.Linear(5, 4)), {"0": Row()}, ValueError, "5 inputs cannot be shared out to 2 ranks"),
        (
            nn.Sequential(nn.Embedding(4, 2, padding_idx=0)),
            {"0": Vocab()},
            ValueError,
            "with padding_idx cannot be cut",
        ),
        (nn.Sequential(nn.Dropout1d()), {"0": Between()}, TypeError, "only nn.Dropout can be cut .* not Dropout1d"),
        (Feed(nn.LayerNorm(8)), FEED, ValueError, "body.1 has no role in the plan, and it is inside 'body'"),
        (Feed(nn.Dropout(0.1)), FEED, ValueError, "body.1 has no role in the plan, and it is inside 'body'"),
        (gpt(), {"embed": Vocab()}, ValueError, "embed.weight and head.weight are one parameter"),
        (nn.Linear(2, 2, device="meta"), {"": Column()}, ValueError, "meta device"),
    ],
)
def test_plans_that_do_not_fit(module, plan, error, words):
    with pytest.raises(error, match=words):
        checked(module, 2, plan)


def test_sequence_parallelism_needs_a_role_for_everything_that_learns_or_drops():
    module = nn.Sequential(nn.LayerNorm(4), *pair(), nn.Dropout(0.5))
    plan = {"1": Column(), "3": Row()}
    checked(module, 2, plan)
    with pytest.raises(ValueError, match="0 has no role in the plan, and with sequence=True every layer needs one"):
        checked(module, 2, plan, sequence=True)
    with pytest.raises(ValueError, match="4 has no role"):
        checked(module, 2, {**plan, "0": Between()}, sequence=True)
    checked(module, 2, {**plan, "0": Between(), "4": Between()}, sequence=True)


def test_plans_that_fit():
    assert len(checked(Feed(nn.Dropout(0.0)), 4, FEED)) == 3
    checked(Feed(nn.Dropout(0.1)), 4, {**FEED, "body.1": Inside()})
    checked(nn.Linear(2, 2), 2, {"": Column()})
    assert copies(Column(heads=4), 2) == copies(Row(), 2) == copies(Column(heads=2, repeat=True), 2) == 1


def test_only_a_gpt_has_a_plan_of_its_own(solo):
    with pytest.raises(ValueError, match="only GPT has a plan: pass plan= for Sequential"):
        md.tensor_parallel(pair(), solo)
    with pytest.raises(ValueError, match="nothing that tensor_parallel cut"):
        md.full_grads(pair())
    module = md.tensor_parallel(gpt(), solo)
    with pytest.raises(TypeError, match=r"is for a plain nn\.Linear"):
        md.tensor_parallel(module, solo)  # cut already
