"""A learner's function on real ranks, with the grader in the middle.

    grader's process: host.py, relay.py  --one socket per rank-->  rank.py, transport.py
                                         --starts, ends ranks-->   warm.py

A rank is a process that warm.py forks. It has a Comm like any other, but no process group: every message goes over the
rank's own socket to the grader's process, which hands it on once both sides have asked for it. So what was sent, who
waits for whom, and that nobody can go on, is known there and nowhere else. What comes from a rank is plain data in the
form of codec.py, and nothing of it is ever unpickled.
"""
