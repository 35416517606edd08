"""Grading a class: from a folder of the instructor's own to released assignments, grades and feedback.

    new_course -> release -> (learners work) -> collect -> grade -> feedback, export, report

nbgrader stays the instructor's tool: its gradebook, its formgrader, its folders. What is here makes it safe: a
submission is repaired before nbgrader sees it (repair), run in a process of its own with a deadline (pool), its code in
a sandbox (sandbox, execute), and judged from outside by checks that never were in the notebook (examine, marking).
"""
