"""GPT: against a second implementation with loops for everything, and the properties each of its parts promises."""

import copy

import pytest
import torch
from torch import nn

from minidist.models.gpt import GPT, GPTConfig, rotary, rotate

TINY = {"layers": 2, "dim": 24, "heads": 4, "vocab": 11, "seq": 9}
B, S = 2, 7


def tokens(seed=0, batch=B, length=S, vocab=11):
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(logits, parameters):
    """Of a loss that weighs every logit differently."""
    weight = torch.arange(1, logits.numel() + 1, dtype=logits.dtype).view_as(logits).sin()
    return torch.autograd.grad((logits * weight).sum(), parameters)


def naive_gpt(weights, config, text, fault=None):
    """The same function written from the papers, one sequence, token, head and pair at a time, on a dict of weights."""
    norm = lambda x, scale: torch.stack([v / (v.square().mean() + 1e-5).sqrt() for v in x]) * scale
    k = config.dim // config.heads
    base = 100.0 if fault == "rotary base" else 10000.0

    def turn(vector, position):
        parts = []
        for i in range(k // 2):
            angle = torch.tensor(position * base ** (-2 * i / k), dtype=torch.float64)
            if fault == "no rotary":
                angle = angle * 0
            a, b = vector[2 * i], vector[2 * i + 1]
            parts += [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()]
        return torch.stack(parts)

    def attention(x, w):
        q, key, value = (x @ w[f"attn.{name}.weight"].T for name in "qkv")
        out = []
        for head in range(config.heads):
            group = head // (config.heads // (config.kv_heads or config.heads))
            if fault == "wrong group":
                group = head % (config.kv_heads or config.heads)
            mine, theirs = slice(head * k, head * k + k), slice(group * k, group * k + k)
            rows = []
            for t in range(len(x)):
                seen = range(len(x)) if fault == "no mask" else range(t + 1)
                scores = torch.stack([turn(q[t, mine], t) @ turn(key[s, theirs], s) for s in seen])
                share = (scores / (1 if fault == "no scale" else k**0.5)).softmax(0)
                rows.append(sum(p * value[s, theirs] for p, s in zip(share, seen, strict=True)))
            out.append(torch.stack(rows))
        return torch.cat(out, 1) @ w["attn.out.weight"].T

    def mlp(x, w):
        up = x @ w["mlp.up.weight"].T
        if config.mlp == "gelu":
            return (0.5 * up * (1 + torch.erf(up / 2**0.5))) @ w["mlp.down.weight"].T
        gate = x @ w["mlp.gate.weight"].T
        return (gate * gate.sigmoid() * up) @ w["mlp.down.weight"].T

    def one(sequence):
        x = weights["embed.weight"][sequence]
        for layer in range(config.layers):
            prefix = f"blocks.{layer}."
            w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            if fault == "post-norm":
                x = norm(x + attention(x, w), w["attn_norm.weight"])
                x = norm(x + mlp(x, w), w["mlp_norm.weight"])
            else:
                x = x + attention(norm(x, w["attn_norm.weight"]), w)
                x = x + mlp(norm(x, w["mlp_norm.weight"]), w)
        return norm(x, weights["norm.weight"]) @ weights["embed.weight" if config.tie else "head.weight"].T

    return torch.stack([one(sequence) for sequence in text])


def check_equal(config, fault=None):
    gpt = GPT(config, seed=3).double()
    with torch.no_grad():
        for p in gpt.parameters():  # away from the initial values, where attention is nearly uniform and norms are 1
            p.mul_(10).add_(torch.linspace(-0.3, 0.3, p.numel(), dtype=p.dtype).view_as(p).sin())
    weights, text = dict(gpt.named_parameters()), tokens()
    ours, naive = gpt(text), naive_gpt(weights, config, text, fault)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)
    for name, a, b in zip(weights, gradients(ours, weights.values()), gradients(naive, weights.values()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


GROUPED = GPTConfig(**TINY, kv_heads=2)


@pytest.mark.parametrize(
    "config",
    [GPTConfig(**TINY), GROUPED, GPTConfig(**TINY, kv_heads=1, mlp="gelu", tie=False)],
    ids=["plain", "grouped", "gelu, untied, one kv head"],
)
def test_equals_the_naive_implementation(config):
    check_equal(config)


@pytest.mark.parametrize("fault", ["rotary base", "no rotary", "wrong group", "no mask", "no scale", "post-norm"])
def test_that_check_notices(fault):
    with pytest.raises(AssertionError):
        check_equal(GROUPED, fault)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64)  # [B=1, S=1, H=3, K=8] each

    def product(m, n):
        turned = (rotate(x, rotary(torch.tensor([at]), 8, x.dtype)) for x, at in ((q, m), (k, n)))
        return torch.linalg.vecdot(*turned).flatten()

    torch.testing.assert_close(product(2, 5), product(40, 43), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(product(2, 5), product(2, 6))
    assert not torch.allclose(product(2, 5), product(5, 2))
    torch.testing.assert_close(rotate(q, rotary(torch.tensor([9]), 8, q.dtype)).norm(), q.norm())
    assert torch.equal(rotate(q, rotary(torch.tensor([0]), 8, q.dtype)), q)


def test_positions():
    gpt, text = GPT(GPTConfig(**TINY)).double(), tokens()
    plain = gpt(text)
    assert torch.equal(gpt(text, torch.arange(S)), plain)
    assert torch.equal(gpt(text, torch.arange(S).expand(B, S)), plain)
    torch.testing.assert_close(gpt(text, torch.arange(S) + 1000), plain, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(gpt(text, 2 * torch.arange(S)), plain)


def test_no_logit_depends_on_a_later_token():
    gpt, text = GPT(GPTConfig(**TINY)).double(), tokens()
    changed = text.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = gpt(text), gpt(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.isclose(before[:, 4:], after[:, 4:]).all(-1).any()


def test_grouped_heads_equal_repeated_ones():
    grouped, full = GPT(GROUPED).double(), GPT(GPTConfig(**TINY)).double()
    full.load_state_dict(
        grouped.state_dict()
        | {
            name: value.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
            for name, value in grouped.state_dict().items()
            if name.endswith(("attn.k.weight", "attn.v.weight"))
        }
    )
    text = tokens()
    torch.testing.assert_close(grouped(text), full(text), rtol=1e-12, atol=1e-12)
    shared = gradients(grouped(text), list(grouped.blocks[0].attn.k.parameters()))[0]
    copies = gradients(full(text), list(full.blocks[0].attn.k.parameters()))[0]
    torch.testing.assert_close(shared, copies.unflatten(0, (2, 2, -1)).sum(1).flatten(0, 1))


def test_a_tied_matrix_gets_both_gradients():
    tied, untied = GPT(GPTConfig(**TINY)).double(), GPT(GPTConfig(**TINY, tie=False)).double()
    untied.load_state_dict(tied.state_dict())
    assert tied.head.weight is tied.embed.weight
    assert tied.state_dict().keys() == untied.state_dict().keys()
    assert len(list(tied.parameters())) + 1 == len(list(untied.parameters()))
    text = tokens()
    both = gradients(tied(text), [tied.embed.weight])[0]
    apart = gradients(untied(text), [untied.embed.weight, untied.head.weight])
    torch.testing.assert_close(both, sum(apart), rtol=1e-12, atol=1e-12)
    assert copy.deepcopy(tied).head.weight is not tied.embed.weight
    assert tied.double().head.weight is tied.embed.weight


def test_weights_depend_on_config_and_seed_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = GPT(GPTConfig(**TINY), seed=7)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    same, other = GPT(GPTConfig(**TINY), seed=7), GPT(GPTConfig(**TINY), seed=8)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == (a.dim() == 1), name
    drawn = [p.flatten()[:100].tolist() for p in one.parameters() if p.dim() > 1]
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn), "two parameters got the same numbers"
    deeper = GPT(GPTConfig(**TINY | {"layers": 5}, tie=False), seed=7)
    assert torch.equal(deeper.blocks[1].attn.q.weight, one.blocks[1].attn.q.weight), "layers disturb one another"


def test_initial_spread():
    gpt = GPT(GPTConfig(layers=8, dim=128, heads=4))
    for name, p in gpt.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            residual = name.endswith(("attn.out.weight", "mlp.down.weight"))
            assert p.detach().std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    loss = nn.functional.cross_entropy(gpt(tokens(vocab=256)).flatten(0, 1), tokens(1, vocab=256).flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.1), "not ln(256): the first guess should be nearly uniform"


@pytest.mark.slow  # the meta device imports torch's compiler
def test_on_the_meta_device_it_costs_nothing():
    with torch.device("meta"):
        gpt = GPT(GPTConfig(layers=80, dim=8192, heads=64, kv_heads=8, vocab=128_256, tie=False, seq=8192))
        assert gpt(torch.zeros(1, 8192, dtype=torch.long)).shape == (1, 8192, 128_256)
    assert all(p.is_meta for p in gpt.parameters())
    assert sum(p.numel() for p in gpt.parameters()) > 50e9


def test_every_parameter_is_a_plain_layer_with_a_stable_name():
    gpt = GPT(GPTConfig(layers=1))
    assert [name for name, _ in gpt.named_parameters()] == [
        "embed.weight",
        "blocks.0.attn_norm.weight",
        "blocks.0.attn.q.weight",
        "blocks.0.attn.k.weight",
        "blocks.0.attn.v.weight",
        "blocks.0.attn.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
    ]
    owners = {type(m) for m in gpt.modules() if list(m.parameters(recurse=False))}
    assert owners == {nn.Embedding, nn.Linear, nn.RMSNorm}
    sizes = {"embed": 256 * 128, "attention": 4 * 128 * 128, "mlp": 3 * 128 * 352, "norms": 3 * 128}
    assert sum(p.numel() for p in gpt.parameters()) == sum(sizes.values())


def test_a_stage_is_the_model_with_its_ends_taken_away():
    whole = GPT(GPTConfig(**TINY)).double()
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    first.blocks, first.norm, first.head = first.blocks[:1], nn.Identity(), nn.Identity()
    last.blocks, last.embed = last.blocks[1:], nn.Identity()
    assert torch.equal(last(first(tokens())), whole(tokens()))


def test_attention_can_be_replaced_and_heads_follow_the_width():
    whole, text = GPT(GPTConfig(**TINY)).double(), tokens()
    part = copy.deepcopy(whole.blocks[0].attn)
    for name in "qkv":  # keep heads 2 and 3: columns 12 to 24 of y = xW
        getattr(part, name).weight = nn.Parameter(getattr(part, name).weight[12:])
    part.out.weight = nn.Parameter(part.out.weight[:, 12:])
    x, rotation = whole.embed(text), rotary(torch.arange(S), 6, torch.float64)
    seen = []
    part.attend = lambda q, k, v: seen.append(q.shape) or whole.blocks[0].attn.attend(q, k, v)
    rest = copy.deepcopy(whole.blocks[0].attn)
    for name in "qkv":
        getattr(rest, name).weight = nn.Parameter(getattr(rest, name).weight[:12])
    rest.out.weight = nn.Parameter(rest.out.weight[:, :12])
    both = part(x, rotation) + rest(x, rotation)
    torch.testing.assert_close(both, whole.blocks[0].attn(x, rotation), rtol=1e-12, atol=1e-12)
    assert seen == [(B, 2, S, 6)]


def test_dropout_is_on_what_a_block_adds():
    gpt, text = GPT(GPTConfig(**TINY, dropout=0.5)), tokens()
    torch.manual_seed(0)
    one, two = gpt(text), gpt(text)
    assert not torch.allclose(one, two)
    torch.manual_seed(0)
    assert torch.equal(gpt(text), one)
    gpt.eval()
    assert torch.equal(gpt(text), GPT(GPTConfig(**TINY))(text))
    zero, state = GPT(GPTConfig(**TINY)), torch.get_rng_state()
    zero(text)
    assert torch.equal(torch.get_rng_state(), state), "without dropout no random number is drawn"


def test_lengths():
    gpt = GPT(GPTConfig(**TINY))
    assert gpt(tokens(length=1)).shape == (B, 1, 11)
    assert gpt(tokens(length=9)).shape == (B, 9, 11)
    with pytest.raises(ValueError, match=r"10 tokens.*GPTConfig\(seq=10\)"):
        gpt(tokens(length=10))
    with pytest.raises(ValueError, match=r"tokens must be \[B, S\], and are \[4\]"):
        gpt(tokens(length=4)[0])
    gpt(tokens(batch=0)).sum().backward()  # a rank without samples
    assert all(p.grad is not None and not p.grad.any() for p in gpt.parameters())


def test_bfloat16():
    gpt, text = GPT(GPTConfig(**TINY)), tokens()
    exact, rounded = gpt(text), gpt.bfloat16()(text)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.02)


def test_it_learns():
    gpt, text = GPT(GPTConfig(**TINY)), tokens(length=9)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(gpt(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 100, "heads": 8}, "use dim=96 or dim=112"),
        ({"dim": 4, "heads": 4}, "use dim=8$"),
        ({"dim": 12, "heads": 4}, "multiple of 2 x heads = 8"),
        ({"kv_heads": 3}, r"kv_heads=3 does not divide heads=4: use one of \[1, 2, 4\]"),
        ({"kv_heads": 8}, "kv_heads=8 does not divide"),
        ({"kv_heads": 0}, "kv_heads must be a whole number of at least 1, not 0"),
        ({"layers": 0}, "layers must be"),
        ({"heads": 2.0}, "heads must be a whole number"),
        ({"vocab": -1}, "vocab must be"),
        ({"seq": "long"}, "seq must be"),
        ({"mlp": "relu"}, 'mlp must be "swiglu" or "gelu", not \'relu\''),
        ({"dropout": 1.0}, "dropout is the share"),
        ({"tie": "x"}, "tie must be True or False, not 'x'"),
    ],
)
def test_a_config_that_cannot_be_built(wrong, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**wrong)


def test_every_legal_size_is_accepted():
    assert GPTConfig(dim=96, heads=8).head_dim == 12
    assert GPTConfig(dim=64, mlp="gelu").ffn == 256
    assert [GPTConfig(dim=dim).ffn for dim in (64, 128, 256)] == [192, 352, 704]
    assert GPTConfig(heads=8, kv_heads=2).query_groups == 2
