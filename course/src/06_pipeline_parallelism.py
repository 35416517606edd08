# %% [markdown] tags=["head"]
# # 06 Pipeline parallelism
#
# **The question.** Cut the model between layers, and give each rank some of them. A rank then waits for the one before:
# in which order should the ranks work, so that they wait little, and what does that order cost in memory and messages?
#
# **Ten concepts**
#
# - stage, micro-batch, bubble
# - (P-1)/(M+P-1)
# - loss scaling
# - tied embeddings
# - 1F1B saves memory, not bubble
# - interleaving divides the bubble and multiplies messages
# - splitting backward
# - zero bubble, and under which assumptions
# - micro-batches against arithmetic efficiency
# - send order and deadlock
#
# **Three sittings**: 1 *Stages and micro-batches* 25 minutes, 2 *Other orders* 25 minutes, 3 *On this machine* 25
# minutes. Then the cards and a test, 40 minutes.

# %% tags=["setup"]
import time

import torch
import torch.nn.functional as F

import minidist as md
from grading import card, compare, predict, quiz, reveal, review, submit
from minidist import viz
from minidist.schedule import build, messages, parse, reads, simulate, validate, writes

torch.set_num_threads(1)  # the ranks need the cores

# %% tags=["review"]
review("06")

# %% [markdown]
# Before anything runs, commit to a number. The prediction is about this model, its eight layers cut into four stages of
# two, and a batch in eight parts, the **micro-batches**. The run will be *paced*: a stage takes 40 ms to go forward with
# a micro-batch and 80 ms to go back, whatever this computer could do, and a message takes almost nothing.

# %% tags=["the-model"]
CONFIG = md.GPTConfig(layers=8, dim=64, heads=4, seq=32, tie=False)
BATCH, RANKS, MICRO_BATCHES = 16, 4, 8
FORWARD_S, BACKWARD_S = 0.040, 0.080  # of a micro-batch, two layers, in paced runs
text = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=BATCH)
print(f"{CONFIG.layers} layers of width {CONFIG.dim} on {RANKS} ranks")
print(f"{BATCH} sequences of {CONFIG.seq} tokens in {MICRO_BATCHES} micro-batches")

# %% tags=["predict-step"]
predict("step-of-a-pipeline-here")

# %% [markdown]
# ## Sitting 1: Stages and micro-batches (25 minutes)
#
# Tensor parallelism cuts each layer, and sums four times a layer: it needs a fast link. If the model is too deep rather
# than too wide, cut it *between* layers. Here are four **stages**, what each holds, and what goes from one to the next.

# %% tags=["cut-stages"]
stages = md.split_stages(md.GPT(CONFIG, seed=0), RANKS)
tokens, targets = text.batch(0)
x = tokens
for number, stage in enumerate(stages):
    came, x = x, stage(x)
    parts = [name for name in ("embed", "norm", "head") if getattr(stage, name) is not None]
    holds = ", ".join([f"layers {' '.join(stage.blocks)}", *parts])
    print(
        f"stage {number}: {holds:28s} {md.storage_bytes(stage.parameters()):9,} bytes of weights, "
        f"{list(came.shape)} -> {list(x.shape)}"
    )
message = 4 * BATCH * CONFIG.seq * CONFIG.dim
print(f"between two stages, for the whole batch: {message:,} bytes forward, and back")
sums = (4 * CONFIG.layers + 2) * md.cost.bytes_sent("all_reduce", message, RANKS)
print(f"with every layer cut instead, a rank sends {sums:,} bytes a step: ", end="")
print(f"{sums / 2 / message:.0f} times as many as a rank in the middle here")

# %% [markdown]
# One message a boundary and direction, however many layers lie between: that goes over a slow link, too. The price is
# that a stage needs what the stage before made.
#
# ### The idea
#
# Each row is a rank, time goes to the right. One batch passes through four stages, forward and back:

# %% tags=["naive-grid"]
viz.pipeline({"the whole batch at once": simulate(build("gpipe", ranks=4, microbatches=1))})

# %% [markdown]
# Grey is idle; its share of the ranks' time is the **bubble**. One rank works at a time, so four ranks are no faster than
# one. The cure: cut the batch
# into **micro-batches**. While rank 1 has the first, rank 0 takes the second. Here the same work in more and more
# parts; going back takes twice as long as going forward.

# %% tags=["microbatches-grid"]
grids = {}
for m in (1, 2, 4, 8):
    run = simulate(build("gpipe", ranks=4, microbatches=m), F=4 / m, I=4 / m, W=4 / m)
    grids[f"{m} micro-batch{'es' if m > 1 else ''}: bubble {run.bubble:.0%}"] = run
viz.pipeline(grids)

# %% [markdown]
# ### (P-1)/(M+P-1)
#
# P ranks, M micro-batches. The last rank waits for P-1 forward passes at the start, and for P-1 backward passes at the
# end; the first waits for both in the middle. So each works for M turns, forward and back, and idles for P-1.

# %% tags=["bubble-formula"]
print("bubble, simulated / formula")
print("  P  " + "".join(f"   M = {m:<9d}" for m in (1, 4, 8, 16, 64)))
for p in (2, 4, 8):
    row = f"{p:3d}  "
    for m in (1, 4, 8, 16, 64):
        simulated = simulate(build("gpipe", ranks=p, microbatches=m)).bubble
        row += f"  {simulated:6.1%}/{(p - 1) / (m + p - 1):6.1%} "
    print(row)

# %% [markdown]
# ### The code
#
# Who does what when is data: a **program**, a row of actions for each rank. `2F0` takes micro-batch 0 forward through
# stage 2, `2B0` takes it back. There are no times in it, no idle slots and no messages.

# %% tags=["program-text"]
print(build("gpipe", ranks=3, microbatches=4))

# %% [markdown]
# All else follows from what an action reads and what it writes. This is the only place where it is said:

# %% tags=["code-reads"]
viz.show(reads)

# %% tags=["code-writes"]
viz.show(writes)

# %% tags=["code-gpipe"]
viz.show(md.schedule.SCHEDULES["gpipe"].order, folded="exercise 06.1 asks for this")

# %% [markdown]
# The simulator goes through the same program: an action begins when its rank is free and all that it reads is there.

# %% tags=["code-simulate"]
viz.show(simulate, folded="exercise 06.3 asks for its rule")

# %% [markdown]
# The executor, `md.PipelineParallel`, does each action on real tensors: what another rank made is received, what another
# rank needs is sent, and sends wait for nobody.

# Does it train the same? Four real ranks in float64, against one process on the whole batch. Gradients add up
# over the micro-batches, and weights change once, after the last.


# %% tags=["gradients-equal"]
def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline_of(world, program, config=CONFIG, loss_fn=mean_loss, **options):
    """This rank's part of the model, run by the program."""
    torch.set_num_threads(1)
    stages = md.split_stages(md.GPT(config, seed=0).to(options.pop("dtype", None)), program.stages)
    mine = [stages[number] for number in program.stages_of(world.rank)]
    return md.PipelineParallel(mine, program, world, loss_fn, **options)


def gradients(pipeline):
    return {
        name: p.grad for stage in pipeline.stages.values() for name, p in stage.named_parameters()
    }


def one_step(world, name, targets=targets, **options):
    """(loss, this rank's gradients)"""
    program = build(name, world.size, MICRO_BATCHES)
    pipeline = pipeline_of(world, program, dtype=torch.float64, **options)
    return pipeline.step(tokens, targets), gradients(pipeline)


def in_one_process(targets=targets):
    model = md.GPT(CONFIG, seed=0).double()
    loss = mean_loss(model(tokens), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def furthest(ranks, alone):
    """The largest relative error of a parameter's gradient."""
    together = {name: grad for _, grads in ranks for name, grad in grads.items()}
    assert together.keys() == alone.keys()
    return max(((together[n] - g).norm() / g.norm()).item() for n, g in alone.items())


loss, alone = in_one_process()
ranks = md.launch(one_step, ranks=4, args=("gpipe",))
print(f"loss {ranks[0][0]:.12f} on four ranks, {loss:.12f} in one process")
print(f"largest relative error of a parameter's gradient: {furthest(ranks, alone):.0e}")

# %% [markdown]
# ### Loss scaling
#
# Each micro-batch has a mean loss of its own. What has to be added up so that it is the mean of the whole batch? Here
# the targets are padded: sequences end at different lengths, and -100 marks what does not count.


# %% tags=["loss-scale"]
lengths = torch.randint(2, CONFIG.seq, (BATCH,), generator=torch.Generator().manual_seed(1))
padded = targets.masked_fill(torch.arange(CONFIG.seq) >= lengths[:, None], -100)
right, right_grads = in_one_process(padded)


def accumulate(weight):
    """One process, micro-batch by micro-batch, each loss times its weight."""
    model = md.GPT(CONFIG, seed=0).double()
    total = 0.0
    parts = zip(tokens.tensor_split(8), padded.tensor_split(8), strict=True)
    for x, y in parts:
        loss = mean_loss(model(x), y) * weight(y)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


count = int((padded != -100).sum())
print("valid tokens:", [int((y != -100).sum()) for y in padded.tensor_split(8)])
print(f"{'the whole batch':44s} loss {right:7.4f}")
for name, weight in (
    ("sum of the means, not divided", lambda y: 1),
    ("mean of the means", lambda y: 1 / 8),
    ("each mean times its share of the valid tokens", lambda y: int((y != -100).sum()) / count),
):
    loss, grads = accumulate(weight)
    off = furthest([(loss, grads)], right_grads)
    print(f"{name:45s} loss {loss:7.4f}, gradients off by {off:.0e}")
ranks = md.launch(one_step, ranks=4, args=("gpipe", padded))
off = furthest(ranks, right_grads)
print(f"{'the pipeline':45s} loss {ranks[0][0]:7.4f}, gradients off by {off:.0e}")

# %% [markdown]
# ### Tied embeddings
#
# Many models use one matrix twice: as embedding on the first stage, and to make logits on the last. In a pipeline those
# are two copies on two ranks. Each gets the gradient of its own use; the one matrix needs the sum. So at the end of a
# step the two ranks send each other theirs, and both add.


# %% tags=["tied-embedding"]
def train_tied(world, told, steps=3):
    """This rank's copy of the matrix after some steps; told: that two names are one parameter."""
    config = md.GPTConfig(layers=4, dim=64, heads=4, seq=32, tie=True)
    pair = [("embed.weight", "head.weight")] if told else []
    pipeline = pipeline_of(world, build("1f1b", world.size, 4), config, tied=pair)
    parameters = [p for stage in pipeline.stages.values() for p in stage.parameters()]
    optimizer = md.SGD(parameters, lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        pipeline.step(*text.batch(step))
        optimizer.step()
    names = dict(n for stage in pipeline.stages.values() for n in stage.named_parameters())
    return names.get("embed.weight", names.get("head.weight"))


model = md.GPT(md.GPTConfig(layers=4, dim=64, heads=4, seq=32, tie=True), seed=0)
optimizer = md.SGD(model.parameters(), lr=0.5)
for step in range(3):
    optimizer.zero_grad()
    x, y = text.batch(step)
    mean_loss(model(x), y).backward()
    optimizer.step()
start = md.GPT(model.config, seed=0).embed.weight
moved = (model.embed.weight - start).norm()
for told in (False, True):
    copies = [w for w in md.launch(train_tied, ranks=4, args=(told,)) if w is not None]
    apart = (copies[0] - copies[1]).norm() / moved
    off = (copies[0] - model.embed.weight).norm() / moved
    name = "gradients summed" if told else "each its own gradient"
    print(f"{name:22s} the copies are {apart:5.1%} apart, the first is {off:5.1%} off")

# %% [markdown]
# After three steps, in percent of how far the matrix moved in one process.
#
# ### How long does it take?
#
# Now the run that you predicted: four paced ranks, eight micro-batches.


# %% tags=["paced-run"]
NEARLY_FREE = md.Cluster(machines=1, chips=4, inside=md.Link(alpha_s=0.1e-3, bytes_per_s=10e9))


def timed_steps(world, program, config=CONFIG, seconds=None, steps=2):
    """(seconds, timeline of this rank) of each step."""
    pipeline = pipeline_of(world, program, config, seconds=seconds)
    found = []
    for step in range(steps):
        batch = text.batch(step)
        world.barrier()
        start = time.perf_counter()
        pipeline.step(*batch)
        found.append((time.perf_counter() - start, pipeline.timeline))
    return found


def all_ranks(ranks):
    """[(seconds, timeline) of each step] of all ranks together, from those of each rank."""
    steps = []
    for step in zip(*ranks, strict=True):
        seconds, (first, *others) = zip(*step, strict=True)
        steps.append((max(seconds), first.merge(others)))
    return steps


def quickest(ranks):
    """(seconds, timeline) of the step that took all ranks together least."""
    return min(all_ranks(ranks), key=lambda step: step[0])


def run_paced(program, seconds):
    """(seconds, timeline) of the quicker of two steps on paced ranks."""
    arguments = program, CONFIG, seconds
    ranks = md.launch(
        timed_steps, ranks=program.ranks, args=arguments, pace=NEARLY_FREE, check=False
    )
    return quickest(ranks)


PACE = {"F": FORWARD_S, "B": BACKWARD_S}
gpipe = build("gpipe", RANKS, MICRO_BATCHES)
paced_s, paced = run_paced(gpipe, PACE)
predicted = simulate(gpipe, F=FORWARD_S, I=BACKWARD_S, W=0)
compare(
    "step-of-a-pipeline-here",
    paced_s * 1e3,
    title="A step of four ranks, eight micro-batches",
    axis="forward and backward",
    paced=True,
)

# %% tags=["figure-paced"]
figure = viz.pipeline(
    {
        f"simulated, bubble {predicted.bubble:.1%}": predicted,
        f"four ranks, bubble {paced.bubble:.1%}": paced,
    },
    unit="ms",
)
reveal("step-of-a-pipeline-here", figure)

# %% [markdown]
# The numbers in the boxes are micro-batches. What the ranks need beyond the simulated time is this computer's own: four
# processes share its cores.
#
# ## Sitting 2: Other orders (25 minutes)
#
# ### 1F1B saves memory, not bubble
#
# GPipe keeps what every forward pass left behind until all of them are through: M micro-batches of activations. But the
# last rank could go back with the first micro-batch at once, and the others soon after. **1F1B**: forward passes only
# until the first gradient comes, then one forward, one backward in turn.

# %% tags=["1f1b-grid"]
f1b = build("1f1b", RANKS, MICRO_BATCHES)
both = {"gpipe": gpipe, "1f1b": f1b}
viz.pipeline(
    {
        f"{name}: bubble {simulate(p).bubble:.1%}, at most {max(simulate(p).peak_in_flight)} "
        "micro-batches held": simulate(p)
        for name, p in both.items()
    }
)

# %% tags=["code-1f1b"]
viz.show(md.schedule.SCHEDULES["1f1b"].order, folded="exercise 06.2 asks for this")

# %% [markdown]
# The bubble is the same, to the last bit. What changes is how many micro-batches are **in flight**: gone forward, and
# not yet back. On rank r those are at most P - r, however many micro-batches there are. Now run, with 2 sequences a micro-batch
# and more and more of them, and all tensors on a rank counted:


# %% tags=["memory-1f1b"]
COUNTS = [1, 2, 4, 8]


def peaks(world):
    """{(schedule, micro-batches): (most in flight, most bytes beyond weights and gradients)}"""
    found = {}
    for name, m in ((name, m) for name in both for m in COUNTS):
        pipeline = pipeline_of(world, build(name, world.size, m))
        batch = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=2 * m).batch(0)
        pipeline.step(*batch)  # gradients are there from now on
        weights = [p for stage in pipeline.stages.values() for p in stage.parameters()]
        fixed = [*weights, *(p.grad for p in weights), *batch]
        with md.PeakMemory(fixed) as peak:
            pipeline.step(*batch)
        activations = peak.nbytes - md.storage_bytes(fixed)
        found[name, m] = pipeline.timeline.peak_in_flight[0], activations
    return found


held = md.launch(peaks, ranks=4, check=False)
print("most in flight on ranks 0 to 3 with 8 micro-batches:")
for name, program in both.items():
    print(f"  {name:6s} measured {[rank[name, 8][0] for rank in held]}, ", end="")
    print(f"simulated {simulate(program).peak_in_flight}")
kept = {key: nbytes / 1e6 for key, (_, nbytes) in held[0].items()}
one, two = kept["gpipe", 1], kept["gpipe", 2]
viz.curves(
    COUNTS,
    measured={name: [kept[name, m] for m in COUNTS] for name in both},
    predicted={
        "gpipe": lambda m: one + (two - one) * (m - 1),
        "1f1b": lambda m: one + (two - one) * (min(m, RANKS) - 1),
    },
    xlabel="micro-batches of 2 sequences",
    ylabel="activations of rank 0 [MB]",
    title="What is kept for the way back",
)

# %% [markdown]
# The line goes through the first two points of GPipe: each micro-batch more costs as much. So 1F1B lets M grow, and a
# larger M makes the bubble small. That is how it saves time after all.
#
# ### Interleaving divides the bubble
#
# A rank idles for P-1 times a *stage's* work. Make stages smaller: V stages a rank, dealt out in turn, so that rank 0 of
# 4 has stages 0 and 4. They are visited with P micro-batches at a time, so M has to be a multiple of P. Commit to a
# number: the paced model again, two stages of **one** layer a rank.

# %% tags=["predict-interleaved"]
predict("interleaved-step-here")

# %% tags=["interleaved-run"]
HALF = {kind: seconds / 2 for kind, seconds in PACE.items()}
two_stages = build("interleaved", RANKS, MICRO_BATCHES, stages_per_rank=2)
interleaved_s, interleaved = run_paced(two_stages, HALF)
compare(
    "interleaved-step-here",
    interleaved_s * 1e3,
    title="A step of four ranks with two stages each",
    axis="forward and backward",
    paced=True,
)

# %% tags=["figure-interleaved"]
predicted = simulate(two_stages, F=FORWARD_S / 2, I=BACKWARD_S / 2, W=0)
figure = viz.pipeline({"simulated": predicted, "four ranks": interleaved}, unit="ms")
reveal("interleaved-step-here", figure)

# %% [markdown]
# Paler is the rank's second stage. A micro-batch spends 1/V of the time in a stage, so idle time is divided by V, and the
# bubble is now (P-1)/(VM+P-1). (Where the run takes much longer than simulated, the machine is busy with more than this.)
# The price: PV stages have PV-1 boundaries, each crossed twice by every micro-batch, 2M(PV-1) messages; and each rank
# begins more before the first comes back.

# %% tags=["interleaved-messages"]
lines = ["4 ranks, 8 micro-batches; a rank has work for a time of 24"]
for v in (1, 2, 4):
    program = build("interleaved", RANKS, MICRO_BATCHES, stages_per_rank=v)
    run, slow = (simulate(program, 1 / v, 1 / v, 1 / v, comm) for comm in (0, 0.25))
    lines.append(
        f"V = {v}: bubble {run.bubble:5.1%}, formula {3 / (8 * v + 3):5.1%}, "
        f"idle {run.makespan - 24:4.2f}; "
        f"{len(messages(program)):3d} messages; rank 0 holds {run.peak_in_flight[0]:2d} x 1/{v}; "
        f"takes {run.makespan:5.2f}, with messages of 0.25 {slow.makespan:5.2f}"
    )
reveal("interleaved-step-here", "\n".join(lines))

# %% [markdown]
# Rank 0 holds (V-1)P + 2(P-1) + 1 inputs of stages, each of 1/V of its layers: with V = 2 that is 3P-1 halves.
#
# ### Splitting backward
#
# Going back, a layer y = x W computes two things from the gradient of y: that of x, for which the stage before waits,
# and that of W, for which *nobody* waits until the optimizer steps. Call the first **I**, the second **W**.

# %% tags=["split-backward"]
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
x, w, dy = draw(256, 64).requires_grad_(), draw(64, 192).requires_grad_(), draw(256, 192)
(x @ w).backward(dy)
i_alone, w_alone = dy @ w.T, x.T @ dy  # two products, neither needs the other
for name, made, by_autograd in (("I", i_alone, x.grad), ("W", w_alone, w.grad)):
    print(f"{name} {list(made.shape)}: equal to autograd's {torch.allclose(made, by_autograd)}")
for kind in "BIW":
    action = md.schedule.Action(1, kind, 0)
    read, written = (", ".join(map(str, f(action, 4))) for f in (reads, writes))
    print(f"{action} reads {read:18s} writes {written or 'nothing that others read'}")
ranks = md.launch(one_step, ranks=4, args=("zb_h1",))
print(f"a pipeline of four ranks with I and W, gradients off by {furthest(ranks, alone):.0e}")

# %% [markdown]
# The executor finds where a stage's graph branches off to weights alone, and leaves those branches for W
# (`minidist/staged/backward.py`). What they need is kept until then.
#
# ### Zero bubble
#
# So W can be done when a rank would idle. **ZB-H1** puts weight gradients off into the end of 1F1B; it keeps no more
# micro-batches than that, but of each what W needs. **ZB-H2** also fills the beginning, with more forward passes.
# **ZB-V** runs the stages down and up again, so that the first and the last stage are on rank 0.

# %% tags=["zero-bubble"]
orders = {
    "1f1b": simulate(f1b),
    "zb_h1": simulate(build("zb_h1", RANKS, MICRO_BATCHES)),
    "zb_h2": simulate(build("zb_h2", RANKS, MICRO_BATCHES)),
    "zb_v": simulate(build("zb_v", RANKS, MICRO_BATCHES, stages_per_rank=2), 0.5, 0.5, 0.5),
}
stages_a_rank = {"zb_v": 2}
viz.pipeline(
    {
        f"{name}: takes {run.makespan:g}, bubble {run.bubble:.1%}, of a rank's own span "
        f"{run.bubble_rate:.1%}, "
        f"holds {max(run.peak_in_flight) / stages_a_rank.get(name, 1):g}": run
        for name, run in orders.items()
    }
)

# %% [markdown]
# Two figures for a bubble. By the step's length ZB-H2 gains *nothing* over ZB-H1: some rank always starts late and
# another ends early. Measured by a rank's own span, from its first action to its last, nothing is idle. What is right?
# If all ranks have to meet at the end of a step, the first. They meet for the **global gradient norm**: no rank may
# update before it knows whether to clip. If the optimizer does not wait for it, a rank begins the next step when its
# own part is done.


# %% tags=["zb-assumptions"]
def period(run, meet):
    """Time from one step's begin to the next one's, of many that look like this one."""
    spans = [run.lane(rank) for rank in run.ranks]
    return run.makespan if meet else max(each[-1].end - each[0].start for each in spans)


print("time of a step, of many (24 would be no bubble at all)")
print("                    all ranks meet   nobody waits   holds")
cases = {
    "F = I = W": (1, 1, 1, 0),
    "I = 1.5 W": (1, 1.2, 0.8, 0),
    "a message takes 0.2": (1, 1, 1, 0.2),
}
for case, (*seconds, message) in cases.items():
    print(case)
    for name in orders:
        v = stages_a_rank.get(name, 1)
        program = build(name, RANKS, MICRO_BATCHES, stages_per_rank=v)
        run = simulate(program, *(each / v for each in seconds), message)
        meet, free = (period(run, meet) for meet in (True, False))
        print(f"  {name:6s} {meet:23.1f} {free:14.1f} {max(run.peak_in_flight) / v:9g}")

# %% [markdown]
# So the bubble is zero only if F, I and W take the same time, messages are hidden, and the optimizer does not wait for
# the global norm (the authors update first, and take back the rare step that should have been clipped). ZB-H2 also needs
# room for 2P-1 micro-batches; ZB-V makes do with P, for twice as many stages. GPipe and 1F1B idle under any assumptions.
#
# ### Explore
#
# Find the least number of micro-batches for which 1F1B on 4 ranks idles less than 15 %. Then the same with `interleaved`
# and four stages a rank: how many messages has each? And make W half of I: by which of the two figures does ZB-H2 suffer?

# %% tags=["explore-bubble"]
viz.pipeline_explorer()

# %% [markdown]
# ## Sitting 3: On this machine (25 minutes)
#
# So far times were given. Now two real ranks, each on a core of its own, unpaced, and a model large enough that
# computing takes most of the time. Four schedules take turns, step by step. From the runs of `gpipe` and `zb_h1` comes
# what the simulator wants to know: what F, I and W take at each stage, and a message.


# %% tags=["measure-costs"]
BIG = md.GPTConfig(layers=8, dim=128, heads=4, seq=64, tie=False)
MANY = 4  # micro-batches of 4 sequences
NAMES = ("gpipe", "1f1b", "zb_h1", "zb_h2")
long = md.stdlib_tokens(seed=0, seq=BIG.seq, batch=16)


def message_s(world):
    """Seconds of a stage's output to the other rank: half of there and back, the median of 20."""
    x, found = torch.zeros(4, BIG.seq, BIG.dim), []
    for _ in range(20):
        start = time.perf_counter()
        for sender in (0, 1):
            world.send(x, 1 - sender) if world.rank == sender else world.recv(x, sender)
        found.append((time.perf_counter() - start) / 2)
    return sorted(found)[10]


def taking_turns(world, programs, steps=5):
    """{name: [(seconds, timeline of this rank) of each step]}, after a first step to warm up"""
    pipelines = {name: pipeline_of(world, program, BIG) for name, program in programs.items()}
    found = {name: [] for name in programs}
    for step in range(steps + 1):
        for name, pipeline in pipelines.items():
            batch = long.batch(step)
            world.barrier()
            start = time.perf_counter()
            pipeline.step(*batch)
            found[name].append((time.perf_counter() - start, pipeline.timeline))
    return {name: each[1:] for name, each in found.items()}


def median_steps(ranks):
    """{name: (seconds, timeline) of all ranks together in the median step}"""
    in_order = {
        name: sorted(all_ranks([rank[name] for rank in ranks]), key=lambda step: step[0])
        for name in ranks[0]
    }
    return {name: steps[len(steps) // 2] for name, steps in in_order.items()}


programs = {name: build(name, 2, MANY) for name in NAMES}
both_ranks = md.launch(taking_turns, ranks=2, args=(programs,), check=False)
comm = max(md.launch(message_s, ranks=2, check=False))
costs = {
    name: md.schedule.costs([run for found in both_ranks for _, run in found[name]])
    for name in ("gpipe", "zb_h1")
}
for name, kinds in costs.items():
    print("backward whole (I stands for all of it)" if name == "gpipe" else "backward split")
    for kind, seconds in kinds.items():
        print(f"  {kind}: stage 0 {seconds[0] * 1e3:5.1f} ms, stage 1 {seconds[1] * 1e3:5.1f} ms")
print(f"a message: {comm * 1e3:.2f} ms")

# %% [markdown]
# On the first stage I has nothing to do, since nobody wants the gradient of tokens: its W is all of the way back. On the
# other both halves together take longer than the whole: what lies between them has to be kept, and is read again from
# memory.
#
# With these numbers all four are simulated. 1F1B and ZB-H2 gave none of them.

# %% tags=["predicted-measured"]
expected = {
    name: simulate(program, **costs["zb_h1" if "zb" in name else "gpipe"], comm=comm)
    for name, program in programs.items()
}
measured = median_steps(both_ranks)
print("          simulated   measured   measured / simulated   bubble of both")
for name, run in expected.items():
    seconds, timeline = measured[name]
    print(
        f"{name:8s} {run.makespan * 1e3:7.0f} ms {seconds * 1e3:7.0f} ms "
        f"{seconds / run.makespan:14.2f} {run.bubble:22.1%} {timeline.bubble:5.1%}"
    )

# %% tags=["figure-measured"]
viz.pipeline({"1f1b simulated": expected["1f1b"], "1f1b": measured["1f1b"][1]}, unit="ms")

# %% [markdown]
# Compare bubbles and times. If splitting costs more than the wait that it fills, a smaller bubble comes with a longer
# step: on two ranks there is little to fill. What counts is the time.
#
# ### Send order and deadlock
#
# The executor's sends wait for nobody, and receives are posted before they are needed. What if a send waited until the
# other side receives, as it may on a GPU? Here are both schedules written out, with a receive before what needs it
# and a send after what made it. Messages alone, nothing is computed:


# %% tags=["blocking-hang"]
def only_messages(world, name, wait):
    """Run the sends and receives of a schedule; wait: a send ends when the other side receives."""
    sent = []
    for step in md.schedule.lower(build(name, world.size, 4))[world.rank]:
        if isinstance(step, md.schedule.Action):
            continue
        _, src, dst = step.message
        if step.kind == "recv":
            world.recv(torch.zeros(4), src)
        elif wait:
            world.send(torch.zeros(4), dst)
        else:
            sent.append(world.isend(torch.zeros(4), dst))
    for handle in sent:
        handle.wait()
    return "runs to its end"


for name, wait in (("gpipe", True), ("1f1b", False), ("1f1b", True)):
    print(f"{name}, sends {'wait' if wait else 'do not wait'}: ", end="")
    try:
        print(md.launch(only_messages, ranks=2, args=(name, wait))[0])
    except md.LaunchError as error:
        print(f"\n{error}")
print("what the validator says of sends that wait:")
for name in both:
    says = "hangs" if validate(build(name, 2, 4)).blocking_hangs else "runs"
    print(f"  {name:6s} {says}")

# %% [markdown]
# GPipe sends all activations one way, then all gradients the other way. In 1F1B a rank has an activation for the
# next one while that has a gradient for it: both send, and nobody receives. Cure: sends that do not wait, or a
# send and a receive that are started together.
#
# ### Micro-batches against arithmetic efficiency
#
# More micro-batches, a smaller bubble. Why not as many as there are sequences? Two ranks, a batch of 16 sequences, and
# micro-batches of 16 down to one of them:


# %% tags=["arithmetic-efficiency"]
SIZES = [16, 8, 4, 2, 1]
by_size = {size: build("1f1b", 2, 16 // size) for size in SIZES}
ranks = md.launch(taking_turns, ranks=2, args=(by_size, 3), check=False)
steps = median_steps(ranks)
per_sequence = {}
for size, (seconds, timeline) in steps.items():
    each = md.schedule.costs(timeline)
    per_sequence[size] = max(f + b for f, b in zip(each["F"], each["I"], strict=True)) / size
    print(
        f"micro-batch of {size:2d}: a stage takes {per_sequence[size] * 1e3:4.1f} ms a sequence, "
        f"formula's bubble {1 / (16 // size + 1):4.0%}, a step {seconds * 1e3:3.0f} ms"
    )

# %% tags=["figure-efficiency"]
least = min(per_sequence.values())
viz.curves(
    [16 // size for size in SIZES],
    measured={"a step": [seconds * 1e3 for seconds, _ in steps.values()]},
    predicted={"a step": lambda m: (m + 1) / m * 16 * least * 1e3},
    xlabel="micro-batches",
    ylabel="time of a step [ms]",
    title="Two ranks, 1F1B, 16 sequences",
)

# %% [markdown]
# The line is what the bubble alone would make of it: each sequence at the least time. The points leave it when
# micro-batches get small: starting a product takes as long for one row as for many, and a GPU needs many more rows than
# a core does to be busy. So there is a best number of micro-batches, and it has to be measured.
#
# ### Design your own schedule
#
# A program is text, a row for each rank. Two that are wrong; look for the mistake before you read what the validator
# says:

# %% tags=["own-wrong"]
FORGETFUL = """
0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3
1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3
"""
STUCK = """
0F0, 0F1, 0B0, 0B1, 0B2, 0F2, 0F3, 0B3
1F0, 1B0, 1F1, 1B1, 1F2, 1B2, 1F3, 1B3
"""
for text_of_it in (FORGETFUL, STUCK):
    try:
        validate(parse(text_of_it))
    except ValueError as error:
        print("refused:", error)

# %% [markdown]
# Now yours. Change the rows and run the cell; a backward pass is a `B`, or an `I` and later a `W`.

# %% tags=["own-schedule"]
MINE = """
0F0, 0F1, 0F2, 0B0, 0F3, 0B1, 0B2, 0B3
1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1F3, 1I3, 1W2, 1W3
"""
mine, usual = parse(MINE), build("1f1b", 2, MANY)
report = validate(mine)
print(f"valid: {len(report.messages)} messages; with sends that wait it ", end="")
print("hangs" if report.blocking_hangs else "runs")


def gradients_of_mine(world):
    pipeline = pipeline_of(world, mine, dtype=torch.float64)
    pipeline.step(tokens, targets)
    return 0, gradients(pipeline)


error = furthest(md.launch(gradients_of_mine, ranks=2), alone)
print(f"gradients equal those of one process up to {error:.0e}")
ranks = md.launch(taking_turns, ranks=2, args=({"1f1b": usual, "mine": mine}, 3), check=False)
split = any(action.kind in "IW" for row in mine for action in row)  # a B then counts as its halves
prices = {"1f1b": costs["gpipe"], "mine": costs["zb_h1" if split else "gpipe"]}
lines = {}
for name, program in (("1f1b", usual), ("mine", mine)):
    run = simulate(program, **prices[name], comm=comm)
    seconds, timeline = median_steps(ranks)[name]
    lines[f"{name}, simulated: {run.makespan * 1e3:.0f} ms, holds {run.peak_in_flight}"] = run
    lines[f"{name}: {seconds * 1e3:.0f} ms, holds {timeline.peak_in_flight}"] = timeline
viz.pipeline(lines, unit="ms")

# %% [markdown]
# ## Concept cards (15 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong.

# %% tags=["card-when-it-begins"]
card("when-it-begins")

# %% tags=["card-micro-batches-for-a-bubble"]
card("micro-batches-for-a-bubble")

# %% tags=["card-held-at-once"]
card("held-at-once")

# %% tags=["card-twice-the-stages"]
card("twice-the-stages")

# %% tags=["card-who-waits-for-w"]
card("who-waits-for-w")

# %% tags=["card-what-zero-means"]
card("what-zero-means")

# %% tags=["card-more-and-smaller"]
card("more-and-smaller")

# %% tags=["card-where-they-stand"]
card("where-they-stand")

# %% [markdown]
# ## Why not?
#
# - **When does communication bind?** Rarely by its bytes: a message a boundary and micro-batch. By its delay: each
#   micro-batch waits for it P-1 times on the way, and with V stages a rank V times as often.
# - **What breaks?** The batch has to have many micro-batches, each large enough to keep a chip busy, and the bubble grows
#   with every rank. Stages are never quite equal: embedding and head come on top, and the slowest stage sets the pace.
#   Whatever needs all stages at once, such as the norm of the gradient, makes everybody wait.
# - **What then?** Few ranks a pipeline, and more pipelines beside one another, as data parallelism. Inside a stage,
#   tensor parallelism over the fast links; pipelines go over the slow ones, between machines. If experts make the model
#   large rather than depth, spread the experts: lesson 07.

# %% [markdown]
# ## Test (25 minutes)
#
# Answers are kept as you give them; the cell below the test submits them and then explains every one. A calculator, or a
# cell of your own, is welcome.

# %% tags=["quiz"]
quiz("06")

# %% tags=["submit"]
submit("06")

# %% [markdown]
# ## Where to go next
#
# - Exercises: `practice_ps06_pipeline_parallelism.ipynb`, beside this notebook in `workspace/`: GPipe and 1F1B as
#   programs, when an action starts, the step that carries a program out, and weight gradients put off.
# - The files, after that: `minidist/schedule/program.py` says what depends on what, `minidist/schedule/library.py` has
#   the schedules, `minidist/schedule/simulate.py` asks when, `minidist/parallel/pipeline.py` carries it out.
# - Lab 06 (`labs/06_pipeline`): which schedule, how many micro-batches, and how many stages, on one to eight GPUs.
# - Papers: Huang et al., *GPipe*, 2018, arXiv:1811.06965; Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN
#   Training*, 2020, arXiv:2006.09503, and *Efficient Large-Scale Language Model Training on GPU Clusters*, 2021,
#   arXiv:2104.04473; Qi et al., *Zero Bubble Pipeline Parallelism*, 2023, arXiv:2401.10241; DeepSeek-AI, *DeepSeek-V3
#   Technical Report*, 2024, arXiv:2412.19437.
