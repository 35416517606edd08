"""Lab 03, before the session: `python labs/03_scaling/prelab.py`. About a minute on two CPU cores; needs no GPU.

It checks on this machine what the session relies on, so that no GPU minute is spent on finding it out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import minidist as md

HERE = Path(__file__).parent
CONFIG = md.GPTConfig(layers=2, dim=32, heads=2, vocab=256, seq=32)


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prelab.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("lab03-results"), help="folder of the results")
    out = parser.parse_args(arguments).out
    trial = out / "prelab"  # a folder of its own, so that its tiny run is in no figure
    checks: dict[str, Callable[[], str]] = {
        "ranks meet": ranks_meet,
        "averaged gradients are those of one process": gradients_agree,
        "bytes sent are 2 (n-1)/n of the gradient": bytes_agree,
        "a run writes a result": lambda: run("run.py", "--model", "tiny", "--ranks", 2, "--steps", 3, "--out", trial),
        "results become a figure": lambda: run("plot.py", trial, "--out", trial / "prelab.png"),
    }
    for name, check in checks.items():
        problem = check()
        print(f"{'failed' if problem else 'passed'}: {name}" + (f"\n{problem}" if problem else ""))
        if problem:
            print("The pre-lab has to pass before GPU time is asked for.")
            return 1
    (out / "prelab-passed").write_text(f"torch {torch.__version__}\n")
    print(f"Pre-lab passed. The session can start; job.sbatch looks for {out / 'prelab-passed'}.")
    return 0


def ranks_meet() -> str:
    def meet(world: md.Comm) -> float:
        return world.all_reduce(torch.tensor([float(world.rank)])).item()

    got = md.launch(meet, ranks=4)
    return "" if got == [6.0] * 4 else f"four ranks summed 0 + 1 + 2 + 3 to {got}"


def gradients_agree() -> str:
    alone = gradients(md.launch(one_backward, ranks=1, args=("overlapped",)))
    for mechanism in ("naive", "bucketed", "overlapped"):
        shared = gradients(md.launch(one_backward, ranks=2, args=(mechanism,)))
        worst = (shared - alone).abs().max().item()
        if not worst < 1e-12:
            return f"{mechanism} on 2 ranks is {worst:.1e} away from one process; float64 allows 1e-12"
    return ""


def bytes_agree() -> str:
    for ranks in (2, 4):
        (gradient, sent), *_ = md.launch(one_backward, ranks=ranks, args=("overlapped",))
        optimal = 2 * (ranks - 1) / ranks * gradient.numel() * gradient.element_size()
        if not abs(sent - optimal) <= 0.01 * optimal:
            return f"{ranks} ranks: {sent} bytes sent per rank, {optimal:.0f} expected"
    return ""


def one_backward(world: md.Comm, mechanism: str) -> tuple[torch.Tensor, float]:
    """The gradient of a global batch of 8, as one vector, and the bytes that averaging it sent from this rank."""
    model = md.GPT(CONFIG, seed=0).double()
    replica = model if mechanism == "naive" else md.DataParallel(model, world, overlap=mechanism == "overlapped")
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0, rank=world.rank, ranks=world.size)
    world.recorder.clear()
    cross_entropy(replica(tokens).flatten(0, 1), targets.flatten()).backward()
    if mechanism == "naive":
        md.average_gradients(model, world)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, world.recorder.bytes_sent()


def gradients(results: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    return results[0][0]


def run(script: str, *arguments: object) -> str:
    """Run a script of this folder; the end of what it said, if it failed."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
