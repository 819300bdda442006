"""Finished runs of FedCMD's setting as lines of table6.csv, one per method and seed.

python experiments/fedcmd/cells.py RUN_FOLDER... > experiments/fedcmd/results/table6.csv

Accuracies are percent. "paper" is FedCMD's own: the pooled accuracy of a round's clients before they train,
mean of the last ten rounds. "trained" is the accuracy of a round's clients right after local training, mean
of the same rounds. The others are of all clients after the last round.
"""

import sys
from pathlib import Path

import numpy as np

from jaxfl.deployed.load import load

COLUMNS = (
    "method",
    "seed",
    "paper",
    "received",
    "trained",
    "deployed",
    "std",
    "worst tenth",
    "MB up",
    "MB down",
)


def cell(folder: Path) -> tuple:
    """Return the line of one run."""
    run = load(folder)
    config, metrics, result = run.config, run.metrics, run.result
    assert result is not None, f"{folder} has not finished"
    of_rounds = [record["cohort"]["trained"] for record in metrics[-10:] if "trained" in record["cohort"]]
    whole = len(of_rounds) == len(metrics[-10:])
    trained = np.mean([of_round["mean"] for of_round in of_rounds]) if whole else np.nan
    accuracy, pooled = result["accuracy"], result["summary"]["cohort_received_pooled_mean_last_10"]
    assert pooled is not None, f"{folder} has not scored its cohorts"
    figures = (
        pooled,
        result["received"]["mean"],
        trained,
        accuracy["mean"],
        accuracy["std"],
        accuracy["worst_tenth"],
    )
    megabytes = (f"{result[name] / 1e6:.2f}" for name in ("bytes_up", "bytes_down"))
    return config["label"], config["options"]["seed"], *(f"{100 * f:.2f}" for f in figures), *megabytes


print(*COLUMNS, sep=",")
for line in sorted(cell(Path(argument)) for argument in sys.argv[1:]):
    print(*(f'"{entry}"' if "," in str(entry) else entry for entry in line), sep=",")
