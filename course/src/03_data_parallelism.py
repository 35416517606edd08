# %% [markdown] tags=["head"]
# # 03 Data parallelism
#
# **The question.** Copy the model to every rank, give each a part of the batch, average the gradients: when exactly, at
# what cost, and is it the same training?
#
# **Ten concepts**
#
# - identical replicas
# - when the averaging happens (after backward, before the optimizer)
# - averaging gradients equals one big batch (and when not: unequal token counts)
# - twice the parameters per step
# - buckets
# - overlap with the backward pass
# - accumulation without synchronisation
# - throughput scales, memory does not
# - global batch and learning rate
# - uneven inputs
#
# **Three sittings**: 1 *Averaging* 25 minutes, 2 *Buckets and overlap* 25 minutes, 3 *What it costs and what it does
# not solve* 25 minutes. Then the cards and a test, 40 minutes.

# %% tags=["setup"]
import os
import statistics
import time

import torch
import torch.nn.functional as F

import minidist as md
from grading import card, compare, predict, quiz, reveal, review, submit
from minidist import viz

torch.set_num_threads(1)  # the ranks need the cores

# %% tags=["review"]
review("03")

# %% [markdown]
# ## Sitting 1: Averaging (25 minutes)
#
# Before anything runs, commit to two numbers.

# %% tags=["predict-token-mean"]
predict("batch-loss-here")

# %% tags=["predict-traffic"]
predict("traffic-here")

# %% [markdown]
# ### The idea
#
# Every rank holds the whole model: a **replica**. A step has four parts. Only one of them talks, and it sits between
# the backward pass and the optimizer:

# %% tags=["picture-step"]
step = md.data_parallel_step(
    forward_s=[0.01] * 4,
    backward_s=[0.02] * 4,
    gradient_nbytes=[1e6] * 4,
    all_reduce_s=lambda nbytes: nbytes / 80e6,
    bucket_nbytes=4e6,
    overlap=False,
    update_s=0.015,
    ranks=2,
)
viz.timeline(step, "One step on two ranks: forward, backward, average, update")

# %% [markdown]
# Replicas that start **identical** and apply identical gradients stay identical. Nothing ever sends a weight again.
#
# ### The code
#
# All that data parallelism needs, from the package itself, are the few lines of `average_gradients`. They are folded,
# because assignment ps03 begins with writing them.

# %% tags=["code-average"]
viz.show(md.average_gradients, folded="exercise 03.1 asks for this")

# %% [markdown]
# ### Identical replicas
#
# Each rank builds its model from another seed here, as happens when someone forgets to set it. The wrapper sends rank
# 0's weights to everyone once, at the start. Then each step keeps the replicas together, although every rank saw other
# data.

# %% tags=["identical-replicas"]
CONFIG = md.GPTConfig(layers=2, dim=32, heads=4, seq=32)
text = md.stdlib_tokens(seed=0, seq=32, batch=8)


def spread(model, world):
    """The largest difference that any weight has between two ranks."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    largest, smallest = world.all_reduce(flat.clone(), op="max"), world.all_reduce(flat, op="min")
    return (largest - smallest).max().item()


def start_and_train(world, steps):
    model = md.GPT(CONFIG, seed=world.rank).double()
    different = spread(model, world)
    replica = md.DataParallel(model, world)
    wrapped = spread(model, world)
    optimizer = md.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        tokens, targets = text.batch(step, world.rank, world.size)
        md.token_loss(replica(tokens), targets, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.check_replicas()  # raises, and names what differs, if they have drifted apart
    return different, wrapped, spread(model, world)


different, wrapped, trained = md.launch(start_and_train, ranks=4, args=(5,))[0]
print(
    f"replicas differ by {different:.3f} as built, by {wrapped} once wrapped, "
    f"by {trained} after training"
)

# %% [markdown]
# ### When to average
#
# After the backward pass, because there is no gradient before it; before the optimizer, because afterwards every
# replica has already moved its own way. The cell trains three times and looks how far the replicas are apart.


# %% tags=["when-to-average"]
def train_averaging(world, when, steps=5):
    model = md.GPT(CONFIG, seed=0).double()
    optimizer = md.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        tokens, targets = text.batch(step, world.rank, world.size)
        md.token_loss(model(tokens), targets, world).backward()
        if when == "before the optimizer":
            md.average_gradients(model, world)
        optimizer.step()
        if when == "after the optimizer":
            md.average_gradients(model, world)
        optimizer.zero_grad()
    return spread(model, world)


for when in ("before the optimizer", "after the optimizer", "never"):
    print(
        f"averaged {when + ':':21s} replicas differ by "
        f"{md.launch(train_averaging, ranks=4, args=(when,))[0]:.2e}"
    )

# %% [markdown]
# ### One big batch, and when not
#
# Is the average of the gradients the gradient of the whole batch? If every rank has as many tokens as every other: yes.
# If not, it depends on what is divided by what. Here is the run that you predicted. Each rank reports the mean of its
# own tokens; then the loss as this package defines it, the **sum of token losses over the number of tokens of all
# ranks**.


# %% tags=["token-mean"]
def two_means(world):
    losses = [torch.tensor([4.0]), torch.tensor([2.0, 2.0, 2.0])][world.rank].double()
    # class 0 has this loss
    logits = torch.stack([torch.zeros_like(losses), torch.log(torch.expm1(losses))], dim=-1)
    targets = torch.zeros(len(losses), dtype=torch.int64)
    mean_of_means = world.all_reduce(F.cross_entropy(logits, targets), op="mean")
    by_the_rule = world.all_reduce(md.token_loss(logits, targets, world), op="mean")
    return mean_of_means.item(), by_the_rule.item()


mean_of_means, by_the_rule = md.launch(two_means, ranks=2)[0]
compare(
    "batch-loss-here",
    by_the_rule,
    title="The loss of four tokens on two ranks",
    axis="loss per token",
)
reveal("batch-loss-here", f"the mean of the ranks' own means would be {mean_of_means:.2f}")

# %% tags=["code-token-loss"]
viz.show(md.token_loss)

# %% [markdown]
# Averages are over `world.size` ranks, so each rank's loss is its own sum times `world.size`, over the tokens of all.
# The same holds for gradients. The next cell compares every gradient with one process's on the whole batch, in float64.
# Samples have different lengths, so ranks have different numbers of tokens.


# %% tags=["gradients-equal"]
def ragged_batch():
    """A batch whose sample i has only its first few targets, the more the larger i; -100: none."""
    tokens, targets = text.batch(0)
    targets = targets.clone()
    for i in range(len(targets)):
        targets[i, 4 * (i + 1) :] = -100
    return tokens, targets


def mean_of_own(logits, targets, world):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def gradient(world, loss_of):
    tokens, targets = ragged_batch()
    mine = slice(world.rank, None, world.size)
    model = md.GPT(CONFIG, seed=0).double()
    loss_of(model(tokens[mine]), targets[mine], world).backward()
    md.average_gradients(model, world)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


model = md.GPT(CONFIG, seed=0).double()
tokens, targets = ragged_batch()
F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()
whole = torch.cat([p.grad.flatten() for p in model.parameters()])
for name, loss_of in (("sum over all tokens", md.token_loss), ("mean of own tokens", mean_of_own)):
    error = (md.launch(gradient, ranks=4, args=(loss_of,))[0] - whole).norm() / whole.norm()
    print(f"{name:20s} relative error of the averaged gradient {error:.1e}")

# %% [markdown]
# The second line is no bug of the averaging: it answers another question. The loss still goes down, so nobody notices;
# it is found by comparing gradients, not by looking at a loss curve.
#
# ### Twice the parameters per step
#
# An all-reduce of the gradients by a ring, counted message by message:


# %% tags=["measure-traffic"]
def traffic(world):
    model = md.GPT(CONFIG, seed=0)
    tokens, targets = text.batch(0, world.rank, world.size)
    md.token_loss(model(tokens), targets, world).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    world.recorder.clear()
    md.algorithms.ring_all_reduce(flat, world)
    return world.recorder.bytes_sent() / sum(p.nbytes for p in model.parameters())


worlds = [1, 2, 3, 4, 6, 8]
factors = {n: md.launch(traffic, ranks=n)[0] for n in worlds}
compare(
    "traffic-here", factors[4], title="Sent per step on four ranks", axis="bytes sent by one rank"
)

# %% tags=["figure-traffic"]
figure = viz.curves(
    worlds,
    measured={"ring": list(factors.values())},
    predicted={"ring": lambda n: 2 * (n - 1) / n, "twice the parameters": lambda n: 2},
    xlabel="ranks",
    ylabel="sent per step [parameter bytes]",
    title="About twice the parameters, whatever the number of ranks",
)
reveal("traffic-here", figure)

# %% [markdown]
# ## Sitting 2: Buckets and overlap (25 minutes)
#
# ### Buckets
#
# `average_gradients` makes one all-reduce for each parameter, and each pays its latency. **Buckets** put gradients side
# by side into a few flat tensors and send those. The cell counts the calls, and times the averaging on a *paced*
# cluster: messages are really sent, and take the time that they would take over the link described.

# %% tags=["buckets"]
LINK = md.Link(alpha_s=1e-3, bytes_per_s=12.5e6)
CLUSTER = md.Cluster(machines=1, chips=8, inside=LINK)
DEEP = md.GPTConfig(layers=8, dim=64, heads=4, seq=32)


def ring_s(nbytes, ranks=4):
    """Seconds of a ring all-reduce over this link, as lesson 02 priced it."""
    return 2 * (ranks - 1) * (LINK.alpha_s + nbytes / ranks / LINK.bytes_per_s)


def time_averaging(world, bucket_mb):
    """(all-reduces, seconds) of averaging the gradients of one step; bucket_mb None: one by one."""
    model = md.GPT(DEEP, seed=0)
    replica = (
        model
        if bucket_mb is None
        else md.DataParallel(model, world, bucket_mb=bucket_mb, overlap=False)
    )
    tokens, targets = text.batch(0, world.rank, world.size)
    loss = md.token_loss(replica(tokens), targets, world)
    world.barrier()
    world.recorder.clear()
    loss.backward()
    if bucket_mb is None:
        md.average_gradients(model, world)
    calls = world.recorder.calls
    return len(calls), max(call.end for call in calls) - calls[0].start


SIZES_MB = [0.05, 0.1, 0.25, 1]
averaging = {}
for mb in [None, *SIZES_MB]:
    ranks = md.launch(time_averaging, ranks=4, args=(mb,), pace=CLUSTER, check=False)
    calls, seconds = ranks[0][0], max(seconds for _, seconds in ranks)
    averaging[mb] = calls, seconds
    name = "one by one" if mb is None else f"buckets of {mb} MB"
    print(f"{name:20s} {calls:3d} all-reduces, {seconds * 1e3:4.0f} ms (paced)")

# %% tags=["figure-buckets"]
sizes = [p.nbytes for p in md.GPT(DEEP).parameters()]


def averaging_s(calls):
    """`calls` all-reduces that carry all gradients: the latency of each, and the bytes once."""
    return calls * ring_s(0) + ring_s(sum(sizes)) - ring_s(0)


viz.curves(
    SIZES_MB,
    measured={
        "buckets": [averaging[mb][1] * 1e3 for mb in SIZES_MB],
        "one by one": [averaging[None][1] * 1e3 for _ in SIZES_MB],
    },
    predicted={
        "buckets": [averaging_s(averaging[mb][0]) * 1e3 for mb in SIZES_MB],
        "one by one": [averaging_s(len(sizes)) * 1e3 for _ in SIZES_MB],
    },
    xlabel="bucket size [MB]",
    ylabel="averaging [ms]",
    title="Averaging the gradients of one step on four ranks",
    paced=True,
    log="x",
)

# %% [markdown]
# So one bucket as large as the model would be best? Not once the backward pass can hide them.
#
# ### Overlap with the backward pass
#
# The backward pass begins at the last layer. When it has passed a layer, that layer's gradients are complete; they can
# travel while the layers below are still being computed. A bucket leaves as soon as its last gradient is there. This is
# where that happens:

# %% tags=["code-overlap"]
viz.show(
    md.DataParallel,
    "_gradient_ready",
    "_launch_full_buckets",
    "_finish",
    folded="exercises 03.2 and 03.3 ask for this",
)

# %% tags=["parts-of-a-step"]
# seconds of a layer forward, a layer backward, the optimizer
FORWARD_S, BACKWARD_S, UPDATE_S = 0.020, 0.040, 0.020
BUCKET_MB, LOCAL_BATCH = 0.214, 2  # a bucket holds the gradients of one layer
deep = md.GPT(DEEP)
embedding = deep.embed.weight.nbytes  # also the output layer's, so complete only at the very end
layers = [sum(p.nbytes for p in block.parameters()) for block in deep.blocks]

print(
    f"{len(layers)} layers: forward {FORWARD_S * 1e3:.0f} ms each, "
    f"backward {BACKWARD_S * 1e3:.0f} ms each"
)
print(f"averaging over 4 ranks: {ring_s(layers[0]) * 1e3:.0f} ms for the gradients of a layer,")
print(
    f"    and {ring_s(embedding) * 1e3:.0f} ms for the embedding, "
    "whose gradient is complete last of all"
)
print(f"optimizer: {UPDATE_S * 1e3:.0f} ms")

# %% tags=["predict-overlap"]
predict("overlap-step-here")


# %% tags=["overlap-run"]
def timed_steps(world, overlap, steps=3):
    """Timeline of the last step and the median seconds of a step, the first one not counted."""
    torch.set_num_threads(1)  # the same for any number of ranks
    # as much for each rank, however many
    data = md.stdlib_tokens(seed=0, seq=32, batch=LOCAL_BATCH * world.size)
    model = md.GPT(DEEP, seed=0)
    replica = md.DataParallel(model, world, bucket_mb=BUCKET_MB, overlap=overlap)
    optimizer = md.SGD(model.parameters(), lr=0.1)
    for i, block in enumerate(model.blocks):
        md.name_layer(f"{i}", block, world, forward_s=FORWARD_S, backward_s=BACKWARD_S)
    seconds = []
    for step in range(steps):
        tokens, targets = data.batch(step, world.rank, world.size)
        world.barrier()
        world.recorder.clear()
        start = time.perf_counter()
        md.token_loss(
            replica(tokens), targets, world, tokens=tokens.numel() * world.size
        ).backward()
        with world.compute("update", seconds=UPDATE_S):
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return world.recorder.timeline(), statistics.median(seconds[1:])


def run_steps(overlap, pace=None, ranks=4):
    results = md.launch(timed_steps, ranks=ranks, args=(overlap,), pace=pace, check=False)
    first, *others = (timeline for timeline, _ in results)
    return first.merge(others), max(seconds for _, seconds in results)


runs = {
    (kind, overlap): run_steps(overlap, pace)
    for kind, pace in (("paced", CLUSTER), ("unpaced", None))
    for overlap in (False, True)
}

# %% [markdown]
# Your prediction, and the same step predicted from its parts: forward, backward, buckets that leave when they are full.

# %% tags=["overlap-predicted"]
predicted = {
    overlap: md.data_parallel_step(
        [0, *[FORWARD_S] * 8],
        [0, *[BACKWARD_S] * 8],
        [embedding, *layers],
        ring_s,
        BUCKET_MB * 1e6,
        overlap=overlap,
        update_s=UPDATE_S,
    )
    for overlap in (False, True)
}
step_ms = runs["paced", True][1] * 1e3
compare(
    "overlap-step-here", step_ms, title="A step with overlap", axis="time of a step", paced=True
)

# %% [markdown]
# ### The timeline of a step
#
# Rank 0 of four. The upper band is computation, the hatched lower one communication. First the prediction, then the
# paced run, where each layer and each message takes its modelled time. Then the same program unpaced: as fast as this
# machine goes.


# %% tags=["timeline-paced"]
def only_rank_0(timeline):
    spans = [span for span in timeline.spans if span.rank == 0]
    return md.Timeline(spans, paced=timeline.paced, predicted=timeline.predicted)


figure = viz.timelines(
    {
        "without overlap": predicted[False],
        "with overlap": predicted[True],
        "without overlap, rank 0": only_rank_0(runs["paced", False][0]),
        "with overlap, rank 0": only_rank_0(runs["paced", True][0]),
    }
)
reveal("overlap-step-here", figure)

# %% tags=["timeline-unpaced"]
viz.timelines(
    {
        f"{name} overlap, unpaced": runs["unpaced", on][0]
        for name, on in (("without", False), ("with", True))
    }
)

# %% tags=["overlap-result"]
lines = [f"4 ranks, {os.cpu_count()} cores"]
for kind in ("paced", "unpaced"):
    without, with_it = runs[kind, False], runs[kind, True]
    lines.append(
        f"{kind:8s} step {without[1] * 1e3:5.0f} ms without overlap, "
        f"{with_it[1] * 1e3:5.0f} ms with it: {without[1] / with_it[1]:.2f} times as fast; "
        f"hidden: {with_it[0].overlap:.0%} of the communication"
    )
reveal("overlap-step-here", "\n".join(lines))

# %% [markdown]
# Paced, the averaging disappears behind the backward pass, all but what the last bucket takes. Unpaced, and with more
# ranks than cores, it gains little or loses: sending costs the processor's time as well, and that is what the ranks
# queue for. On a cluster a chip computes while another part of the hardware sends. That is what overlap needs, and what
# the paced run stands for.
#
# ### Explore
#
# How large should a bucket be? Too small, and latency adds up; too large, and the last one leaves late. When is nothing
# hidden, whatever the bucket?

# %% tags=["explore-overlap"]
viz.overlap_explorer()

# %% [markdown]
# ## Sitting 3: What it costs and what it does not solve (25 minutes)
#
# ### Accumulation without synchronisation
#
# A batch too large for one pass is cut into micro-batches whose gradients add up. Averaging after each of them would
# send as much every time, and all but the last for nothing: the sum of averages is the average of sums. Inside
# `no_sync` gradients stay local.


# %% tags=["accumulation"]
def accumulate(world, sync_each, micro_batches=4):
    replica = md.DataParallel(md.GPT(CONFIG, seed=0).double(), world)
    pieces = [text.batch(k, world.rank, world.size) for k in range(micro_batches)]
    tokens = md.global_tokens(
        [targets for _, targets in pieces], world
    )  # the divisor: the tokens of the whole step
    world.recorder.clear()
    for k, (inputs, targets) in enumerate(pieces):
        if sync_each or k == micro_batches - 1:
            md.token_loss(replica(inputs), targets, world, tokens=tokens).backward()
        else:
            with replica.no_sync():
                md.token_loss(replica(inputs), targets, world, tokens=tokens).backward()
    flat = torch.cat([p.grad.flatten() for p in replica.parameters()])
    return world.recorder.bytes_sent(), flat


once, gradient_once = md.launch(accumulate, ranks=4, args=(False,))[0]
each, gradient_each = md.launch(accumulate, ranks=4, args=(True,))[0]
print(
    f"bytes sent by a rank: {once:,} averaging once, {each:,} averaging each time: "
    f"{each / once:.1f} times"
)
print(
    "relative difference of the gradients: "
    f"{(gradient_once - gradient_each).norm() / gradient_once.norm():.1e}"
)

# %% [markdown]
# ### Throughput scales, memory does not
#
# Each rank brings its own part of the batch, so more ranks get through more tokens per second. But each holds
# everything: parameters, gradients, optimizer state. A model that does not fit on one rank does not fit on a thousand.
# Paced, with the layer times from above:


# %% tags=["throughput-memory"]
def state_bytes(world):
    """Bytes of parameters, gradients and AdamW's two moments that this rank holds after a step."""
    model = md.GPT(DEEP, seed=0)
    replica = md.DataParallel(model, world)
    optimizer = md.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = text.batch(0, world.rank, world.size)
    md.token_loss(replica(tokens), targets, world).backward()
    optimizer.step()
    held = [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    return sum(t.nbytes for p in model.parameters() for t in (p, p.grad)) + sum(
        t.nbytes for t in held
    )


def throughput_and_memory(world):
    """(tokens per second, bytes of training state) of this rank."""
    _, seconds = timed_steps(world, overlap=True, steps=2)
    return LOCAL_BATCH * 32 / seconds, state_bytes(world)


worlds = [1, 2, 4, 8]
by_world = [md.launch(throughput_and_memory, ranks=n, pace=CLUSTER, check=False) for n in worlds]
rates = [sum(rate for rate, _ in ranks) for ranks in by_world]
held = [max(nbytes for _, nbytes in ranks) for ranks in by_world]
viz.curves(
    worlds,
    measured={
        "tokens per second": [rate / rates[0] for rate in rates],
        "memory of a rank": [nbytes / held[0] for nbytes in held],
    },
    predicted={"tokens per second": lambda n: n, "memory of a rank": lambda n: 1},
    xlabel="ranks",
    ylabel="compared with one rank",
    title="More ranks: throughput and memory",
    paced=True,
)

# %% [markdown]
# ### Global batch and learning rate
#
# If every rank keeps its batch, the **global batch** grows with the number of ranks, and an epoch has fewer optimizer
# steps. With the old learning rate the weights then move less. Scaling the rate with the batch makes up for it (Goyal
# et al. 2017), up to a point: beyond a critical batch size more samples per step bring less (McCandlish et al. 2018).
# The cell spends the same number of samples in four ways. A step of *n* ranks is exactly one step on a batch *n* times
# as large, as seen above, so one process is enough to show it.

# %% tags=["batch-and-rate"]
RATE, LOCAL, SAMPLES = 0.05, 8, 640


def loss_after(batch, rate):
    data = md.stdlib_tokens(seed=0, seq=32, batch=batch)
    model = md.GPT(CONFIG, seed=0)
    optimizer = md.SGD(model.parameters(), lr=rate)
    for step in range(SAMPLES // batch):
        tokens, targets = data.batch(step)
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens, targets = md.stdlib_tokens(seed=1, seq=32, batch=64).batch(0)
    with torch.no_grad():
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()


for ranks, factor in ((1, 1), (4, 1), (4, 4), (16, 16)):
    steps = SAMPLES // (LOCAL * ranks)
    loss = loss_after(LOCAL * ranks, RATE * factor)
    print(
        f"{ranks:2d} ranks: {steps:2d} steps of {LOCAL * ranks:3d} samples "
        f"at rate {RATE * factor:.2f}: loss {loss:.2f}"
    )

# %% [markdown]
# A schedule counts optimizer steps, not samples or micro-batches: with the global batch its length changes too. Whether
# to scale the rate is a choice of training, not a rule of data parallelism; the package never does it behind your back.
#
# ### Uneven inputs
#
# Ranks do not always have equally many batches. Rank 0 has three here, rank 1 two. After two steps rank 1 leaves the
# loop, and rank 0 waits in an all-reduce that never comes:

# %% tags=["uneven-deadlock"]
BATCHES = [3, 2]


def train_uneven(world, join):
    replica = md.DataParallel(md.GPT(CONFIG, seed=0).double(), world)
    optimizer = md.SGD(replica.parameters(), lr=0.5)

    def loop():
        for step in range(BATCHES[world.rank]):
            tokens, targets = text.batch(step, world.rank, world.size)
            md.token_loss(replica(tokens), targets, world).backward()
            optimizer.step()
            optimizer.zero_grad()

    if join:
        with replica.join(step=optimizer.step):
            loop()
    else:
        loop()
    return sum(p.sum().item() for p in replica.parameters())


try:
    md.launch(train_uneven, ranks=2, args=(False,))
except md.LaunchError as error:
    print(error)

# %% [markdown]
# Inside `join`, a rank that is out of data stays and contributes zeros until the last one is done. The loss still
# divides by the tokens that there are, so those steps are right.

# %% tags=["uneven-join"]
print("sum of all weights on each rank:", md.launch(train_uneven, ranks=2, args=(True,)))

# %% [markdown]
# ## Concept cards (15 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong.

# %% tags=["card-why-replicas-agree"]
card("why-replicas-agree")

# %% tags=["card-order-of-a-step"]
card("order-of-a-step")

# %% tags=["card-weight-of-a-token"]
card("weight-of-a-token")

# %% tags=["card-dp-traffic"]
card("dp-traffic")

# %% tags=["card-latency-of-buckets"]
card("latency-of-buckets")

# %% tags=["card-never-hidden"]
card("never-hidden")

# %% tags=["card-all-inside-no-sync"]
card("all-inside-no-sync")

# %% tags=["card-does-not-fit"]
card("does-not-fit")

# %% [markdown]
# ## Why not?
#
# - **When does communication bind?** When averaging a layer takes longer than its backward pass. Bytes per step do not
#   depend on the batch; the computation does. So a rank with too small a batch cannot hide them, and adding ranks at a
#   fixed global batch stops paying.
# - **What breaks?** The global batch grows with the ranks and learns less per token at some point. Every rank waits for
#   the slowest one. And nothing gets smaller: a thousand ranks hold a thousand copies of the same parameters, gradients
#   and moments.
# - **What then?** If the copies are the problem, cut them: each rank keeps a part of the state and fetches the rest
#   when it needs it. That is ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

# %% [markdown]
# ## Test (25 minutes)
#
# Answers are kept as you give them; the cell below the test submits them and then explains every one. A calculator, or a
# cell of your own, is welcome.

# %% tags=["quiz"]
quiz("03")

# %% tags=["submit"]
submit("03")

# %% [markdown]
# ## Where to go next
#
# - Exercises: `practice_ps03_data_parallelism.ipynb`, beside this notebook in `workspace/`: the averaging built four
#   times, naive, in buckets, overlapped, and with accumulation.
# - The file, after that: `minidist/parallel/data.py`, all three versions in one place.
# - Lab 03 (`labs/03_scaling`): scaling from one to eight ranks, on CPU or GPUs, with a plot of what you measured.
# - Papers: Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020,
#   arXiv:2006.15704; Goyal et al., *Accurate, Large Minibatch SGD*, 2017, arXiv:1706.02677; McCandlish et al., *An
#   Empirical Model of Large-Batch Training*, 2018, arXiv:1812.06162.
