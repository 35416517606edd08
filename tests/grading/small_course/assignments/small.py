# %% [markdown]
# # A small assignment
# Two functions on a ring of ranks, one text, and a short test.

# %% tags=["setup", "locked"]
import torch

from grading import check, quiz, submit

# %% [markdown]
# **S.1** Send `x` to the right neighbour, and return what the left one sent.


# %%
def pass_on(comm, x):
    """x: [N] on every rank -> the left neighbour's x: [N]"""
    ### BEGIN SOLUTION
    left_buffer = torch.empty_like(x)
    waiting_receive = comm.irecv(left_buffer, (comm.rank - 1) % comm.size)
    comm.isend(x, (comm.rank + 1) % comm.size).wait()
    waiting_receive.wait()
    return left_buffer
    ### END SOLUTION


# %%
check("S.1")

# %% [markdown]
# **S.2** Sum everyone's `x`, from `pass_on` or from messages of your own.


# %%
def total(comm, x):
    """x: [N] on every rank -> the sum over ranks: [N]"""
    ### BEGIN SOLUTION
    running_sum, travelling = x.clone(), x
    for _ in range(comm.size - 1):
        travelling = pass_on(comm, travelling)
        running_sum = running_sum + travelling
    return running_sum
    ### END SOLUTION


# %%
check("S.2")

# %% [markdown]
# **S.3** How many messages does one rank send for a sum over n ranks, and why so many?

# %% [markdown] tags=["messages", "by-hand", "points=2"]
# ### BEGIN MARK SCHEME
# n - 1 with this ring; one point for the number, one for the reason
# ### END MARK SCHEME

# %% [markdown]
# ## Test

# %%
quiz("90")

# %%
submit("90")
