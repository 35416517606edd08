"""How ranks come to life: a process that has torch imported forks a supervisor per world, which forks the ranks.

    your process --(parent.py)--> zygote.py --fork--> supervisor.py --fork--> rank.py, once per rank

The zygote lives as long as your process; a supervisor lives as long as one world and always answers with a verdict.
"""
