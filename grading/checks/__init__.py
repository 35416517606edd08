"""Trusted checks, one file per assignment: they run beside the grader, and are never part of what a learner gets."""
