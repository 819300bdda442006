"""The accuracy of each expert's clients at every evaluation: CompFL's Figure 3.

    python experiments/compfl/experts.py RUNS > experiments/compfl/results/figure-3-n3.csv

RUNS is the folder of a comparison, such as that of a study's setting.
"""

import csv
import sys
from pathlib import Path

from jaxfl.folder import several_runs, store

EXPERTS = "lenet5", "cifar_small"


def main() -> None:
    """Print a line for each evaluation of each run, by method and seed."""
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(["method", "seed", "round", *EXPERTS])
    for run in several_runs.runs_in(Path(sys.argv[1])):
        config = store.read_config(run)
        for record in store.read_metrics(run):
            if "accuracy" in record:
                shares = record["accuracy"]["per_group"]
                accuracies = [f"{100 * share:.2f}" for name in EXPERTS if (share := shares[name]) is not None]
                lines.writerow([config["label"], config["options"]["seed"], record["round"], *accuracies])


if __name__ == "__main__":
    main()
