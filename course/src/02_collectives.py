# %% [markdown] tags=["head"]
# # 02 Collectives
#
# **The question.** Every rank holds a gradient as large as the model, and everyone needs the sum of all of them. What
# must each rank send, and how long does that take?
#
# **Twelve concepts**
#
# - reduce, all-reduce, reduce-scatter, all-gather, all-to-all, broadcast
# - ring in two halves
# - bytes per rank almost independent of n
# - latency against bandwidth (alpha-beta)
# - tree against ring
# - algorithm against bus bandwidth
# - hierarchical when links differ
#
# **Three sittings**: 1 *Who holds what* 20 minutes, 2 *The ring* 25 minutes, 3 *What it costs* 25 minutes. Then the
# cards and a test, 40 minutes.

# %% tags=["setup"]
import statistics
import time

import torch

import minidist as md
from grading import card, compare, predict, quiz, reveal, review, submit
from minidist import viz

# %% tags=["review"]
review("02")

# %% [markdown]
# Before anything runs, commit to a number. The prediction is about this model:

# %% tags=["the-model"]
CONFIG = md.GPTConfig(layers=2, dim=64, heads=4)
parameters = sum(p.numel() for p in md.GPT(CONFIG).parameters())
print(f"{parameters:,} parameters, their gradients {4 * parameters:,} bytes in float32")

# %% tags=["predict-bytes"]
predict("ring-bytes-here")

# %% [markdown]
# ## Sitting 1: Who holds what (20 minutes)
#
# A **collective** is a call that all ranks of a group make together. Six of them are enough for everything in this
# course. They differ in who holds what before and after.
#
# ### The idea
#
# Each rank's tensor has four slices, A to D. A colour and a digit say whose numbers a slice holds; `sum` means the sum
# over all ranks. The picture is read off from what four real ranks held: every slice carries a power of two of its own,
# so that a sum tells what went into it.


# %% tags=["who-holds-what"]
def six_collectives(world):
    n, rank = world.size, world.rank
    full = torch.tensor(viz.marks(rank, n))  # this rank's own marks, one for each slice
    empty = torch.zeros_like(full)
    own = torch.where(torch.arange(n) == rank, full, 0)  # only the slice that bears my number
    source = full if rank == 0 else empty

    piece = world.reduce_scatter(full)  # one slice comes back
    scattered = empty.clone()
    scattered[rank] = piece
    return {
        "broadcast from rank 0": (source, world.broadcast(source.clone(), src=0)),
        "reduce to rank 0": (full, world.reduce(full.clone(), dst=0)),
        "all-reduce": (full, world.all_reduce(full.clone())),
        "reduce-scatter": (full, scattered),
        "all-gather": (own, world.all_gather(own[rank : rank + 1])),
        "all-to-all": (full, world.all_to_all(full)),
    }


held = md.launch(six_collectives, ranks=4)
viz.holdings(
    {
        name: tuple([rank[name][when].tolist() for rank in held] for when in (0, 1))
        for name in held[0]
    },
)

# %% [markdown]
# Three things to see in it:
#
# - A **reduce-scatter** and then an **all-gather** is an **all-reduce**: the first leaves every rank with one finished
#   slice, the second hands the finished slices round.
# - An **all-gather** is *n* broadcasts at once, one from each rank; a **reduce-scatter** is *n* reduces at once, one to
#   each rank.
# - An **all-to-all** adds nothing up. Row *i*, column *j* becomes row *j*, column *i*: a transposition across ranks.

# %% [markdown]
# ## Sitting 2: The ring (25 minutes)
#
# ### The idea
#
# Put the ranks in a circle. Everyone talks only to the next one, so all links carry something all the time. In the
# first half each slice travels round, and every rank that it passes adds its own numbers. After n-1 steps all slices
# are finished, each on another rank. In the second half the finished slices travel round once more.
#
# The strip shows four real ranks. Framed is what a rank passes on in this step; the arrow at the bottom leads back to
# the top.


# %% tags=["record-ring"]
class Watched:
    """A Comm that notes what its rank sends."""

    def __init__(self, comm):
        self.comm, self.sent = comm, []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def isend(self, x, dst):
        self.sent += x.tolist()  # one slice, one mark
        return self.comm.isend(x, dst)


def watch_ring(world):
    first = viz.marks(world.rank, world.size)
    x, watched = torch.tensor(first), Watched(world)
    md.algorithms.ring_all_reduce(x, watched)
    # what this rank held before each message, and at the end
    return viz.replay(first, watched.sent, x.tolist())


def by_step(ranks):
    """What the ranks held, step by step: [step][rank] -> marks."""
    return [list(step) for step in zip(*md.launch(watch_ring, ranks=ranks), strict=True)]


recorded = {ranks: by_step(ranks) for ranks in range(2, 7)}
viz.ring_strip(recorded[4])

# %% [markdown]
# ### The code
#
# Both halves and the whole, read from the file that they run from. Assignment ps02 asks for just these, so they are
# folded: build them first.

# %% tags=["code-ring"]
viz.show(
    md.algorithms,
    "reduce_around",
    "gather_around",
    "ring_all_reduce",
    folded="exercises 02.2 to 02.4 ask for this",
)

# %% [markdown]
# ### The run
#
# Now the run that you predicted. The ring is built from single messages, and the recorder counts the bytes of each.


# %% tags=["measure-bytes"]
def one_step(world):
    model = md.GPT(CONFIG, seed=0)
    tokens, targets = md.stdlib_tokens(seed=0).batch(step=0, rank=world.rank, ranks=world.size)
    md.token_loss(model(tokens), targets, world).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    world.recorder.clear()
    # built from send and recv, so the bytes are counted message by message
    md.algorithms.ring_all_reduce(flat, world)
    return world.recorder.bytes_sent()


RANKS = 4
sent = md.launch(one_step, ranks=RANKS)
assert set(sent) == {sent[0]}  # every rank sends the same
compare(
    "ring-bytes-here", sent[0], title="A ring all-reduce of the gradients", axis="sent by one rank"
)

# %% [markdown]
# ### In two halves
#
# Each half sends n-1 slices of 1/n of the tensor. The halves are collectives of their own, and one after the other they
# are the all-reduce, number by number and byte by byte.


# %% tags=["ring-halves"]
def halves(world, length):
    x = torch.arange(length) * (world.rank + 1)
    sent, results = [], []
    for run in (
        lambda: md.algorithms.ring_reduce_scatter(x, world),
        lambda: md.algorithms.ring_all_gather(results[0], world),
        lambda: md.algorithms.ring_all_reduce(x.clone(), world),
    ):
        world.recorder.clear()
        results.append(run())
        sent.append(world.recorder.bytes_sent())
    return sent, torch.equal(results[1], results[2])


for rank, ((first, second, whole), equal) in enumerate(md.launch(halves, ranks=4, args=(1000,))):
    print(
        f"rank {rank}: bytes in halves {first} + {second}, as a whole {whole}; "
        f"same numbers: {equal}"
    )

# %% [markdown]
# ### Bytes per rank, almost independent of n
#
# The obvious way to a sum is that everyone sends everything to everyone. It gives the same numbers:


# %% tags=["naive-exchange"]
def naive_all_reduce(x, comm):
    """Everyone sends its whole tensor to every other rank."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sending = [comm.isend(x, rank) for rank in others]
    received = [torch.empty_like(x) for _ in others]
    receiving = [comm.irecv(buffer, rank) for buffer, rank in zip(received, others, strict=True)]
    for handle in (*sending, *receiving):
        handle.wait()
    return x + sum(received)


def bytes_both_ways(world, length):
    x = torch.arange(length, dtype=torch.float32) + world.rank
    world.recorder.clear()
    naive = naive_all_reduce(x, world)
    by_naive = world.recorder.bytes_sent()
    world.recorder.clear()
    md.algorithms.ring_all_reduce(x, world)
    assert torch.equal(naive, x)
    return by_naive, world.recorder.bytes_sent()


LENGTH = 840  # divisible by every number of ranks from 1 to 8
worlds = range(1, 9)
counted = [md.launch(bytes_both_ways, ranks=n, args=(LENGTH,))[0] for n in worlds]
viz.curves(
    worlds,
    measured={
        "naive exchange": [naive / (4 * LENGTH) for naive, _ in counted],
        "ring": [ring / (4 * LENGTH) for _, ring in counted],
    },
    predicted={"naive exchange": lambda n: n - 1, "ring": lambda n: 2 * (n - 1) / n},
    xlabel="ranks",
    ylabel="sent by one rank [tensor sizes]",
    title="What one rank sends in an all-reduce",
)

# %% [markdown]
# The naive exchange grows with every rank that joins. The ring sends 2(n-1)/n times the tensor: never more than twice
# its size, however many ranks there are. This is also the least possible: whatever the algorithm, someone has to send
# that much (Patarasuk and Yuan 2009). What does grow is the number of steps, 2(n-1), and each step waits for a message.
#
# ### Explore
#
# Play the ring, with two to six ranks.

# %% tags=["explore-ring"]
viz.ring_explorer(recorded)

# %% [markdown]
# ## Sitting 3: What it costs (25 minutes)
#
# ### Latency against bandwidth
#
# A message of *s* bytes takes about **alpha + beta s** seconds: alpha is what even an empty message takes, beta the
# time for each further byte, and 1/beta the bandwidth. Two numbers, for any link from a cable to the shared memory of
# this machine. Measure them here: two ranks send a tensor back and forth, and half a round trip is one message. In
# cells that measure time, the checks that `launch` makes by default are off.

# %% tags=["measure-alpha-beta"]
SIZES = [4**k for k in range(1, 13)]  # bytes: 4 to 16,777,216


def ping_pong(world, sizes, repeats=15):
    """Seconds of one message of each size: the median of some round trips of two ranks, halved."""
    seconds = []
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8)
        trips = []
        for _ in range(repeats):
            world.barrier()
            start = time.perf_counter()
            if world.rank == 0:
                world.send(x, 1)
                world.recv(x, 1)
            else:
                world.recv(x, 0)
                world.send(x, 0)
            trips.append(time.perf_counter() - start)
        seconds.append(statistics.median(trips) / 2)
    return seconds


seconds = md.launch(ping_pong, ranks=2, args=(SIZES,), check=False)[0]
alpha_s, beta_s_per_byte = md.fit_alpha_beta(SIZES, seconds)
viz.alpha_beta(
    SIZES, seconds, alpha_s, beta_s_per_byte, title="A message between two ranks of this machine"
)

# %% [markdown]
# Left of the knee a message costs its latency, whatever its size: there, send fewer and larger ones. Right of it bytes
# are what counts. The knee is at alpha/beta bytes:

# %% tags=["knee"]
print(f"alpha {alpha_s * 1e6:.0f} us, bandwidth {1 / beta_s_per_byte / 1e9:.2f} GB/s")
print(f"knee at {alpha_s / beta_s_per_byte:,.0f} bytes")

# %% [markdown]
# With these two numbers every algorithm gets a price. The ring makes 2(n-1) steps of 1/n of the tensor each:
#
# $$t_\text{ring} = 2(n-1)\,\alpha + 2\,\frac{n-1}{n}\,S\,\beta$$
#
# Does it hold here, for a ring of two ranks?


# %% tags=["ring-predicted"]
def time_ring(world, sizes, repeats=15):
    """Seconds of a ring all-reduce of each size in bytes: this rank's, the median of some runs."""
    seconds = []
    for size in sizes:
        x, runs = torch.zeros(size // 4), []
        for _ in range(repeats):
            world.barrier()
            start = time.perf_counter()
            md.algorithms.ring_all_reduce(x, world)
            runs.append(time.perf_counter() - start)
        seconds.append(statistics.median(runs))
    return seconds


ring_s = [
    max(times)
    for times in zip(*md.launch(time_ring, ranks=2, args=(SIZES[1:],), check=False), strict=True)
]
viz.curves(
    SIZES[1:],
    measured={"ring": [t * 1e3 for t in ring_s]},
    predicted={"ring": lambda size: (2 * alpha_s + size * beta_s_per_byte) * 1e3},
    xlabel="size [bytes]",
    ylabel="time [ms]",
    title="Ring all-reduce on two ranks of this machine",
    log="xy",
)

# %% [markdown]
# The line uses only alpha and beta of single messages. What it leaves out is adding the numbers up, and that Python
# itself takes time between two messages.
#
# ### Tree against ring
#
# A **tree** needs fewer steps. Ranks meet in pairs, then pairs of pairs: after log2(n) steps one rank has the sum, and
# as many steps hand it back. But every step carries the whole tensor:
#
# $$t_\text{tree} = 2\log_2 n\,(\alpha + S\,\beta)$$
#
# Few steps or few bytes: it depends on the size. To see it without the noise of eight ranks on a few cores, the next
# runs are **paced**: tensors are really sent, and each message also takes the time that it would take on the cluster
# described here, by sleeping. The link is slow on purpose. This computer's own times come on top: the busier it is, the
# higher the measured points lie above their lines.

# %% tags=["paced-cluster"]
SLOW = md.Link(alpha_s=10e-3, bytes_per_s=8e6)
one_machine = md.Cluster(machines=1, chips=8, inside=SLOW)
print(f"alpha {SLOW.alpha_s * 1e3:g} ms, bandwidth {SLOW.bytes_per_s / 1e6:g} MB/s")

# %% tags=["predict-crossover"]
predict("crossover-here")


# %% tags=["tree-ring"]
def race(world, sizes):
    """Seconds of a tree and of a ring all-reduce for each size in bytes: the better of two runs."""
    times = {"tree": [], "ring": []}
    for size in sizes:
        for name, all_reduce in (
            ("tree", md.algorithms.tree_all_reduce),
            ("ring", md.algorithms.ring_all_reduce),
        ):
            runs = []
            for _ in range(2):
                x = torch.ones(size // 4)
                world.barrier()
                start = time.perf_counter()
                all_reduce(x, world)
                runs.append(time.perf_counter() - start)
            times[name].append(min(runs))
    return times


RACE_SIZES = [4_000, 16_000, 64_000, 256_000, 512_000]
raced = md.launch(race, ranks=8, args=(RACE_SIZES,), pace=one_machine, check=False)
slowest = {
    name: [max(times) for times in zip(*(r[name] for r in raced), strict=True)]
    for name in ("tree", "ring")
}
figure = viz.curves(
    RACE_SIZES,
    measured={name: [t * 1e3 for t in times] for name, times in slowest.items()},
    predicted={
        "tree": lambda size: 2 * 3 * SLOW.seconds(size) * 1e3,
        "ring": lambda size: 2 * 7 * SLOW.seconds(size / 8) * 1e3,
    },
    xlabel="size [bytes]",
    ylabel="time [ms]",
    title="All-reduce on eight ranks",
    paced=True,
    log="xy",
)
reveal("crossover-here", figure)


# %% tags=["crossover"]
def crossing(sizes, a, b):
    """The size where curve a, cheaper at first, meets curve b: interpolated on log scales."""
    from math import exp, log

    gaps = [log(y / x) for x, y in zip(a, b, strict=True)]
    for i in range(len(sizes) - 1):
        if gaps[i] > 0 >= gaps[i + 1]:
            share = gaps[i] / (gaps[i] - gaps[i + 1])
            return exp(log(sizes[i]) + share * log(sizes[i + 1] / sizes[i]))
    return float("nan")


compare(
    "crossover-here",
    crossing(RACE_SIZES, slowest["tree"], slowest["ring"]),
    title="Where the ring overtakes the tree",
    axis="size of the tensor",
    paced=True,
)

# %% [markdown]
# Libraries choose for every call: by size, number of ranks and topology. What they add to these two is in
# `md.algorithms` as well: recursive halving and doubling takes the tree's few steps with the ring's few bytes, on a
# link that lets any two ranks talk.
#
# ### Algorithm bandwidth and bus bandwidth
#
# "The all-reduce ran at 3 GB/s" can mean two things. **Algorithm bandwidth** is the size of the tensor over the time:
# what the caller sees. It falls as ranks join, although every link is as busy as before. **Bus bandwidth** multiplies
# it by 2(n-1)/n, the bytes that a rank must send for each byte of the tensor. It can be compared with the link,
# whatever the number of ranks; the gap that remains is latency. Reports name the one or the other; a factor of almost
# two lies between them.


# %% tags=["bandwidths"]
def time_once(world, nbytes):
    x = torch.ones(nbytes // 4)
    world.barrier()
    start = time.perf_counter()
    md.algorithms.ring_all_reduce(x, world)
    return time.perf_counter() - start


LARGE = 2_000_000
ranks = [2, 4, 6, 8]
times = [
    max(md.launch(time_once, ranks=n, args=(LARGE,), pace=one_machine, check=False)) for n in ranks
]
algorithm = [LARGE / t / 1e6 for t in times]


def predicted_algorithm(n):
    return LARGE / (2 * (n - 1) * SLOW.seconds(LARGE / n)) / 1e6


viz.curves(
    ranks,
    measured={
        "algorithm": algorithm,
        "bus": [2 * (n - 1) / n * a for n, a in zip(ranks, algorithm, strict=True)],
    },
    predicted={
        "algorithm": predicted_algorithm,
        "bus": lambda n: 2 * (n - 1) / n * predicted_algorithm(n),
        "link": lambda n: SLOW.bytes_per_s / 1e6,
    },
    xlabel="ranks",
    ylabel="bandwidth [MB/s]",
    title="One ring, two bandwidths",
    paced=True,
)

# %% [markdown]
# ### When links differ
#
# Inside a machine, chips have fast links; between machines they are often much slower. A ring through all of them moves
# at the speed of its slowest link. The **hierarchical** all-reduce sends less over it: reduce-scatter inside each
# machine, all-reduce of the slices between machines, all-gather inside. Only one slice of each rank crosses the slow
# link, and each rank of a machine carries another slice across.

# %% tags=["hierarchical"]
FAST = md.Link(alpha_s=1e-3, bytes_per_s=100e6)
BETWEEN = md.Link(alpha_s=2e-3, bytes_per_s=10e6)
two_machines = md.Cluster(machines=2, chips=4, inside=FAST, between=BETWEEN)


def flat_and_hierarchical(world, sizes):
    """Seconds of both all-reduces for each size in bytes."""
    times = {"one ring of eight": [], "hierarchical": []}
    for size in sizes:
        for name in times:
            x = torch.ones(size // 4)
            world.barrier()
            start = time.perf_counter()
            if name == "hierarchical":
                md.algorithms.hierarchical_all_reduce(x, world, inside=4)
            else:
                md.algorithms.ring_all_reduce(x, world)
            times[name].append(time.perf_counter() - start)
            assert (x == world.size).all()
    return times


def hierarchical_s(size):
    # reduce-scatter and all-gather over the four of a machine
    inside = 2 * 3 * FAST.seconds(size / 4)
    # all-reduce of a quarter over two machines
    across = 2 * BETWEEN.seconds(size / 4 / 2)
    return inside + across


BOTH_SIZES = [500_000, 1_000_000, 2_000_000]
both = md.launch(flat_and_hierarchical, ranks=8, args=(BOTH_SIZES,), pace=two_machines, check=False)
viz.curves(
    [size / 1e6 for size in BOTH_SIZES],
    measured={
        name: [max(t) * 1e3 for t in zip(*(rank[name] for rank in both), strict=True)]
        for name in both[0]
    },
    predicted={
        "one ring of eight": lambda mb: 2 * 7 * BETWEEN.seconds(mb * 1e6 / 8) * 1e3,
        "hierarchical": lambda mb: hierarchical_s(mb * 1e6) * 1e3,
    },
    xlabel="size [MB]",
    ylabel="time [ms]",
    title="All-reduce on two machines of four chips",
    paced=True,
)

# %% [markdown]
# ### Explore
#
# Which algorithm is fastest, for which size, on how many ranks, over which link?

# %% tags=["explore-cost"]
viz.cost_explorer()

# %% [markdown]
# ## Concept cards (15 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong.

# %% tags=["card-an-all-reduce-in-two"]
card("an-all-reduce-in-two")

# %% tags=["card-transposition"]
card("transposition")

# %% tags=["card-ring-first-half"]
card("ring-first-half")

# %% tags=["card-ring-and-more-ranks"]
card("ring-and-more-ranks")

# %% tags=["card-one-message-for-many"]
card("one-message-for-many")

# %% tags=["card-tree-and-ring-times"]
card("tree-and-ring-times")

# %% tags=["card-bus-bandwidth"]
card("bus-bandwidth")

# %% tags=["card-over-the-slow-link"]
card("over-the-slow-link")

# %% [markdown]
# ## Why not?
#
# - **When does communication bind?** When it takes longer than the computation that could run meanwhile. Bytes per rank
#   do not fall as ranks join, but with a fixed global batch the computation of each rank does: so beyond some number of
#   ranks any fixed job is bound by communication.
# - **What breaks?** A ring of n ranks has n links, and the slowest one sets its pace; 2(n-1) steps of latency make it
#   slow for small tensors on many ranks; and every rank must come. Sums in another order round differently, so two
#   algorithms agree on integers exactly and on floats within rounding.
# - **Why write it oneself?** Not to replace the library: to know what it does, what it costs, and what has to be
#   rebuilt where there is none.

# %% [markdown]
# ## Test (25 minutes)
#
# Answers are kept as you give them; the cell below the test submits them and then explains every one. A calculator, or a
# cell of your own, is welcome.

# %% tags=["quiz"]
quiz("02")

# %% tags=["submit"]
submit("02")

# %% [markdown]
# ## Where to go next
#
# - Exercises: `practice_ps02_collectives.ipynb`, beside this notebook in `workspace/`: the ring from send and receive,
#   that is a shift, the all-gather, the reduce-scatter, and the all-reduce from both.
# - The file, after that: `minidist/comm/algorithms.py`. Each function is a few lines of send and recv.
# - Papers: Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH*, 2005;
#   Patarasuk and Yuan, *Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations*, 2009; Sergeev and Del
#   Balso, *Horovod*, 2018, arXiv:1802.05799.
# - NVIDIA's note on bus bandwidth: [nccl-tests,
#   PERFORMANCE.md](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
# - Next: 03, data parallelism. It uses the all-reduce on gradients, and hides it behind the backward pass. Lab 03
#   measures that on one to eight ranks, or on GPUs.
