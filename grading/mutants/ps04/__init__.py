"""Mutants of assignment 04, one file for each exercise."""
