"""Mutants of assignment 05, one file for each exercise."""
