# %% [markdown] tags=["head"]
# # 04 ZeRO and FSDP
#
# **The question.** Plain data parallelism keeps the same training state on every rank. What if each rank keeps a slice
# of it: does it still train the same, how much memory is left, and what has to be sent instead?
#
# **Twelve concepts**
#
# - the mathematics does not change
# - nearly free (stages 1 and 2 move no more, stage 3 half as much again)
# - redundancy of plain data parallelism
# - stage 1, 2, 3
# - gather just before use, release after
# - traffic 2/2/2/3
# - memory problem into bandwidth problem
# - prefetch
# - master weights
# - hybrid sharding
# - offload
# - collective state dict
#
# **Three sittings**: 1 *Who keeps what* 25 minutes, 2 *What is sent, and when* 25 minutes, 3 *Precision, machines,
# saving* 25 minutes. Then the cards and a test, 45 minutes.

# %% tags=["setup"]
import hashlib
import os

import torch

import minidist as md
from grading import card, compare, predict, quiz, reveal, review, submit
from minidist import viz

torch.set_num_threads(1)  # the ranks need the cores

# %% tags=["review"]
review("04")

# %% [markdown]
# ## Sitting 1: Who keeps what (25 minutes)
#
# The model of this sitting has 4 layers of width 64. Before anything runs, commit to a number. It is about **stage 2** of
# ZeRO: every rank keeps all parameters, but of the gradients and of the optimizer's state only a slice.

# %% tags=["the-model"]
CONFIG = md.GPTConfig(layers=4, dim=64, heads=4, seq=32)
text = md.stdlib_tokens(seed=0, seq=32, batch=24)
parameters = sum(p.numel() for p in md.GPT(CONFIG).parameters())
print(f"{parameters:,} parameters, {4 * parameters:,} bytes in float32")

# %% tags=["predict-memory"]
predict("stage-2-bytes-here")

# %% [markdown]
# ### Redundancy
#
# Lesson 03 ended with a thousand copies. Here they are counted: four replicas take one step with AdamW, and each rank
# reports a fingerprint of every tensor it holds. Equal fingerprints are equal bits.


# %% tags=["redundancy"]
def fingerprints(world):
    """Of every tensor of training state on this rank: (what it is, bytes, fingerprint)."""
    model = md.GPT(CONFIG, seed=0)
    replica = md.DataParallel(model, world)
    optimizer = md.AdamW(model.parameters(), lr=1e-3)
    tokens, targets = text.batch(0, world.rank, world.size)
    md.token_loss(replica(tokens), targets, world).backward()
    optimizer.step()
    state = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "moments": list(md.optimizer_tensors(optimizer)),
    }
    return [
        (
            f"{kind} {i}",
            tensor.nbytes,
            hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest(),
        )
        for kind, tensors in state.items()
        for i, tensor in enumerate(tensors)
    ]


ranks = md.launch(fingerprints, ranks=4)
for kind in ("parameters", "gradients", "moments"):
    all_of_them = [each for rank in ranks for each in rank if each[0].startswith(kind)]
    together, different = (
        sum(each[1] for each in all_of_them),
        sum(each[1] for each in set(all_of_them)),
    )
    print(
        f"{kind:11s} {together:10,} bytes on four ranks together, {different:9,} of them different"
    )

# %% [markdown]
# Three quarters are copies, gradients included: they differ while each rank computes them, and are equal once averaged.
#
# ### The idea
#
# **ZeRO** (Rajbhandari et al. 2020) keeps each number on one rank only. The optimizer updates each element by itself, so
# it can be cut: each rank updates a slice, then the slices are gathered (**stage 1**). For its slice a rank needs the
# summed gradient of that slice and no other (**stage 2**). Parameters themselves can rest as slices too, if each layer
# is gathered just before it is used and released right after (**stage 3**, in PyTorch *fully sharded data parallel*).
# The picture shows what each of four ranks keeps between steps; grey is what all of them keep.

# %% tags=["picture-kept"]
viz.kept(ranks=4)

# %% [markdown]
# ### The code
#
# Which state is cut is all that tells the stages apart; memory follows from it. This is the function that the run below
# is compared with:

# %% tags=["code-memory"]
viz.show(md.zero_memory)

# %% tags=["stages-as-a-table"]
print("bytes per parameter that one of 8 ranks keeps: float32, AdamW")
for stage in range(4):
    held = md.zero_memory(1, 8, stage, param_bytes=4, grad_bytes=4, optimizer_bytes=8)
    print(
        f"stage {stage}: parameters {held.params:3.1f}, gradients {held.grads:3.1f}, "
        f"moments {held.optimizer:3.1f}, together {held.total:4.1f}"
    )

# %% [markdown]
# One class does all four stages. Here is the end of its training step: the optimizer updates what this rank owns, then
# every rank gets what it keeps. You build stages 1 and 2 in assignment ps04.

# %% tags=["code-step"]
viz.show(md.Zero, "step", "zero_grad", folded="exercises 04.1 and 04.2 ask for this")

# %% [markdown]
# ### The mathematics does not change
#
# Five steps in each stage on four ranks, different data on each rank, against one process on the whole batch. In
# float64, so that a mistake cannot hide behind rounding.


# %% tags=["same-mathematics"]
def train(world, stage, steps=5):
    z = md.Zero(
        md.GPT(CONFIG, seed=0).double(),
        world,
        stage,
        optimizer=lambda groups: md.SGD(groups, lr=0.5),
    )
    for step in range(steps):
        tokens, targets = text.batch(step, world.rank, world.size)
        z.zero_grad()
        md.token_loss(z(tokens), targets, world).backward()
        z.step()
    return z.full_state_dict()  # all ranks call it; rank 0 gets the model


def alone(steps=5):
    model = md.GPT(CONFIG, seed=0).double()
    optimizer = md.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        tokens, targets = text.batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model.state_dict()


expected, start = alone(), md.GPT(CONFIG, seed=0).double().state_dict()
moved = max((expected[name] - start[name]).abs().max().item() for name in start)
print(f"one process: weights moved by up to {moved:.2f}")
for stage in range(4):
    got = md.launch(train, ranks=4, args=(stage,))[0]
    error = max((got[name] - expected[name]).abs().max().item() for name in expected)
    print(f"stage {stage} on four ranks: weights differ from one process by at most {error:.0e}")

# %% [markdown]
# ### Memory, measured beside predicted
#
# `memory()` adds up the tensors that a rank holds: not the process, which also contains Python and libraries. A step of
# AdamW in every stage, on one to eight ranks, in float32 and, for later, in bfloat16.

# %% tags=["measure-memory"]
WORLDS = [1, 2, 3, 4, 8]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATES = ("params", "grads", "optimizer")


def adamw(groups):
    return md.AdamW(groups, lr=1e-3)


def memory_by_stage(world):
    """(precision, stage) -> what this rank holds after a step."""
    torch.set_num_threads(1)  # also where there is only one rank
    found = {}
    tokens, targets = (each[:1] for each in text.batch(0, world.rank, world.size))
    for name, dtype in PRECISIONS.items():
        for stage in range(4):
            z = md.Zero(md.GPT(CONFIG, seed=0).to(dtype), world, stage, adamw, grad_dtype=dtype)
            md.token_loss(z(tokens), targets, world).backward()
            z.step()
            found[name, stage] = z.memory()
    return found


by_world = {n: md.launch(memory_by_stage, ranks=n) for n in WORLDS}


def most(n, precision, stage, states=STATES):
    """Bytes on the rank that holds most."""
    return max(sum(rank[precision, stage][state] for state in states) for rank in by_world[n])


compare(
    "stage-2-bytes-here",
    most(4, "float32", 2),
    title="Stage 2 on four ranks",
    axis="kept by one rank",
)

# %% tags=["figure-memory"]
figure = viz.curves(
    WORLDS,
    measured={
        f"stage {stage}": [most(n, "float32", stage) / parameters for n in WORLDS]
        for stage in range(4)
    },
    predicted={
        f"stage {s}": lambda n, s=s: md.zero_memory(1, n, s, 4, 4, 8).total for s in range(4)
    },
    xlabel="ranks",
    ylabel="kept by one rank [bytes per parameter]",
    title="Training state by stage: float32, AdamW",
)
reveal("stage-2-bytes-here", figure)

# %% tags=["memory-by-state"]
lines = ["bytes on one of four ranks: measured, predicted"]
for stage in range(4):
    held = md.zero_memory(parameters, 4, stage, param_bytes=4, grad_bytes=4, optimizer_bytes=8)
    parts = [f"{s} {most(4, 'float32', stage, [s]):9,} {getattr(held, s):9,.0f}" for s in STATES]
    lines.append(f"stage {stage}: {', '.join(parts)}")
reveal("stage-2-bytes-here", "\n".join(lines))

# %% [markdown]
# That is what rests. During a step a rank holds more: activations, and what is gathered or not yet reduced. `z.peak`
# looks at every operation's tensors and keeps the most that there were at one time. Here with 8 layers, for one
# sequence of 32 tokens and for eight.


# %% tags=["peak-of-a-step"]
DEEP = md.GPTConfig(layers=8, dim=64, heads=4, seq=32)


def peak_by_stage(world):
    """(bytes of state, bytes at the peak with 1 sequence, with 8) in each stage."""
    tokens, targets = text.batch(0, world.rank, world.size)
    found = []
    for stage in range(4):
        z = md.Zero(md.GPT(DEEP, seed=0), world, stage, adamw)

        def step(sequences, z=z):
            z.zero_grad()
            md.token_loss(z(tokens[:sequences]), targets[:sequences], world).backward()
            z.step()

        step(1)  # the first one also makes the moments
        sizes = [sum(z.memory()[state] for state in STATES)]
        for sequences in (1, 8):
            z.peak.reset()
            with z.peak:
                step(sequences)
            sizes.append(z.memory()["peak"])
        found.append(sizes)
    return found


for stage, sizes in enumerate(md.launch(peak_by_stage, ranks=2)[0]):
    rests, one, eight = (nbytes / 1e6 for nbytes in sizes)
    print(
        f"stage {stage} on two ranks: {rests:.1f} MB of state, "
        f"at the peak {one:.1f} MB with one sequence, {eight:.1f} MB with eight"
    )

# %% [markdown]
# Activations belong to the samples of one rank: nobody has a copy of them that could be removed, so no stage does.
#
# ### Explore
#
# Your points are on the curves. From how many ranks on does more of them hardly help in stage 1, and why? Which is
# the lowest stage in which a model of 70 billion parameters, in bfloat16 with AdamW, leaves room on 64 B200? On 64 H100?

# %% tags=["explore-memory"]
points = {
    (precision, "AdamW"): {
        s: {n: most(n, precision, s) / parameters for n in WORLDS} for s in range(4)
    }
    for precision in PRECISIONS
}
viz.memory_explorer(points)

# %% [markdown]
# ## Sitting 2: What is sent, and when (25 minutes)
#
# What a rank does not keep it has to receive. How much more does that send?

# %% tags=["predict-traffic"]
predict("stage-3-traffic-here")

# %% [markdown]
# ### Nearly free
#
# An all-reduce is a reduce-scatter and an all-gather (lesson 02). Plain data parallelism does both with the gradients.
# Stages 1 and 2 stop in the middle, update the slice, and gather **updated parameters** in place of gradients: the same
# bytes. Only stage 3 adds something. The cell lists the calls of one step, with the bytes that a ring sends for them.


# %% tags=["which-calls"]
def calls_of_a_step(world, stage):
    """(op, bytes sent by this rank) of every call of one step."""
    z = md.Zero(md.GPT(CONFIG, seed=0), world, stage, adamw)
    tokens, targets = text.batch(0, world.rank, world.size)
    world.recorder.clear()
    md.token_loss(z(tokens), targets, world, tokens=text.batch(0)[1].numel()).backward()
    z.step()
    return [(call.op, call.sent) for call in world.recorder.calls]


lines = []
for stage in range(4):
    calls = md.launch(calls_of_a_step, ranks=4, args=(stage,))[0]
    parts = []
    for op in dict.fromkeys(op for op, _ in calls):
        sent = [nbytes for name, nbytes in calls if name == op]
        parts.append(
            f"{len(sent):2d} {op} send {sum(sent) / (4 * parameters):.2f} x the parameters"
        )
    lines.append(f"stage {stage}: {'; '.join(parts)}")
reveal("stage-3-traffic-here", "\n".join(lines))


# %% tags=["measure-traffic"]
def traffic(world):
    """Sent by this rank in a step of each stage, in bytes of the parameters."""
    torch.set_num_threads(1)
    return [
        sum(sent for _, sent in calls_of_a_step(world, stage)) / (4 * parameters)
        for stage in range(4)
    ]


worlds = [1, 2, 3, 4, 8]
factors = {n: md.launch(traffic, ranks=n)[0] for n in worlds}
compare(
    "stage-3-traffic-here", factors[4][3], title="Stage 3 on four ranks", axis="sent by one rank"
)

# %% tags=["figure-traffic"]
figure = viz.curves(
    worlds,
    measured={f"stage {stage}": [factors[n][stage] for n in worlds] for stage in (0, 1, 2, 3)},
    predicted={f"stage {s}": lambda n, s=s: md.zero_traffic(1, n, s) for s in (0, 3)},
    xlabel="ranks",
    ylabel="sent per step [parameter bytes]",
    title="Traffic 2, 2, 2 and 3 times (n-1)/n",
)
reveal("stage-3-traffic-here", figure)

# %% [markdown]
# One exception. With **accumulation** stages 0 and 1 reduce once for all micro-batches. Stages 2 and 3 have no room for
# whole gradients, so they reduce after each, and stage 3 also gathers each time, unless it may keep what it gathered.


# %% tags=["accumulation"]
def accumulated(world, stage, reshard=True, micro_batches=4):
    z = md.Zero(md.GPT(CONFIG, seed=0), world, stage, adamw)
    pieces = [text.batch(k, world.rank, world.size) for k in range(micro_batches)]
    tokens = md.global_tokens([targets for _, targets in pieces], world)
    world.recorder.clear()
    for k, (inputs, targets) in enumerate(pieces):
        if k < micro_batches - 1:
            with z.no_sync(reshard=reshard):
                md.token_loss(z(inputs), targets, world, tokens=tokens).backward()
        else:
            md.token_loss(z(inputs), targets, world, tokens=tokens).backward()
    z.step()
    return world.recorder.bytes_sent() / (4 * parameters)


for name, arguments in (
    {f"stage {s}": (s,) for s in range(4)} | {"stage 3, kept gathered": (3, False)}
).items():
    sent = md.launch(accumulated, ranks=4, args=arguments)[0]
    print(f"{name:23s} sends {sent:5.2f} x the parameters for a step of 4 micro-batches")

# %% [markdown]
# ### Gather just before use, release after
#
# A rank computes with whole layers, but with one at a time. Where stage 3 gathers and releases:

# %% tags=["code-gather"]
viz.show(
    md.Zero,
    "_before_forward",
    "_after_forward",
    "_before_backward",
    "_launch",
    folded="exercise 04.3 asks for this",
)

# %% [markdown]
# The next cell looks into the memory of rank 0 in the middle of each layer, in both passes, and counts the bytes of
# parameters. Predicted are its slices, what belongs to no layer, the layer that computes and the next one, on its way.


# %% tags=["held-over-time"]
def held_over_time(world, stage):
    """Bytes of parameters held in the middle of each layer: forward 0 to 7, backward 7 to 0."""
    model, held = md.GPT(DEEP, seed=0), []
    z = md.Zero(model, world, stage)
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda *_: held.append(z.memory()["params"]))
        block.attn.register_full_backward_hook(lambda *_: held.append(z.memory()["params"]))
    tokens, targets = text.batch(0, world.rank, world.size)
    md.token_loss(z(tokens), targets, world).backward()
    return held


LAYER = sum(p.nbytes for p in md.GPT(DEEP).blocks[0].parameters())
ROOT = sum(p.nbytes for p in md.GPT(DEEP).parameters()) - 8 * LAYER
# the last layer of a pass has no next one
gathered = [1 if moment in (7, 15) else 2 for moment in range(16)]
held = {f"stage {stage}": md.launch(held_over_time, ranks=4, args=(stage,))[0] for stage in (2, 3)}
viz.curves(
    range(16),
    measured={name: [nbytes / 1e6 for nbytes in each] for name, each in held.items()},
    predicted={
        "stage 2": [(8 * LAYER + ROOT) / 1e6 for _ in range(16)],
        "stage 3": [((8 * LAYER + ROOT) / 4 + ROOT + many * LAYER) / 1e6 for many in gathered],
    },
    xlabel="layer by layer: 0 to 7 forward, 8 to 15 backward",
    ylabel="parameters held [MB]",
    title="Parameters on one of four ranks during a step",
)

# %% [markdown]
# ### Prefetch
#
# If a layer were gathered when it is needed, the chip would wait for it each time. So the next layer is asked for early,
# when a layer begins (in the backward pass: when half of it is over), and travels while that one computes. Now on a
# *paced* cluster, as in lesson 03: messages and layers are real, and take the time that they would take there. This
# computer's own times come on top, the more, the busier it is. The parts:

# %% tags=["parts-of-a-sharded-step"]
LINK = md.Link(alpha_s=1e-3, bytes_per_s=12.5e6)
FORWARD_S, BACKWARD_S = 0.020, 0.040  # a layer forward, a layer backward


def gather_s(nbytes, link=LINK, ranks=4):
    """Seconds of gathering so many bytes, or of reducing the gradients of them into slices."""
    return md.cost.seconds("all_gather", int(nbytes), ranks, link)


print(f"8 layers: forward {FORWARD_S * 1e3:.0f} ms each, backward {BACKWARD_S * 1e3:.0f} ms each")
print(f"gathering a layer over 4 ranks, {LAYER:,} bytes: {gather_s(LAYER) * 1e3:.1f} ms")
print(
    f"embedding and last norm, {ROOT:,} bytes, gathered before the first layer: "
    f"{gather_s(ROOT) * 1e3:.1f} ms"
)

# %% tags=["predict-prefetch"]
predict("prefetch-forward-here")

# %% [markdown]
# To see the same step without prefetch, the cell replaces `all_gather` by one that waits at once: what is asked for
# early then arrives before anything else happens.


# %% tags=["prefetch-run"]
def paced_model(world):
    """Half of a layer's time passes in its feed-forward part, half in its attention."""
    model = md.GPT(DEEP, seed=0)
    for i, block in enumerate(model.blocks):
        for part in (block.attn.q, block.mlp):
            md.name_layer(f"{i}", part, world, FORWARD_S / 2, BACKWARD_S / 2)
    return model


def waits_at_once(world):
    gather = world.all_gather

    def all_gather(*args, **options):
        handle = gather(*args, **options)
        if options.get("async_op"):
            handle.wait()
        return handle

    world.all_gather = all_gather


def sharded_steps(world, stage=3, prefetch=True, steps=2):
    """The timeline of the last of a few steps."""
    torch.set_num_threads(1)
    data = md.stdlib_tokens(seed=0, seq=32, batch=2 * world.size)
    z = md.Zero(paced_model(world), world, stage, optimizer=lambda groups: md.SGD(groups, lr=0.1))
    if not prefetch:
        waits_at_once(world)
    for step in range(steps):
        tokens, targets = data.batch(step, world.rank, world.size)
        z.zero_grad()
        world.barrier()
        world.recorder.clear()
        md.token_loss(z(tokens), targets, world, tokens=tokens.numel() * world.size).backward()
        z.step()
    return world.recorder.timeline()


def run_steps(stage=3, prefetch=True, pace=None):
    first, *others = md.launch(
        sharded_steps, ranks=4, args=(stage, prefetch), pace=pace, check=False
    )
    return first.merge(others)


def forward_ms(timeline):
    """From the first gathering to the end of the last layer's forward pass."""
    ends = [span.end for span in timeline.spans if str(span.action).startswith("forward")]
    return (max(ends) - timeline.start) * 1e3


CLUSTER = md.Cluster(machines=1, chips=4, inside=LINK)
runs = {
    (kind, prefetch): run_steps(prefetch=prefetch, pace=pace)
    for kind, pace in (("paced", CLUSTER), ("unpaced", None))
    for prefetch in (False, True)
}
measured = forward_ms(runs["paced", True])
compare(
    "prefetch-forward-here", measured, title="Forward pass with prefetch", axis="time", paced=True
)


# %% tags=["prefetch-timeline"]
def only_rank_0(timeline):
    spans = [span for span in timeline.spans if span.rank == 0]
    return md.Timeline(spans, paced=timeline.paced, predicted=timeline.predicted)


def predicted_step(prefetch=True, link=LINK, ranks=4):
    def seconds(nbytes):
        return gather_s(nbytes, link, ranks)

    return md.sharded_step(
        [FORWARD_S] * 8,
        [BACKWARD_S] * 8,
        [LAYER] * 8,
        seconds,
        seconds,
        root_nbytes=ROOT,
        prefetch=prefetch,
    )


figure = viz.timelines(
    {
        "without prefetch": predicted_step(prefetch=False),
        "with prefetch": predicted_step(),
        "without prefetch, rank 0": only_rank_0(runs["paced", False]),
        "with prefetch, rank 0": only_rank_0(runs["paced", True]),
    }
)
reveal("prefetch-forward-here", figure)

# %% tags=["prefetch-result"]
lines = [f"4 ranks, {os.cpu_count()} cores"]
for kind in ("paced", "unpaced"):
    without, with_it = runs[kind, False].makespan, runs[kind, True].makespan
    lines.append(
        f"{kind:8s} step {without * 1e3:4.0f} ms without prefetch, {with_it * 1e3:4.0f} ms with it"
    )
reveal("prefetch-forward-here", "\n".join(lines))

# %% [markdown]
# In the backward pass each layer brings two: the gathering of the layer below, and the reduction of the gradients of
# the layer above. Both fit beside 40 ms of computing here. Unpaced, sending takes the time of the same cores.
#
# ### A memory problem becomes a bandwidth problem
#
# Computing a layer takes as long as its tokens take; sending it takes as long as its bytes. So it depends on the link
# whether stage 3 costs time. The cell measures a step of stage 2 and of stage 3 over three links.

# %% tags=["link-speed"]
RATES = [4, 12.5, 50]  # MB/s


def on_link(rate):
    return md.Link(alpha_s=1e-3, bytes_per_s=rate * 1e6)


def stage_2_step(rate):
    """Predicted seconds: reduce gradients as they come, then gather the updated parameters."""

    def seconds(nbytes):
        return gather_s(nbytes, on_link(rate))

    step = md.data_parallel_step(
        [0, *[FORWARD_S] * 8],
        [0, *[BACKWARD_S] * 8],
        [ROOT, *[LAYER] * 8],
        seconds,
        bucket_nbytes=LAYER,
    )
    return step.makespan + 8 * seconds(LAYER) + seconds(ROOT)


by_link = {
    stage: [
        run_steps(stage, pace=md.Cluster(machines=1, chips=4, inside=on_link(rate))).makespan * 1e3
        for rate in RATES
    ]
    for stage in (2, 3)
}
viz.curves(
    RATES,
    measured={f"stage {stage}": times for stage, times in by_link.items()},
    predicted={
        "stage 2": lambda rate: stage_2_step(rate) * 1e3,
        "stage 3": lambda rate: predicted_step(link=on_link(rate)).makespan * 1e3,
        "computing alone": lambda rate: 8 * (FORWARD_S + BACKWARD_S) * 1e3,
    },
    xlabel="link [MB/s]",
    ylabel="step [ms]",
    title="A step against the speed of the link",
    paced=True,
    log="x",
)

# %% [markdown]
# Over a slow link stage 3 pays for its third unit. Over a fast one the prediction has it below stage 2: its
# gathering hides behind layers, while stage 2 here gathers at the end of the step, where nothing computes. Paced points
# lie above the curves: this computer's own time comes on top, and stage 3 has more calls that need some.
#
# ## Sitting 3: Precision, machines, saving (25 minutes)
#
# ### Master weights
#
# Weights and gradients are mostly kept in bfloat16: half the memory, half the traffic, faster products. It has 8
# significant binary digits.

# %% tags=["predict-bf16"]
predict("bf16-weight-here")


# %% tags=["bf16-stalls"]
def hundred_steps(world):
    """A weight of 1 after each of 100 steps of 0.001: alone, ZeRO's master copy, its bfloat16."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = md.SGD([weight], lr=1e-3)
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(layer.weight)
    z = md.Zero(layer, world, stage=1, optimizer=lambda groups: md.SGD(groups, lr=1e-3))
    master = next(z.parameters())
    values = []
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        z.zero_grad()
        z(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()  # the gradient is 1 here too
        z.step()
        values.append((weight.item(), master.item(), layer.weight.item()))
    return values


alone_in_bf16, master, rounded = zip(*md.launch(hundred_steps, ranks=1)[0], strict=True)
compare(
    "bf16-weight-here",
    alone_in_bf16[-1],
    title="A weight of 1 after 100 steps of 0.001",
    axis="weight",
)

# %% tags=["bf16-figure"]
some = range(10, 101, 10)
histories = {
    f"{name}, at the end {values[-1]:.4f}": values
    for name, values in (
        ("bfloat16 alone", alone_in_bf16),
        ("master copy", master),
        ("its bfloat16 weight", rounded),
    )
}
figure = viz.curves(
    some,
    measured={
        name: [(1 - values[step - 1]) / 0.001 for step in some]
        for name, values in histories.items()
    },
    predicted={"every step arrives": lambda step: step},
    xlabel="step",
    ylabel="moved so far [steps of 0.001]",
    title="A weight of 1 after steps of 0.001",
)
reveal("bf16-weight-here", figure)

# %% [markdown]
# So the optimizer keeps a **master copy** in float32 and updates that; the bfloat16 weight is its rounded image. With
# two moments it makes 12 bytes a parameter, beside 2 for the weight and 2 for the gradient. It is the optimizer's, so
# every stage from the first cuts it.

# %% tags=["bf16-memory"]
print(
    "bytes per parameter on one of four ranks, bfloat16 with master copy and AdamW: "
    "measured, predicted"
)
for stage in range(4):
    held = md.zero_memory(1, 4, stage, param_bytes=2, grad_bytes=2, optimizer_bytes=12)
    parts = [
        f"{s} {most(4, 'bfloat16', stage, [s]) / parameters:5.2f} {getattr(held, s):5.2f}"
        for s in STATES
    ]
    print(f"stage {stage}: {', '.join(parts)}")

# %% [markdown]
# ### Hybrid sharding
#
# Links inside a machine are about ten times as fast as those between machines, or more. Cut over all ranks, each
# gathering is as slow as the slowest of them. **Hybrid sharding** cuts over the ranks of one machine, and keeps a replica in each:
# gathering stays inside, and only the slices of gradients are summed between machines. It costs memory. Two machines of
# two, paced:

# %% tags=["hybrid-traffic"]
INSIDE, BETWEEN = md.Link(alpha_s=1e-4, bytes_per_s=50e6), md.Link(alpha_s=1e-3, bytes_per_s=4e6)
TWO_MACHINES = md.Cluster(machines=2, chips=2, inside=INSIDE, between=BETWEEN)


def hybrid(world, hybrid, steps=2):
    """(seconds of a step, bytes sent in groups that span machines, bytes of state) of this rank."""
    torch.set_num_threads(1)
    mesh = md.Mesh(
        {"replicate": 2, "shard": 2}, world
    )  # the last axis varies fastest: it is the machine
    data = md.stdlib_tokens(seed=0, seq=32, batch=2 * world.size)
    comm = (mesh["shard"], mesh["replicate"]) if hybrid else world
    z = md.Zero(paced_model(world), comm, 3, adamw)
    for step in range(steps):
        tokens, targets = data.batch(step, world.rank, world.size)
        z.zero_grad()
        world.barrier()
        world.recorder.clear()
        md.token_loss(z(tokens), targets, world, tokens=tokens.numel() * world.size).backward()
        z.step()
    calls = world.recorder.calls
    spans_machines = [
        call for call in calls if len({TWO_MACHINES.machine(rank) for rank in call.group}) > 1
    ]
    held = sum(z.memory()[state] for state in STATES)
    return world.recorder.timeline().makespan, sum(call.sent for call in spans_machines), held


WHOLE = 8 * LAYER + ROOT
for name, cut in (("over all four", False), ("hybrid", True)):
    seconds, sent, held = md.launch(hybrid, ranks=4, args=(cut,), pace=TWO_MACHINES, check=False)[0]
    print(
        f"{name:13s} step {seconds * 1e3:5.0f} ms (paced), "
        f"{sent / WHOLE:4.2f} x the parameters sent in groups that span machines, "
        f"{4 * held / WHOLE:4.1f} bytes of state per parameter"
    )
slices = [nbytes / 2 for nbytes in [LAYER] * 8 + [ROOT]]  # summed between machines, one by one
sums_s = sum(md.cost.seconds("all_reduce", int(nbytes), 2, BETWEEN) for nbytes in slices)
inside_s = predicted_step(link=INSIDE, ranks=2).makespan
print("predicted, over all four and hybrid:")
print(
    f"  step {predicted_step(link=BETWEEN).makespan * 1e3:.0f} ms, and {inside_s * 1e3:.0f} ms "
    f"inside + {sums_s * 1e3:.0f} ms of sums between = {(inside_s + sums_s) * 1e3:.0f} ms"
)
print(
    f"  {3 * 3 / 4:.2f} and {2 * 1 / 2 / 2:.2f} x the parameters, "
    f"{16 / 4:.1f} and {16 / 2:.1f} bytes"
)

# %% [markdown]
# The package waits for each sum between machines before it computes on, so the prediction adds the sums and overlaps none.
# What a paced step takes beyond it is this computer's own time. Over all four that hides behind the slow link; hybrid
# waits for the link less, so more of it shows.
#
# ### Offload
#
# The optimizer's state is needed once a step, so it can lie in the CPU's memory and be updated there. Each step sends the
# slice of gradients to the CPU, and the slice of updated weights back; the state itself does not move. A laptop has one
# memory. What the cell shows there is where the state lies and what would cross the link; not the crossing, which needs
# a GPU.

# %% tags=["offload"]
PCIE_GB_PER_S = 25  # one direction of a slot of version 4 with 16 lanes, in practice


def offloaded(world):
    """Where this rank's state lies, and the bytes of its slices of gradients and weights."""
    device = (
        torch.device("cuda", world.rank)
        if torch.cuda.device_count() >= world.size
        else torch.device("cpu")
    )
    with torch.device(device):
        model = md.GPT(CONFIG, seed=0).bfloat16()
    z = md.Zero(model, world, 3, adamw, grad_dtype=torch.bfloat16, offload=True)
    tokens, targets = (each.to(device) for each in text.batch(0, world.rank, world.size))
    md.token_loss(z(tokens), targets, world).backward()
    z.step()
    lies = {str(tensor.device) for tensor in [*z.parameters(), *md.optimizer_tensors(z.optimizer)]}
    slices = sum(p.numel() for p in z.parameters())
    return str(device), lies, z.memory()["optimizer"], 2 * slices, 2 * slices


device, lies, state, down, up = md.launch(offloaded, ranks=2)[0]
print(
    f"parameters on {device}, master copy and moments on {', '.join(lies)}: "
    f"{state:,} bytes on rank 0 of 2"
)
print(
    f"a step takes {down:,} bytes of gradients there and {up:,} bytes of weights back: "
    "4 of the 16 that a parameter has"
)
share = 7.5e9 / 64
print(
    "7.5 billion parameters on 64 ranks: "
    f"{4 * share / 1e9 / PCIE_GB_PER_S * 1e3:.0f} ms a step (predicted)"
)

# %% [markdown]
# ### The whole state dict is collective
#
# In stage 3 nobody has the model. Saving it as one file needs every rank: all call `full_state_dict`, rank 0 gets the
# tensors under the module's own names, the others an empty dict.


# %% tags=["full-state-dict"]
def gather_all(world):
    z = md.Zero(md.GPT(CONFIG, seed=0), world, 3, adamw)
    state = z.full_state_dict()
    return state, sum(p.numel() for p in z.parameters())


ranks = md.launch(gather_all, ranks=4)
for rank, (state, slices) in enumerate(ranks):
    print(
        f"rank {rank} keeps {slices:,} of {parameters:,} parameters; "
        f"its full_state_dict has {len(state)} names"
    )
model = md.GPT(CONFIG, seed=1)
model.load_state_dict(ranks[0][0])
same = all(
    torch.equal(a, b)
    for a, b in zip(model.parameters(), md.GPT(CONFIG, seed=0).parameters(), strict=True)
)
print(
    "loaded by one process: "
    f"{'equal to the weights that the run began with' if same else 'different'}"
)

# %% [markdown]
# And a line that works in stages 0 to 2, where rank 0 has all parameters and needs nobody:


# %% tags=["alone-state-dict"]
def only_rank_0_saves(world):
    z = md.Zero(md.GPT(CONFIG, seed=0), world, 3, adamw)
    if world.rank == 0:
        return z.full_state_dict()
    return None


try:
    md.launch(only_rank_0_saves, ranks=4)
except md.LaunchError as error:
    print(error)

# %% [markdown]
# ## Concept cards (20 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong.

# %% tags=["card-copies-together"]
card("copies-together")

# %% tags=["card-what-each-stage-cuts"]
card("what-each-stage-cuts")

# %% tags=["card-shard-and-training"]
card("shard-and-training")

# %% tags=["card-third-stage-bytes"]
card("third-stage-bytes")

# %% tags=["card-life-of-a-layer"]
card("life-of-a-layer")

# %% tags=["card-one-layer-ahead"]
card("one-layer-ahead")

# %% tags=["card-small-step-large-weight"]
card("small-step-large-weight")

# %% tags=["card-saved-by-rank-0"]
card("saved-by-rank-0")

# %% [markdown]
# ## Why not?
#
# - **When does communication bind?** When gathering a layer takes longer than computing it. Bytes depend on the model
#   alone, computing on the tokens of a rank: a small batch on each rank, or a link between machines, is where stage 3
#   waits. The lowest stage that fits sends least and in the fewest messages.
# - **What breaks?** One layer has to fit on a chip together with its activations, since every rank computes whole layers.
#   And more ranks make only the slices smaller: gathered layers and activations stay as large as they are.
# - **What then?** If one layer, or its activations, are too large, cut the layer itself: each rank computes a part of
#   every product, and nothing has to be gathered. That is tensor parallelism, lesson 05.

# %% [markdown]
# ## Test (25 minutes)
#
# Answers are kept as you give them; the cell below the test submits them and then explains every one. A calculator, or a
# cell of your own, is welcome.

# %% tags=["quiz"]
quiz("04")

# %% tags=["submit"]
submit("04")

# %% [markdown]
# ## Where to go next
#
# - Exercises: `practice_ps04_zero.ipynb`, beside this notebook in `workspace/`: the three stages, built one on the other.
# - The files, after that: `minidist/placement.py` (where tensors lie, and which collective moves them) and
#   `minidist/parallel/zero.py`.
# - Lab 04 (`labs/04_zero`): memory and time by stage on real links, on CPU or GPUs.
# - Papers: Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2020,
#   arXiv:1910.02054; Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023,
#   arXiv:2304.11277; Micikevicius et al., *Mixed Precision Training*, 2018, arXiv:1710.03740; Ren et al., *ZeRO-Offload*,
#   2021, arXiv:2101.06840.
