# %% [markdown] tags=["head"]
# # 77 Sample
#
# **Three concepts**
#
# - slices, sums
# - a ring of ranks that send, one after
#   the other

# %% tags=["show-slices"]
slices = [[0, 1], [2, 3]]

# %% tags=["hide-input", "show-ring"]
ring = [1, 2, 3, 0]
