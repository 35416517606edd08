"""Mutants of assignment 02, one file for each exercise."""
