"""Whole weights and gradients, saving and loading, and the ways in which ranks can fail to agree."""

import copy

import pytest
import torch

import minidist as md

CONFIG = md.GPTConfig(
    layers=1, dim=16, heads=4, kv_heads=2, vocab=7
)  # 4 ranks: two hold each key head, the last no word
TOKENS = torch.tensor([[0, 1, 2, 3, 4, 5, 6]])


def cut(world, seed=0, **options):
    return md.tensor_parallel(md.GPT(CONFIG, seed=seed), world, **options)


def saved_and_loaded(world):
    """A rank's own state_dict holds its slices; loading it keeps the tie."""
    module, other = cut(world), cut(world, seed=1)
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    assert other.head.weight is other.embed.weight
    whole, plain = md.full_state_dict(other), md.GPT(CONFIG).state_dict()
    assert whole["head.weight"] is whole["embed.weight"]
    assert list(whole) == list(plain)
    assert all(torch.equal(whole[name], plain[name]) for name in plain)
    md.GPT(CONFIG, seed=1).load_state_dict(whole)
    numbers = [p.numel() for p in module.parameters()]
    return numbers, {n: str(md.placement_of(p, "tp")) for n, p in module.named_parameters()}


def frozen(world):
    """A parameter without a gradient has None, a frozen one stays frozen."""
    plain = md.GPT(CONFIG)
    plain.blocks[0].attn.q.weight.requires_grad_(False)
    module = md.tensor_parallel(plain, world, sequence=True)
    assert not module.blocks[0].attn.q.weight.requires_grad
    md.vocab_parallel_cross_entropy(module(TOKENS), TOKENS, world).sum().backward()
    return [name for name, grad in md.full_grads(md.DataParallel(module, world)).items() if grad is None]


def everything(world):
    with pytest.raises(IndexError, match="a token is a number from 0 to 6: found 7 to 7"):
        cut(world)(torch.tensor([[7]]))
    with pytest.raises(TypeError, match=r"as mesh\['tp'\], not Mesh"):
        md.tensor_parallel(md.GPT(CONFIG), md.Mesh({"tp": world.size}, world))
    return saved_and_loaded(world), frozen(world) if world.size == 1 else []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saved_loaded_and_whole_again(ranks):
    everywhere = md.launch(everything, ranks=ranks)
    held = [sum(numbers) for (numbers, _), _ in everywhere]
    whole = sum(p.numel() for p in md.GPT(CONFIG).parameters())
    assert held[0] < whole if ranks > 1 else held[0] == whole
    placed = everywhere[0][0][1]
    assert placed["embed.weight"] == placed["blocks.0.mlp.up.weight"] == "Shard(dim=0)"
    assert placed["blocks.0.attn.out.weight"] == "Shard(dim=1)"
    assert placed["blocks.0.attn.k.weight"] == ("Shard(dim=0, copies=2)" if ranks == 4 else "Shard(dim=0)")
    assert placed["norm.weight"] == "Replicate()"
    if ranks == 1:
        assert everywhere[0][1] == ["blocks.0.attn.q.weight"]


# ---- ranks that do not agree -----------------------------------------------------------------------------------------


def only_rank_0(world):
    module = cut(world)
    if world.rank == 0:
        md.full_state_dict(module)


def rank_1_elsewhere(world):
    module = cut(world)
    md.full_state_dict(module) if world.rank == 0 else world.barrier()


def other_heads(world):
    md.tensor_parallel(md.GPT(md.GPTConfig(layers=1, dim=16, heads=2 + 2 * world.rank)), world)


def other_borders(world):
    cut(world, sequence=world.rank == 0)


def other_tokens(world):
    cut(world)(TOKENS[:, : 3 + world.rank])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (only_rank_0, "(?s)rank 0: waits in full_state_dict, which all ranks have to call.*rank 1: returned"),
        (rank_1_elsewhere, "(?s)the calls differ; nothing was sent.*all_gather.*barrier"),
        (other_heads, r"rank 0 has blocks.0.attn.q: Column\(heads=2.*where rank 1 has .*Column\(heads=4"),
        (other_borders, "rank 0 has sequence=True, where rank 1 has sequence=False"),
        (other_tokens, r"(?s)nothing was sent.*rank 0: .*\[1, 3, 16\].*rank 1: .*\[1, 4, 16\]"),
    ],
)
def test_ranks_that_do_different_things_are_told(fault, words):
    with pytest.raises(md.LaunchError, match=words):
        md.launch(fault, ranks=2, timeout=10)
