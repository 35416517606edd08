"""Lab 05, before the session: `python labs/05_tensor/prelab.py`. About a minute on two CPU cores; needs no GPU.

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
CONFIG = md.GPTConfig(layers=2, dim=32, heads=4, vocab=256, seq=32)
TOKENS = 8 * CONFIG.seq


def main(arguments: list[str]) -> int:
    """Run the checks in order and stop at the first that fails; returns the exit status."""
    parser = argparse.ArgumentParser(prog="prelab.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("lab05-results"), help="folder of the results")
    out = parser.parse_args(arguments).out
    trial = out / "prelab"  # a folder of its own, so that its tiny run is in no figure
    checks: dict[str, Callable[[], str]] = {
        "ranks meet": ranks_meet,
        "gradients are those of one process": gradients_agree,
        "a layer sends what the formula says": bytes_agree,
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
    model = md.GPT(CONFIG, seed=0).double()
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0)
    cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    alone = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for ranks, sequence in ((2, False), (4, False), (4, True)):
        cut, _ = md.launch(one_backward, ranks=ranks, args=(CONFIG.layers, sequence))[0]
        worst = (cut - alone).abs().max().item()
        if not worst < 1e-12:
            return f"{ranks} ranks, sequence={sequence}: {worst:.1e} away from one process; float64 allows 1e-12"
    return ""


def bytes_agree() -> str:
    for ranks, sequence in ((2, False), (4, False), (4, True)):
        (_, one), (_, two) = (md.launch(one_backward, ranks=ranks, args=(n, sequence))[0] for n in (1, 2))
        ways = md.cost.tensor_parallel_layer(TOKENS, CONFIG.dim, ranks, element_nbytes=8, sequence=sequence)
        expected = sum(sum(way.values()) for way in ways.values())
        if two - one != expected:
            return f"{ranks} ranks, sequence={sequence}: a layer sent {two - one} bytes a rank, {expected} expected"
    return ""


def one_backward(world: md.Comm, layers: int, sequence: bool) -> tuple[torch.Tensor, float]:
    """The whole gradient of a batch of 8, as one vector, and the bytes that this rank sent for it."""
    config = md.GPTConfig(layers=layers, dim=CONFIG.dim, heads=CONFIG.heads, vocab=CONFIG.vocab, seq=CONFIG.seq)
    mesh = md.Mesh({"dp": 1, "tp": world.size}, world)
    model = md.tensor_parallel(md.GPT(config, seed=0).double(), mesh["tp"], sequence=sequence)
    tokens, targets = md.stdlib_tokens(seed=0, seq=CONFIG.seq, batch=8).batch(0)
    world.recorder.clear()
    md.token_loss(model(tokens), targets, mesh["dp"], tp=mesh["tp"]).backward()
    sent = world.recorder.bytes_sent()
    whole = md.full_grads(model).values()
    return torch.cat([grad.flatten() for grad in whole if grad is not None]), sent


def run(script: str, *arguments: object) -> str:
    """Run a script of this folder; the end of what it said, if it failed."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
