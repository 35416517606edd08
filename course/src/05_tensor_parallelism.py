# %% [markdown] tags=["head"]
# # 05 Tensor parallelism
#
# **The question.** A layer is too large for one chip, or takes too long there. Cut its matrices over the ranks: where
# do they have to talk, how often, and over which links is that affordable?
#
# **Nine concepts**
#
# - column split needs no communication
# - row split needs a sum
# - the pair needs one
# - heads are independent
# - two all-reduces per layer and direction
# - conjugate pairs
# - vocabulary-parallel loss
# - sequence parallel moves the same bytes
# - why inside one machine
#
# **Three sittings**: 1 *Cutting a layer* 25 minutes, 2 *A whole model, forward and back* 25 minutes, 3 *Vocabulary,
# tokens and links* 25 minutes. Then the cards and a test, 40 minutes.

# %% tags=["setup"]
import math
import os
import time
import warnings

import torch
import torch.distributed.nn.functional as torch_functional
import torch.nn.functional as F

import minidist as md
from grading import card, compare, predict, quiz, reveal, review, submit
from minidist import viz

torch.set_num_threads(1)  # the ranks need the cores

# %% tags=["review"]
review("05")

# %% [markdown]
# Before anything runs, commit to a number. The prediction is about this model:

# %% tags=["the-model"]
CONFIG = md.GPTConfig(layers=3, dim=64, heads=4, seq=32)
BATCH = 8
text = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=BATCH)
block = md.GPT(CONFIG).blocks[0]
print(f"{CONFIG.layers} layers like this one; a step has {BATCH} x {CONFIG.seq} tokens")
for name, matrix in block.named_parameters():
    print(f"  {name:18s} {list(matrix.shape)}")

# %% tags=["predict-sums"]
predict("sums-of-a-step-here")

# %% [markdown]
# ## Sitting 1: Cutting a layer (25 minutes)
#
# Data parallelism copies the model; ZeRO cuts what rests between steps, and gathers a layer to compute with it. Both
# share out *samples*: a rank takes at least one sequence, and computes **every layer whole**. So the batch grows with the
# ranks, while the activations of a sequence and the time it takes stay. How much is that? Here for a layer of the width
# of Llama 3 405B (arXiv 2407.21783, Table 3). The device `meta` knows shapes only, so nothing of this size is allocated.

# %% tags=["too-large"]
wide = md.GPTConfig(layers=1, dim=16384, heads=128, kv_heads=8, seq=8192)
with torch.device("meta"):
    layer = md.GPT(wide).bfloat16().blocks[0]
    x = torch.empty(1, wide.seq, wide.dim, dtype=torch.bfloat16, requires_grad=True)
    rotation = torch.empty(wide.seq, 1, wide.head_dim // 2, dtype=torch.complex64)
saved = []


def note_saved(tensor):
    """Note what autograd keeps, but not the scores [S, S], which a fused kernel does not keep."""
    saved.extend([tensor] if tensor.shape[-1] != wide.seq else [])
    return tensor


with torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor):
    layer(x, rotation)
weights = sum(p.numel() for p in layer.parameters())
matrices = md.storage_bytes(layer.parameters())
activations = md.storage_bytes([*saved, *layer.parameters()]) - matrices
seconds = md.hardware.H100.seconds(6 * weights * wide.seq) / 0.5  # at half the peak
print(f"{weights / 1e9:.2f} billion weights in a layer, bfloat16; {wide.seq:,} tokens")
print("one layer, on one rank:                    ZeRO-3, any ranks    cut over 8")
for what, size, unit in (
    ("weights, gathered to compute", matrices / 1e9, "GB"),
    ("its whole gradient, until it is reduced", matrices / 1e9, "GB"),
    ("activations of the sequence", activations / 1e9, "GB"),
    ("forward and backward, H100 at half its peak", seconds * 1e3, "ms"),
):
    print(f"  {what:43s} {size:10.1f} {unit} {size / 8:14.1f} {unit}")
print(f"126 layers, one sequence: {126 * activations / 1e9:.0f} GB and {126 * seconds:.0f} s")
print(f"16,384 ranks, a sequence each: {16384 * wide.seq / 1e6:.0f} million tokens a step")

# %% [markdown]
# One layer fits. A sequence through all of them does not: its activations fill several chips, unless they are computed
# anew in the backward pass, and a step takes at least its time. And a rank cannot take half a sequence: Llama 3 was
# trained with 16 million tokens a step on those 16,384 chips (Table 4). If the layer itself is cut, several ranks share
# one sequence, its activations and its time. (The last column is the ideal; what comes near it is this lesson's subject.)
#
# ### The idea
#
# **Tensor parallelism** cuts the matrices, and every rank computes with its part, on the same tokens. There are two ways
# to cut one, here for *y = f(x A) B*, a feed-forward block. (That of the model above has two matrices *A*, `gate` and
# `up`, which are cut alike.) A colour is a rank; grey is alike on all of them.

# %% tags=["picture-cuts"]
viz.cut("pair", ranks=4, tokens=256, width=64, hidden=192, nbytes=8)

# %% [markdown]
# - *A* **by columns**: each rank gets all of *x* and computes some of the outputs, finished.
# - *B* **by rows**: each rank gets some of the inputs, just those that it has, and computes a term of every output. The
#   terms are summed.
#
# Now with numbers, in float64, 8 bytes each, as in the picture. All four ranks make the same *x*, *A* and *B* and take
# their slice; the recorder notes what they send.


# %% tags=["column-split"]
def seeded(*shape):
    """The same random numbers on every rank, in float64."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5


X, A, B = seeded(256, 64), seeded(64, 192), seeded(192, 64)


def mine(length, world):
    """This rank's slice of so many columns, rows or heads."""
    return md.partition(length, world.size)[world.rank]


def sent_so_far(world):
    """What this rank sent: the bytes that a ring sends for a call, not the size of its tensor."""
    calls = [f"{call.sent:,} bytes in an {call.op}" for call in world.recorder.calls]
    return ", ".join(calls) or "nothing"


def by_columns(world):
    out = X @ A[:, mine(192, world)]  # [T, D] x [D, F/tp] -> [T, F/tp]
    return out, sent_so_far(world)


parts, sent = zip(*md.launch(by_columns, ranks=4), strict=True)
error = (torch.cat(parts, dim=1) - X @ A).abs().max()
print(f"each rank has {list(parts[0].shape)} of {list((X @ A).shape)}, and sent {sent[0]}")
print(f"side by side they are x A, up to {error:.0e}")


# %% tags=["row-split"]
def by_rows(world, hidden):
    rows = mine(192, world)
    term = hidden[:, rows] @ B[rows]  # [T, F/tp] x [F/tp, D] -> [T, D] {+tp}
    return term, world.all_reduce(term.clone()), sent_so_far(world)


H = F.gelu(X @ A)
terms, sums, sent = zip(*md.launch(by_rows, ranks=4, args=(H,)), strict=True)
print(f"each rank has a term {list(terms[0].shape)} of {list((H @ B).shape)}, and sent {sent[0]}")
print(f"one term is {(terms[0] - H @ B).norm() / (H @ B).norm():.0%} away from h B, ", end="")
print(f"their sum {(sums[0] - H @ B).abs().max():.0e}")

# %% [markdown]
# A **bias** is shared out with the columns, and comes *once* with the rows: after the sum.
#
# ### The pair needs one sum
#
# The columns of *A* that a rank holds make just those hidden numbers that meet its rows of *B*. So between the two
# matrices nothing is sent, and at the end one sum.


# %% tags=["pair-one-sum"]
def pair(world):
    own = mine(192, world)
    y = world.all_reduce(F.gelu(X @ A[:, own]) @ B[own])
    return y, sent_so_far(world)


y, sent = md.launch(pair, ranks=4)[0]
print(f"one rank sent {sent}; error {(y - F.gelu(X @ A) @ B).abs().max():.0e}")

# %% [markdown]
# ### Why columns first?
#
# By rows first each rank would have terms of *all* hidden numbers, and then comes *f*. A sum may be postponed past what
# is linear, such as the next matrix. It may not be postponed past *f*: f(a + b) is not f(a) + f(b).


# %% tags=["rows-first"]
def rows_first(world, sum_before_f):
    own = mine(64, world)
    hidden = X[:, own] @ A[own]  # [T, D/tp] x [D/tp, F] -> [T, F] {+tp}
    if sum_before_f:
        hidden = world.all_reduce(hidden)
    out = F.gelu(hidden)[:, mine(192, world)] if sum_before_f else F.gelu(hidden)
    # the second matrix: by rows after the sum, else whole, since every rank has terms of everything
    y = world.all_reduce(out @ (B[mine(192, world)] if sum_before_f else B))
    return y, world.recorder.bytes_sent()


right = F.gelu(X @ A) @ B
for name, early in (("one sum, after f", False), ("a sum before f, another at the end", True)):
    y, sent = md.launch(rows_first, ranks=4, args=(early,))[0]
    print(f"{name:35s} error {(y - right).norm() / right.norm():7.1e}, a rank sent {sent:,} bytes")
y, sent = md.launch(lambda world: (pair(world)[0], world.recorder.bytes_sent()), ranks=4)[0]
print(
    f"{'columns first, one sum':35s} error {(y - right).norm() / right.norm():7.1e}, "
    f"a rank sent {sent:,} bytes"
)

# %% [markdown]
# ### Heads are independent
#
# Attention is a pair, too. Queries, keys and values are cut by columns, whole heads to a rank; between them and the
# output matrix each head needs only itself. What a softmax does to scores is no sum either, so a head cannot be cut.


# %% tags=["heads-alone"]
Q, K, V = (seeded(BATCH, 4, 32, 16 + i)[..., :16] for i in range(3))  # [B, H, S, K]


def heads_apart(world):
    own = mine(4, world)
    out = F.scaled_dot_product_attention(Q[:, own], K[:, own], V[:, own], is_causal=True)
    return out, sent_so_far(world)


def heads_in_parts(world):
    """A quarter of every head on each rank, as a cut anywhere in the columns would have it."""
    part = mine(16, world)
    return F.scaled_dot_product_attention(Q[..., part], K[..., part], V[..., part], is_causal=True)


whole = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
heads, sent = zip(*md.launch(heads_apart, ranks=4), strict=True)
parts = md.launch(heads_in_parts, ranks=4)
print(f"a head a rank:             sent {sent[0]}, error ", end="")
print(f"{(torch.cat(heads, dim=1) - whole).norm() / whole.norm():.0e}")
print("a quarter of every head:   sent nothing, error ", end="")
print(f"{(torch.cat(parts, dim=3) - whole).norm() / whole.norm():.0e}")

# %% [markdown]
# So the number of heads limits the number of ranks. The package says so before anything is sent. Keys and values that
# several queries share are another matter: a head of them may be on more than one rank.


# %% tags=["heads-refused"]
def cut_heads(world, heads):
    try:
        md.tensor_parallel(md.GPT(md.GPTConfig(layers=1, dim=16 * heads, heads=heads)), world)
    except ValueError as error:
        return f"refused: {error}"
    return f"{heads // world.size} a rank"


for ranks, heads in ((4, 12), (5, 12), (4, 6)):
    print(f"{heads} heads, {ranks} ranks: {md.launch(cut_heads, ranks=ranks, args=(heads,))[0]}")


# %% tags=["heads-shared"]
def two_key_heads(world):
    config = md.GPTConfig(layers=1, dim=64, heads=4, kv_heads=2, seq=32)
    whole = md.GPT(config, seed=0).blocks[0].attn.k.weight
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(config, seed=0), mesh["tp"])
    held = model.blocks[0].attn.k.weight
    head = next(h for h, rows in enumerate(whole.chunk(2)) if torch.equal(rows, held))
    tokens, targets = text.batch(0)
    world.recorder.clear()
    md.token_loss(model(tokens), targets, mesh["dp"], tp=mesh["tp"]).backward()
    sums = [call.group for call in world.recorder.calls if call.label == "shared heads"]
    return (
        f"keys {list(held.shape)}, key head {head}; gradients of keys summed over ranks {sums[0]}"
    )


for rank, line in enumerate(md.launch(two_key_heads, ranks=4)):
    print(f"rank {rank}: {line}")

# %% [markdown]
# ### Try other cuts
#
# Other cuts, other sizes. What grows with the hidden size, what with the tokens? What changes when ranks are added?

# %% tags=["explore-cuts"]
viz.cut_explorer()

# %% [markdown]
# ## Sitting 2: A whole model, forward and back (25 minutes)
#
# ### The code
#
# A model that knows nothing of ranks, and a plan, which is data: the name of a module, and its role. `Enter` is where a
# tensor enters a region in which the ranks differ; a `Row` is where it leaves. `tensor_parallel` cuts the matrices in
# place.

# %% tags=["code-plan"]
viz.show(md.gpt_plan)

# %% tags=["code-cut"]
viz.show(md.tensor_parallel)

# %% [markdown]
# ### Two all-reduces per layer and direction
#
# Attention is one region, feed-forward the other. Now the run that you predicted. The recorder counts the all-reduces
# that carry activations, [B, S, D], on one rank. (The loss has small ones of its own; sitting 3 is about those.)


# %% tags=["count-sums"]
def forward_and_back(world, config, sequence=False):
    """The calls of one rank in the forward pass, and those of the backward pass."""
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(config, seed=0), mesh["tp"], sequence=sequence)
    tokens, targets = text.batch(0)
    world.recorder.clear()
    logits = model(tokens)
    forward = list(world.recorder.calls)
    loss = md.token_loss(logits, targets, mesh["dp"], tp=mesh["tp"])
    world.recorder.clear()
    loss.backward()
    return forward, list(world.recorder.calls)


def with_layers(layers):
    return md.GPTConfig(layers=layers, dim=CONFIG.dim, heads=CONFIG.heads, seq=CONFIG.seq)


def count_sums(calls):
    return sum(call.op == "all_reduce" and call.nbytes == 4 * BATCH * 32 * 64 for call in calls)


counted = {}
for layers in (1, 2, 3):
    passes = md.launch(forward_and_back, ranks=4, args=(with_layers(layers),))[0]
    counted[layers] = [count_sums(calls) for calls in passes]
compare("sums-of-a-step-here", sum(counted[3]), title="All-reduces of a step", axis="on one rank")

# %% tags=["figure-sums"]
figure = viz.curves(
    list(counted),
    measured={
        "forward": [forward for forward, _ in counted.values()],
        "forward and backward": [sum(both) for both in counted.values()],
    },
    predicted={"forward": lambda n: 2 * n + 1, "forward and backward": lambda n: 4 * n + 2},
    xlabel="layers",
    ylabel="all-reduces on one rank",
    title="Two a layer and direction, and one for the ends",
)
reveal("sums-of-a-step-here", figure)

# %% [markdown]
# Each carries all tokens at the full width: 2(n-1)/n times that is what a rank sends for one, lesson 02. And *nothing*
# of it is a weight or a gradient of one. Those stay where they are.
#
# ### Conjugate pairs
#
# The forward pass sums at a region's end. Why does the backward pass sum at its beginning? Autograd does not know that
# there are other ranks. What a collective does going back is for us to say, and it follows from one convention: there
# is **one loss**, which all ranks compute alike.
#
# - **reduce**, at the end: y is the sum of the ranks' terms, so each term has the gradient of y, as it is.
# - **copy**, at the beginning: x goes into every rank's product, so its gradient is the sum of all ranks' parts.
#
# What one does going forward the other does going back: a conjugate pair. Torch's own differentiable all-reduce has
# another convention. What does it do here?

# %% tags=["predict-factor"]
predict("factor-here")

# %% tags=["code-pair"]
viz.show(md.autograd, "copy", "reduce", folded="exercises 05.1 and 05.2 ask for this")


# %% tags=["ways-back"]
def gradients(world, way):
    """(x, A, B): the gradients on this rank, of a loss that all ranks compute from the same y."""
    own = mine(192, world)
    x, a, b = (t.clone().requires_grad_() for t in (X, A[:, own], B[own]))
    entered = x if way == "no copy" else md.autograd.copy(x, world)
    term = F.gelu(entered @ a) @ b
    if way == "torch's all_reduce":
        warnings.simplefilter("ignore", FutureWarning)  # it is to get another name
        y = torch_functional.all_reduce(term)
    else:
        y = md.autograd.reduce(term, world)
    y.square().mean().backward()
    return x.grad, a.grad, b.grad


x, a, b = (t.clone().requires_grad_() for t in (X, A, B))
(F.gelu(x @ a) @ b).square().mean().backward()


def factor(got, wanted):
    """How much of `wanted` is in `got`: 1 if they are equal."""
    return ((got * wanted).sum() / (wanted * wanted).sum()).item()


lines, factors = [f"{'':20s}  rank     x      A      B"], {}
for way in ("copy and reduce", "torch's all_reduce", "no copy"):
    for rank, (dx, da, db) in enumerate(md.launch(gradients, ranks=4, args=(way,))):
        own = md.partition(192, 4)[rank]
        factors[way] = [factor(dx, x.grad), factor(da, a.grad[:, own]), factor(db, b.grad[own])]
        lines.append(f"{way:20s}  {rank}    " + "".join(f"{each:7.2f}" for each in factors[way]))
compare(
    "factor-here",
    factors["torch's all_reduce"][1],
    title="Torch's all_reduce at the end",
    axis="gradient of A, compared with one process",
)

# %% tags=["table-ways"]
reveal("factor-here", "\n".join(lines))

# %% [markdown]
# With torch's the gradients are those of four losses. Without `copy` those of *A* and *B* are right, and x's is another
# one on each rank, a part. Everything before the region would train on such parts: the forward pass is right, the loss
# goes down, and replicas of what should be equal drift apart.
#
# There is a third way to get it wrong. Collectives that autograd does not know at all end the backward pass:


# %% tags=["no-way-back"]
def plain_collective(world, op):
    x = torch.ones(4, requires_grad=True)
    try:
        y = getattr(world, op)(x * (world.rank + 1))
        if not y.requires_grad:
            return "the result needs no gradient: everything before it gets None"
        y.sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return x.grad


for op in ("all_gather", "all_reduce"):
    print(f"{op}: {md.launch(plain_collective, ranks=2, args=(op,))[0]}")

# %% [markdown]
# ### The same gradients as one process
#
# In float64, every parameter of the model, for 1, 2 and 4 ranks. `full_grads` puts the slices together.


# %% tags=["gradients-equal"]
def whole_gradient(world, sequence=False):
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(CONFIG, seed=0).double(), mesh["tp"], sequence=sequence)
    tokens, targets = text.batch(0)
    md.token_loss(model(tokens), targets, mesh["dp"], tp=mesh["tp"]).backward()
    return torch.cat([grad.flatten() for grad in md.full_grads(model).values()])


model = md.GPT(CONFIG, seed=0).double()
tokens, targets = text.batch(0)
F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
one = torch.cat([p.grad.flatten() for p in model.parameters()])
for ranks in (1, 2, 4):
    error = (md.launch(whole_gradient, ranks=ranks)[0] - one).norm() / one.norm()
    print(f"tp = {ranks}: relative error of the whole gradient {error:.1e}")

# %% [markdown]
# ### The same dropout
#
# Equal results for every number of ranks also need equal random numbers. All ranks must drop the same elements where
# they hold the same tensor, and where each holds a slice, its slice of one mask. And every matrix must begin as a slice
# of one that was drawn whole. Then the losses are the same, dropout or not:


# %% tags=["same-dropout"]
def losses(world, steps=3):
    config = md.GPTConfig(layers=1, dim=64, heads=4, seq=32, dropout=0.2)
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(config, seed=0).double(), mesh["tp"], seed=7)
    optimizer = md.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        tokens, targets = text.batch(step)
        loss = md.token_loss(model(tokens), targets, mesh["dp"], tp=mesh["tp"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


for ranks in (1, 2, 4):
    found = md.launch(losses, ranks=ranks)[0]
    print(f"tp = {ranks}: losses {', '.join(f'{loss:.12f}' for loss in found)}")

# %% [markdown]
# ## Sitting 3: Vocabulary, tokens and links (25 minutes)
#
# ### The loss, without all the logits
#
# The output layer is one more column split: a column for each word. Its result, the **logits**, is the largest tensor
# of the model, and cross-entropy wants whole rows of it. Or does it? A token's loss is log of the sum of exp(logit),
# less the target's logit. Sums can be taken slice by slice; only three numbers a token have to travel: the largest
# logit, that sum, and the target's logit.

# %% tags=["code-vocab"]
viz.show(md.vocab_parallel_cross_entropy, folded="exercise 05.4 asks for this")


# %% tags=["vocab-loss"]
def loss_of_slices(world, logits, filler):
    """Five words on two ranks: the second one has two, and a third that is missing."""
    padded = F.pad(logits, (0, 1), value=filler)
    own = padded[:, mine(padded.shape[1], world)]
    return md.vocab_parallel_cross_entropy(own, torch.tensor([4]), world).item()


small = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]])
large = torch.arange(1000.0, 1005.0)[None]
for name, logits, filler in (
    ("logit of the missing word -inf", small, -torch.inf),
    ("logit of the missing word left at 0", small, 0.0),
    ("logits near 1000", large, -torch.inf),
):
    alone = F.cross_entropy(logits, torch.tensor([4]))
    two = md.launch(loss_of_slices, ranks=2, args=(logits, filler))[0]
    print(f"{name:36s} one process {alone:.6f}, two ranks {two:.6f}")
without = large.exp().sum().log() - large[0, 4]
print(f"{'the same, the largest not taken off':36s} one process {without:.6f}")

# %% tags=["logits-bytes"]
WORDS, TOKENS = 8192, 256


def loss_both_ways(world, gather):
    """(loss, bytes of logits on this rank, bytes sent)"""
    logits = seeded(TOKENS, WORDS)[:, mine(WORDS, world)].float().contiguous()
    targets = torch.arange(TOKENS)
    world.recorder.clear()
    if gather:
        logits = world.all_gather(logits.T.contiguous()).T
        losses = F.cross_entropy(logits, targets, reduction="none")
    else:
        losses = md.vocab_parallel_cross_entropy(logits, targets, world)
    return losses.mean().item(), logits.nbytes, world.recorder.bytes_sent()


for name, gather in (("logits gathered", True), ("logits stay cut", False)):
    loss, held, sent = md.launch(loss_both_ways, ranks=4, args=(gather,))[0]
    print(f"{name}: loss {loss:.6f}, {held:10,} bytes of logits on a rank, {sent:9,} bytes sent")

# %% [markdown]
# ### Sequence parallelism: the same bytes
#
# Inside regions everything is cut. Between them, norms, dropouts and the residual stream are alike on all ranks: the
# same work and the same memory *n* times. **Sequence parallelism** gives each rank its share of the tokens there. A
# region then begins with an all-gather and ends with a reduce-scatter: the two halves of the all-reduce, pulled apart.
# The model is the same, and so is the plan.


# %% tags=["same-bytes"]
def bytes_by_kind(calls):
    found = {}
    for call in calls:
        kind = call.label or call.op
        found[kind] = found.get(kind, 0) + call.sent
    return found


def of_a_layer(sequence, ranks=4):
    """Bytes that a rank sends for one layer more: {"forward": {what: bytes}, "backward": ...}."""
    passes = [
        md.launch(forward_and_back, ranks=ranks, args=(with_layers(layers), sequence))[0]
        for layers in (1, 2)
    ]
    return {
        way: {kind: n - bytes_by_kind(less).get(kind, 0) for kind, n in bytes_by_kind(more).items()}
        for way, less, more in zip(("forward", "backward"), *passes, strict=True)
    }


for sequence in (False, True):
    measured = of_a_layer(sequence)
    formula = md.cost.tensor_parallel_layer(BATCH * 32, 64, 4, sequence=sequence)
    print("sequence parallel" if sequence else "tokens whole")
    for way in ("forward", "backward"):
        print(f"  {way:8s} measured {sum(measured[way].values()):7,} bytes: {measured[way]}")
        print(f"  {'':8s} formula  {sum(formula[way].values()):7,} bytes")

# %% [markdown]
# Forward the bytes are the same to the last one. Going back there are two additions, under names of their own. Each rank
# kept its own tokens of what entered a region, and gathers the others once more (`regather`), while it computes
# something else. And the weights of norms, alike on all ranks, met other tokens on each: their gradients are **summed**
# (`norm gradients`), a few bytes.
#
# The gain is in the memory of activations. What a forward pass keeps for the backward pass, for one layer:


# %% tags=["activations"]
def kept(world, layers, sequence):
    """Bytes that autograd keeps on this rank, weights not counted."""
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.GPT(with_layers(layers), seed=0)
    model = md.tensor_parallel(model, mesh["tp"], sequence=sequence)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = model(text.batch(0)[0])
    del logits
    return sum(storages.values())


def kept_of_a_layer(ranks, sequence):
    one, two = (md.launch(kept, ranks=ranks, args=(n, sequence))[0] for n in (1, 2))
    return two - one


worlds = [1, 2, 4]
by_ranks = {
    name: [kept_of_a_layer(n, sequence) for n in worlds]
    for name, sequence in (("tokens whole between regions", False), ("sequence parallel", True))
}
everything = by_ranks["tokens whole between regions"][0]
# A norm keeps what comes in, the same divided by its size, what goes out, and one size a token.
between = 2 * BATCH * 32 * (3 * 64 + 1) * 4
viz.curves(
    worlds,
    measured={name: [each / 1e6 for each in values] for name, values in by_ranks.items()},
    predicted={
        "tokens whole between regions": lambda n: (between + (everything - between) / n) / 1e6,
        "sequence parallel": lambda n: everything / n / 1e6,
    },
    xlabel="ranks",
    ylabel="kept for the backward pass [MB]",
    title="Activations of one layer on one rank",
)

# %% tags=["sequence-gradient"]
error = (md.launch(whole_gradient, ranks=4, args=(True,))[0] - one).norm() / one.norm()
print(f"sequence parallel on 4 ranks: relative error of the whole gradient {error:.1e}")

# %% [markdown]
# ### Why inside one machine
#
# Gradients of data parallelism hide behind the backward pass. Can these sums hide? What is computed next is a norm of
# the sum, so it has to be there. Now paced: four layers on one rank; on four ranks of one machine; and on four ranks of
# two machines, with a slower link between.

# %% tags=["parts-of-a-layer"]
FORWARD_S, BACKWARD_S = 0.040, 0.080  # a layer on one chip
INSIDE = md.Link(alpha_s=0.1e-3, bytes_per_s=100e6)
BETWEEN = md.Link(alpha_s=2e-3, bytes_per_s=5e6)
ONE_MACHINE = md.Cluster(machines=1, chips=4, inside=INSIDE)
TWO_MACHINES = md.Cluster(machines=2, chips=2, inside=INSIDE, between=BETWEEN)
PACED = with_layers(4)
payload = 4 * BATCH * 32 * 64


def sum_s(link):
    return md.cost.seconds("all_reduce", payload, 4, link)


print(
    f"4 layers on one chip: forward {FORWARD_S * 1e3:.0f} ms each, "
    f"backward {BACKWARD_S * 1e3:.0f} ms"
)
print(f"cut over 4 ranks, each computes a quarter of that; a sum has {payload:,} bytes")
print(f"inside a machine: alpha 0.1 ms, 100 MB/s, a sum over 4 ranks {sum_s(INSIDE) * 1e3:.1f} ms")
print(f"between machines: alpha 2 ms, 5 MB/s, a sum over 4 ranks {sum_s(BETWEEN) * 1e3:.1f} ms")

# %% tags=["predict-paced"]
predict("two-machines-here")


# %% tags=["paced-layers"]
def pace_region(last, world):
    """Let a region take its modelled time, before its sum forward and before the one going back."""

    def forward(*_):
        with world.compute("forward", seconds=FORWARD_S / 2 / world.size):
            pass

    def backward(grad):
        with world.compute("backward", seconds=BACKWARD_S / 2 / world.size):
            pass

    last.register_forward_pre_hook(forward)
    last.register_forward_hook(lambda module, args, out: out.register_hook(backward) and None)


def timed_layers(world, steps=3):
    """(seconds of forward and backward pass, timeline) of the quickest step on this rank."""
    torch.set_num_threads(1)  # the same for any number of ranks
    model = md.tensor_parallel(md.GPT(PACED, seed=0), world)
    for block in model.blocks:
        pace_region(block.attn.out, world)
        pace_region(block.mlp.down, world)
    found = []
    for step in range(steps):
        tokens, _ = text.batch(step)
        world.barrier()
        world.recorder.clear()
        start = time.perf_counter()
        model(tokens).sum().backward()  # no loss, whose small sums are not the subject
        found.append((time.perf_counter() - start, world.recorder.timeline()))
    return min(found, key=lambda each: each[0])


CASES = {
    "one rank": (1, ONE_MACHINE),
    "four, one machine": (4, ONE_MACHINE),
    "four, two machines": (4, TWO_MACHINES),
}
paced = {
    name: md.launch(timed_layers, ranks=ranks, pace=pace, check=False)[0]
    for name, (ranks, pace) in CASES.items()
}
compare(
    "two-machines-here",
    paced["four, two machines"][0] * 1e3,
    title="Four layers on four ranks of two machines",
    axis="forward and backward",
    paced=True,
)

# %% tags=["figure-paced"]
sums = 4 * PACED.layers + 2
computing_s = PACED.layers * (FORWARD_S + BACKWARD_S)
predicted = {
    "one rank": (computing_s, 0.0),
    "four, one machine": (computing_s / 4, sums * sum_s(INSIDE)),
    "four, two machines": (computing_s / 4, sums * sum_s(BETWEEN)),
}
bars = {}
for name, (computing, waiting) in predicted.items():
    seconds, timeline = paced[name]
    lanes = [
        sum(span.seconds for span in timeline.spans if span.lane == lane)
        for lane in ("compute", "comm")
    ]
    if CASES[name][0] == 1:
        lanes[1] = 0.0  # one rank sends nothing: its calls are this computer's own time
    bars[f"{name}: predicted"] = computing, waiting
    bars[f"{name}: paced"] = *lanes, max(0.0, seconds - sum(lanes))
title = "A model of four layers, forward and backward"
reveal("two-machines-here", viz.layer_times(bars, title, paced=True))

# %% tags=["paced-ratios"]
lines = ["how many times as fast as one rank:"]
for name in list(CASES)[1:]:
    formula = sum(predicted["one rank"]) / sum(predicted[name])
    lines.append(
        f"  {name:18s} predicted {formula:.1f}, paced {paced['one rank'][0] / paced[name][0]:.1f}"
    )
reveal("two-machines-here", "\n".join(lines))

# %% tags=["timeline-paced"]
figure = viz.timelines({f"{name}, rank 0": paced[name][1] for name in CASES})
reveal("two-machines-here", figure)

# %% tags=["unpaced-layers"]
lines = [f"unpaced, {os.cpu_count()} cores:"]
for ranks in (1, 4):
    seconds = md.launch(timed_layers, ranks=ranks, check=False)[0][0]
    lines.append(f"  {ranks} rank(s): forward and backward {seconds * 1e3:.0f} ms")
print("\n".join(lines))

# %% [markdown]
# Predicted, four ranks of one machine are three times as fast as one. Paced it is less: grey is what this computer itself
# needs to run the processes, and no cluster would. Over two machines they are *slower than one rank alone*, paced and
# predicted: eighteen times everybody waits for the link between. Unpaced the grey part is all there is: the model is
# small, and starting its many operations takes longest.
#
# Now without pacing, by formula: a layer of width 8192 on eight H100, where it would go over an NVLink, over PCIe, over
# InfiniBand, and over an Ethernet of 100 Gbit/s. The numbers of chips and links are from
# `minidist/plan/hardware.py`, with their sources. Computing runs at half the peak.

# %% tags=["figure-links"]
viz.links(ranks=8, tokens=8192, width=8192)

# %% [markdown]
# Computing grows with T D^2 and the sums with T D: a wider layer computes more between two sums; with more tokens both
# grow alike. More ranks leave less to compute between sums of the same size. So each link has a width below which cutting
# does not pay, and tensor parallelism is for the 4 or 8 chips of one machine that NVLink joins.
#
# ### Explore
#
# Eight H100 and 8,192 tokens: from which width on is a layer over PCIe faster than on one chip? How large is the share of
# the sums over NVLink at that width? And at width 8192: how much faster is NVLink with 64 ranks than with eight, if it
# joined so many?

# %% tags=["explore-links"]
viz.links_explorer()

# %% [markdown]
# ## Concept cards (15 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong.

# %% tags=["card-after-the-columns"]
card("after-the-columns")

# %% tags=["card-rows-by-hand"]
card("rows-by-hand")

# %% tags=["card-steps-of-the-pair"]
card("steps-of-the-pair")

# %% tags=["card-sizes-that-fit"]
card("sizes-that-fit")

# %% tags=["card-bytes-of-a-layer"]
card("bytes-of-a-layer")

# %% tags=["card-entry-left-out"]
card("entry-left-out")

# %% tags=["card-with-sequence-parallelism"]
card("with-sequence-parallelism")

# %% tags=["card-gradients-may-wait"]
card("gradients-may-wait")

# %% [markdown]
# ## Why not?
#
# - **When does communication bind?** Always a little: a layer stops four times, and nothing can be computed meanwhile
#   but gradients of weights. It binds when the link is slow, the layer narrow or the ranks many. Tricks remain: the
#   package sums the gradient of a region's input while it computes those of the weights.
# - **What breaks?** Sizes that do not divide, heads above all. Every product gets smaller with every rank, and small
#   products use a chip badly. One slow rank stops all at every sum.
# - **What then?** If the model is too deep rather than too wide, cut it between layers: a message a stage instead of
#   four sums a layer. That is pipeline parallelism. Where each rank has samples enough, ZeRO sends weights, once
#   a layer and pass and ahead of time. Large runs combine all three, with tensor parallelism on the innermost axis.

# %% [markdown]
# ## Test (25 minutes)
#
# Answers are kept as you give them; the cell below the test submits them and then explains every one. A calculator, or a
# cell of your own, is welcome.

# %% tags=["quiz"]
quiz("05")

# %% tags=["submit"]
submit("05")

# %% [markdown]
# ## Where to go next
#
# - Exercises: `practice_ps05_tensor_parallelism.ipynb`, beside this notebook in `workspace/`: a layer cut by columns, by
#   rows, attention by heads, the loss by vocabulary, and sequence parallelism.
# - The files, after that: `minidist/autograd.py` has the conjugate pairs, `minidist/parallel/tensor.py` the cutting,
#   `minidist/sharded/layers.py` the layers it makes.
# - Lab 05 (`labs/05_tensor`): tensor parallelism from one to eight ranks, inside a machine and across two.
# - Papers: Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053; Korthikanti et al., *Reducing Activation Recomputation
#   in Large Transformer Models*, 2022, arXiv:2205.05198; Narayanan et al., *Efficient Large-Scale Language Model
#   Training on GPU Clusters*, 2021, arXiv:2104.04473.
