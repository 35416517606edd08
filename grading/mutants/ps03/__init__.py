"""Mutants of assignment 03, one file for each exercise."""
