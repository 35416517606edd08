# %% [markdown] tags=["head"]
# # 00 Start
#
# **The question.** How do several processes train one model together, and what happens when one of them does not come?
#
# **Six concepts**
#
# - a rank is a process
# - world, group
# - same program, different data (SPMD)
# - a collective needs everyone
# - deadlock
# - rendezvous
#
# **Three sittings**: 1 *Ready?* 15 minutes, 2 *Ranks* 25 minutes, 3 *One model on four ranks* 20 minutes. Then the cards
# and a test, 30 minutes.

# %% tags=["setup"]
import os
import tempfile
import time

import torch
import torch.nn.functional as F

import minidist as md
from course import readiness
from grading import card, compare, predict, progress, quiz, reveal, review, submit
from minidist import viz

torch.set_num_threads(1)  # the ranks need the cores

# %% tags=["review"]
review("00")

# %% [markdown]
# Every lesson opens like this, with cards on what you missed before. Further down it asks for predictions and keeps the
# results back until you have made them, asks questions whose answers explain themselves, and ends with a test. What you
# did is kept in your workspace. This panel shows it for all lessons:

# %% tags=["progress"]
progress()

# %% [markdown]
# ## Sitting 1: Ready? (15 minutes)
#
# First the machine. The last row starts two ranks and lets them add two numbers. If a row says FAILED, its text says
# what to do.

# %% tags=["machine"]
readiness.machine()

# %% [markdown]
# Then you. The course takes four things for granted. For each there is one question: write your answer instead of
# `None` and run the cell. It computes the right answer and, if yours differs, says where to read up.
#
# **Autograd.** Two backward passes run, and nobody clears the gradient in between. What is `x.grad` at the end?

# %% tags=["ready-autograd"]
answer = None


def two_backwards():
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()
    (x * x).backward()
    return x.grad.item()


readiness.check(
    "autograd",
    answer,
    two_backwards,
    "A Gentle Introduction to torch.autograd, "
    "https://docs.pytorch.org/tutorials/beginner/blitz/autograd_tutorial.html",
)

# %% [markdown]
# **Block matrix products.** A is cut into a left and a right half, B into an upper and a lower half. Each pair of
# halves is multiplied. Is AB the `"sum"` of the two products, or do they stand `"side by side"`?

# %% tags=["ready-blocks"]
answer = None


def multiply_halves():
    a, b = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    left, right = a[:, :2], a[:, 2:]
    upper, lower = b[:2], b[2:]
    return "sum" if torch.allclose(left @ upper + right @ lower, a @ b) else "side by side"


readiness.check(
    "blocks", answer, multiply_halves, "Block matrix, https://en.wikipedia.org/wiki/Block_matrix"
)

# %% [markdown]
# **Bytes of a dtype.** How many bytes do a million numbers in bfloat16 take?

# %% tags=["ready-bytes"]
answer = None
readiness.check(
    "bytes",
    answer,
    lambda: torch.zeros(1_000_000, dtype=torch.bfloat16).nbytes,
    "torch.dtype, https://docs.pytorch.org/docs/stable/tensor_attributes.html: "
    "the number in the name counts bits",
)

# %% [markdown]
# **Processes.** Two ranks each add 1 to `box[0]`, which is 0 here in the notebook. What is `box[0]` here afterwards?

# %% tags=["ready-processes"]
answer = None
box = [0]


def add_one(world):
    box[0] += 1
    return box[0]


def what_the_notebook_sees():
    md.launch(add_one, ranks=2)
    return box[0]


readiness.check(
    "processes",
    answer,
    what_the_notebook_sees,
    "Process (computing), https://en.wikipedia.org/wiki/Process_(computing): "
    "processes do not share memory",
)

# %% [markdown]
# ## Sitting 2: Ranks (25 minutes)
#
# Four ranks will work for these times and then meet. Before that runs, commit to a number.

# %% tags=["work-times"]
work_s = [0.1, 0.2, 0.5, 0.3]  # seconds of work of rank 0, 1, 2, 3

# %% tags=["predict-wait"]
predict("wait-here")

# %% [markdown]
# ### The idea
#
# A **rank** is a process with memory of its own. Ranks cannot see one another's variables. They run the same function,
# and each is told which one it is: `world.rank` of `world.size`. All that joins them are messages.
#
# `md.launch(f, ranks=4)` starts four processes, runs `f(world)` in each and returns the four results in order of rank.
# What a rank prints carries its number.


# %% tags=["first-world"]
def hello(world):
    x = torch.tensor([world.rank + 1])
    before = x.item()
    world.all_reduce(x)  # the sum over all ranks, in place, on every rank
    print(f"I am rank {world.rank} of {world.size}, and the sum is {x.item()}")
    return {"process": os.getpid(), "x before": before, "x after": x.item()}


facts = md.launch(hello, ranks=4)
print("this notebook is process", os.getpid())

# %% tags=["picture-world"]
viz.world(facts)

# %% [markdown]
# **Same program, different data (SPMD).** There is no master that hands out work. Every rank runs the same lines and
# uses its number to pick its part. `md.partition(length, ranks)` is the one rule of this package for cutting something
# into parts: equal ones of rounded-up size, the last ones shorter or empty.


# %% tags=["spmd"]
def sum_of_squares(world):
    mine = md.partition(10, world.size)[world.rank]  # a slice, different on each rank
    part = torch.arange(10)[mine]
    total = world.all_reduce((part**2).sum())
    print(f"my numbers: {part.tolist()}")
    return total.item()


print("each rank's result:", md.launch(sum_of_squares, ranks=4))
print("one process:       ", (torch.arange(10) ** 2).sum().item())

# %% [markdown]
# **World and group.** The *world* is all ranks. A *group* is some of them, with numbers of their own from 0 on. A
# collective runs over one group, and the others do not notice. Creating groups is itself something that every rank of
# the world does, also for groups it will not be in.


# %% tags=["groups"]
def world_and_group(world):
    pair = world.subgroups([[0, 1], [2, 3]], name="pair")
    x = torch.tensor([world.rank + 1])
    in_world, in_pair = world.all_reduce(x.clone()), pair.all_reduce(x.clone())
    return {
        "x": x.item(),
        "rank in pair": pair.rank,
        "sum in pair": in_pair.item(),
        "sum in world": in_world.item(),
    }


viz.world(
    md.launch(world_and_group, ranks=4),
    {"world": [0, 1, 2, 3], "a pair": [0, 1], "the other pair": [2, 3]},
)

# %% [markdown]
# ### The code
#
# This is what the package itself runs when you call `md.launch`, read from its file:

# %% tags=["code-launch"]
viz.show(md.launch)

# %% [markdown]
# ### A collective needs everyone
#
# Now the run that you predicted. `world.compute` notes when a rank works, and the recorder notes when each call began
# and ended.


# %% tags=["measure-wait"]
def work_then_meet(world, work_s):
    world.barrier()  # start together
    world.recorder.clear()
    with world.compute("work"):
        time.sleep(work_s[world.rank])
    world.all_reduce(torch.ones(1))
    return world.recorder.timeline()


first, *others = md.launch(work_then_meet, ranks=4, args=(work_s,))
measured = first.merge(others)
wait_s = measured.lane(0, "comm")[-1].seconds
compare("wait-here", wait_s, title="Rank 0 inside all_reduce", axis="time")

# %% tags=["timeline-wait"]
reveal("wait-here", viz.timeline(measured, "Work, then one all-reduce"))

# %% [markdown]
# An all-reduce ends on no rank before it has begun on every rank: the result depends on all of them. So the slowest
# rank sets the pace of all, and time "spent in communication" is often time spent waiting for a rank that computes
# longer.
#
# ### Explore
#
# Move a rank's work and see who waits.

# %% tags=["explore-arrival"]
viz.arrival_explorer()

# %% [markdown]
# ### A first deadlock
#
# If one rank does not call the collective at all, the others wait forever: a **deadlock**. On a cluster nothing is
# printed; the job just stands there until a timeout of many minutes. Here the launcher watches the ranks, and a world
# that stands still gets a report.
#
# The cell ends in an error on purpose; `except` prints it, so that the notebook goes on.


# %% tags=["deadlock"]
def skip_bad_batches(world):
    loss = torch.tensor([1.0, 2.0, float("nan"), 4.0])[world.rank]
    if loss.isnan():
        return "skipped"  # this rank never comes to the all-reduce
    world.all_reduce(loss)
    return loss.item()


try:
    md.launch(skip_bad_batches, ranks=4)
except md.LaunchError as error:
    print(error)

# %% [markdown]
# Read it from top to bottom: the verdict, then a row for each rank with what it waits for and the line of your code it
# stands in. The one that differs is the odd rank out. The cure is never a longer timeout: it is to have every rank make
# the same calls in the same order, for instance by letting all of them agree first whether to skip.
#
# Messages between two ranks can stand still too. Here both ranks send first and receive second. A `send` may wait until
# the other side receives, and neither gets there.


# %% tags=["deadlock-messages"]
def both_send_first(world):
    other = 1 - world.rank
    mine, theirs = torch.ones(4), torch.zeros(4)
    world.send(mine, other)
    world.recv(theirs, other)


try:
    md.launch(both_send_first, ranks=2)
except md.LaunchError as error:
    print(error)

# %% [markdown]
# The usual cure is to start both and then wait: `isend` and `irecv` return a handle at once.


# %% tags=["deadlock-cured"]
def both_at_once(world):
    other = 1 - world.rank
    mine, theirs = torch.full((4,), float(world.rank)), torch.zeros(4)
    sending, receiving = world.isend(mine, other), world.irecv(theirs, other)
    receiving.wait()
    sending.wait()
    return theirs.tolist()


md.launch(both_at_once, ranks=2)

# %% [markdown]
# ### A rank that raises
#
# An exception on one rank would leave the others waiting. What you want to see then is that rank's own traceback, not
# the others' complaint about a lost connection.


# %% tags=["raises"]
def divides(world):
    share = 12 // (world.rank - 1)
    return world.all_reduce(torch.tensor(share)).item()


try:
    md.launch(divides, ranks=4)
except md.LaunchError as error:
    print(error)

# %% [markdown]
# ### Rendezvous
#
# How do the ranks of a world find each other? Each opens a connection under some address, and nobody knows the others'
# addresses. They need one place that all know beforehand: the **rendezvous**. There each rank leaves its own address
# under its number and reads those of the others. It can be a file, as here, or one host and port that all are told, as
# `torchrun` does for ranks on many machines. The cell does what happens before your function runs, with a file and
# made-up addresses.


# %% tags=["rendezvous"]
def meet_at(world, place):
    store = torch.distributed.FileStore(place, world.size)
    store.set(f"address of rank {world.rank}", f"process {os.getpid()}")
    # get waits until somebody has set it
    return [store.get(f"address of rank {rank}").decode() for rank in range(world.size)]


with tempfile.TemporaryDirectory() as folder:
    for rank, addresses in enumerate(
        md.launch(meet_at, ranks=3, args=(os.path.join(folder, "rendezvous"),))
    ):
        print(f"rank {rank} knows {addresses}")

# %% [markdown]
# If a rank is missing at the rendezvous, the others wait there: too few started, or two told the same number. The same
# `f(world)` runs on a cluster: under `torchrun` or `srun`, `md.launch` reads rank, world size and rendezvous from the
# environment instead of starting processes.

# %% [markdown]
# ## Sitting 3: One model on four ranks (20 minutes)
#
# A small GPT learns real text, the source code of Python's standard library, byte by byte. First as you would write it
# for one process:

# %% tags=["train-alone"]
CONFIG = md.GPTConfig(layers=2, dim=64, heads=4, seq=32)
STEPS, LEARNING_RATE = 20, 0.1
text = md.stdlib_tokens(seed=0, seq=32, batch=16)


def train_alone():
    model = md.GPT(CONFIG, seed=0).double()
    optimizer = md.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        tokens, targets = text.batch(step)  # the whole batch
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


losses_alone, weights_alone = train_alone()
print(f"{sum(w.numel() for w in md.GPT(CONFIG).parameters()):,} parameters")
print(f"loss {losses_alone[0]:.3f} at the first step, {losses_alone[-1]:.3f} at the last")

# %% [markdown]
# Then on four ranks. Three things differ: each rank takes its part of the same batch, the model is wrapped so that
# gradients are averaged, and the loss counts the tokens of all ranks. Lesson 03 opens the wrapper.


# %% tags=["train-four"]
def train_together(world):
    model = md.GPT(CONFIG, seed=0).double()
    replica = md.DataParallel(model, world)
    optimizer = md.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        tokens, targets = text.batch(step, rank=world.rank, ranks=world.size)  # this rank's quarter
        loss = md.token_loss(replica(tokens), targets, world)
        loss.backward()  # the gradients are averaged over the ranks while it runs
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.all_reduce(loss.detach(), op="mean").item())
    return losses, model.state_dict()


results = md.launch(train_together, ranks=4)

# %% [markdown]
# Is it the same training? Compare every weight on every rank with the one process's. The numbers are float64 and the
# optimizer is plain SGD, so a wrong factor or a forgotten rank could not hide.


# %% tags=["same-weights"]
def largest_difference(ours, theirs):
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


moved = largest_difference(weights_alone, md.GPT(CONFIG, seed=0).double().state_dict())
for rank, (_, weights) in enumerate(results):
    print(
        f"rank {rank}: largest difference to one process "
        f"{largest_difference(weights, weights_alone):.1e}"
    )
print(f"for comparison, training moved a weight by up to {moved:.1e}")

# %% tags=["figure-training"]
steps = range(1, STEPS + 1)
viz.curves(
    steps,
    measured={"four ranks": results[0][0]},
    predicted={"one process": losses_alone},
    xlabel="step",
    ylabel="loss [nats per token]",
    title="The same training on one process and on four ranks",
)

# %% [markdown]
# The differences that remain are rounding: four partial sums are added in another order than one long sum.

# %% [markdown]
# ## Concept cards (15 minutes)
#
# One idea, one question. Pick an answer: it explains itself, right or wrong, and a wrong one leads to the cell that
# shows why.

# %% tags=["card-ranks-own-memory"]
card("ranks-own-memory")

# %% tags=["card-group-is-alone"]
card("group-is-alone")

# %% tags=["card-who-cuts-the-work"]
card("who-cuts-the-work")

# %% tags=["card-who-waits"]
card("who-waits")

# %% tags=["card-cure-a-deadlock"]
card("cure-a-deadlock")

# %% tags=["card-exchange-safely"]
card("exchange-safely")

# %% tags=["card-one-is-missing"]
card("one-is-missing")

# %% [markdown]
# ## Why not?
#
# - Processes cost memory: each rank has its own copy of the interpreter and of everything it imports. Threads would
#   share it, but they take turns in Python, and none of them runs on another machine.
# - Four ranks on two cores are not faster than one process; they queue for the cores. This course uses ranks on your
#   machine to see *what* is sent and *whether* the result is right, and says so where a time depends on the machine.
# - Every collective is a place where the slowest rank holds up all others. What share of the time ranks wait is a
#   question for the rest of the course.

# %% [markdown]
# ## Test (15 minutes)
#
# Answers are kept as you give them. To submit, run the cell below the test: it writes your answers into itself, so that
# they stay in the notebook, and then explains every one. `quiz("00", again=True)` starts a retake with new numbers; the
# best attempt counts.

# %% tags=["quiz"]
quiz("00")

# %% tags=["submit"]
submit("00")

# %% [markdown]
# ## Where to go next
#
# - The file: `minidist/launch.py`, then `minidist/launcher/`: how ranks are started, watched and ended.
# - The docs: [PyTorch distributed overview](https://docs.pytorch.org/tutorials/beginner/dist_overview.html).
# - The paper: Darema, George, Norton and Pfister, *A single-program-multiple-data computational model for
#   EPEX/FORTRAN*, Parallel Computing 7 (1988).
# - Next: 02, collectives. What does an all-reduce send, and how long does it take?
