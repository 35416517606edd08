"""Checks of assignment 03: data parallelism."""
