"""Run the comparisons: `python -m benchmarks [--only NAME] [--list] [--quick]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import checked, collectives, data_parallel, launching, machine, optimizer, pipeline, tensor, zero
from benchmarks.row import Row

RESULTS = Path(__file__).parent / "results" / "latest.json"

COMPARISONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "data_parallel": data_parallel.rows,
    "zero": zero.rows,
    "tensor": tensor.rows,
    "pipeline": pipeline.rows,
    "collectives": collectives.rows,
    "launch": launching.rows,
    "optimizer": optimizer.rows,
    "checked": checked.rows,
}


def main(arguments: list[str]) -> int:
    """Print a line per comparison and write them all as JSON; returns the exit status."""
    options = parse(arguments)
    if options.list:
        print(*(f"{name:<14} {(rows.__doc__ or '').splitlines()[0]}" for name, rows in COMPARISONS.items()), sep="\n")
        return 0
    context = machine.context(arguments) | {"quick": options.quick}
    load = machine.load_1min()
    if load is not None and load > 0.5:
        print(f"The machine is busy (load {load:.2f}): expect wide ranges, and verdicts left unclear.")
    records = []
    for name in [options.only] if options.only else COMPARISONS:
        for row in COMPARISONS[name](options.quick):
            print(row.line(), flush=True)
            records.append(row.record(**context))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(records, indent=1) + "\n")
    verdicts = [record["verdict"] for record in records]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in ("pass", "miss", "unclear", "info"))
    print(f"{counts}. Written to {options.output}")
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours against torch's own, in one run.")
    parser.add_argument("--only", metavar="NAME", choices=COMPARISONS, help="one of: " + ", ".join(COMPARISONS))
    parser.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, says nothing about speed")
    parser.add_argument("--output", type=Path, default=RESULTS, help=f"where the JSON goes (default {RESULTS})")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
