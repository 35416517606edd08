"""Ours against torch's own, measured side by side in one run: `python -m benchmarks --list`."""
