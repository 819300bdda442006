"""FedCMD against other methods, client by client: Markdown, from finished runs of FedCMD's setting.

python experiments/fedcmd/paired.py RUNS METHOD ...

RUNS holds a folder METHOD-SEED for each cell, as README.md makes them. Seeds count that both methods have
finished. A client's difference is its mean over these seeds. The interval (t, 95 %) and Wilcoxon's p are over
clients, whose rows are the same in all runs: they say nothing about other partitions.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from jaxfl.deployed.load import load

OURS = "fedcmd"


def per_client(runs: Path, method: str, moment: str) -> dict[int, np.ndarray]:
    """Return {seed: accuracy of every client in percent}."""
    found = [load(path.parent) for path in sorted(runs.glob(f"{method}-*/{method}/seed-*/result.json"))]
    ended = ((run.config["options"]["seed"], run.result) for run in found)
    return {seed: 100 * np.array(result[moment]["per_client"]) for seed, result in ended if result}


print("| FedCMD minus | moment | seeds | mean of each | mean | 95 % over clients | p |")
print("|---|---|---|---|---|---|---|")
for rival in sys.argv[2:]:
    for moment, words in ("received", "received"), ("accuracy", "deployed"):
        ours, theirs = (per_client(Path(sys.argv[1]), method, moment) for method in (OURS, rival))
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            raise SystemExit(f"{sys.argv[1]} has no seed that both {OURS} and {rival} have finished.")
        differences = np.array([ours[seed] - theirs[seed] for seed in seeds])
        of_clients = differences.mean(0)
        low, high = stats.t.interval(0.95, len(of_clients) - 1, of_clients.mean(), stats.sem(of_clients))
        means = ", ".join(f"{mean:+.2f}" for mean in differences.mean(1))
        tested: Any = stats.wilcoxon(of_clients)
        p = tested.pvalue
        p = "< 0.001" if p < 0.001 else f"{p:.3f}"
        print(
            f"| {rival} | {words} | {', '.join(map(str, seeds))} | {means} | {of_clients.mean():+.2f} "
            f"| {low:+.2f} to {high:+.2f} | {p} |"
        )
