"""Mutants of assignment 06, one file for each exercise."""
