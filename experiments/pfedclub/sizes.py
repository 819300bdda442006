"""The size of pFedClub's teachers round by round, from the folders of runs: figure-6.csv.

    python experiments/pfedclub/sizes.py RUN [RUN ...] > experiments/pfedclub/results/figure-6.csv

phi is the number of parameters of a client's teacher over that of its own network, minus one; a line has its
mean over a round's clients with a network of this size, and over all of them.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

print("method", "seed", "round", "network", "phi", sep=",")
for run in map(Path, sys.argv[1:]):
    config = json.loads((run / "config.json").read_text())
    label, seed = config["label"], config["options"]["seed"]
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        phi = defaultdict(list)
        for found in line["findings"]["assembled"]:
            for network in (found["model"], "all"):
                phi[network].append(found["phi"])
        for network in sorted(phi, key=str):
            print(f'"{label}"', seed, line["round"], network, f"{np.mean(phi[network]):.4f}", sep=",")
