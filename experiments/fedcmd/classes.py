"""The distribution of the classes' accuracies: FedCMD's Figure 6.

    python experiments/fedcmd/classes.py RUN --name classes

RUN is a run folder whose data set must be available. A class's accuracy is the share of its test rows, over
all clients, that the client's own deployed network gets right. Writes NAME.csv, a line for each class, and
NAME.png, their histogram with a density.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import gaussian_kde

import jaxfl

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Write a table and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--name", default="classes")
    arguments = parser.parse_args()
    rows, right = counted(jaxfl.load(arguments.run))
    accuracies = 100 * right / np.maximum(rows, 1)
    with (RESULTS / f"{arguments.name}.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["class", "test rows", "accuracy %"])
        lines.writerows([c, rows[c], f"{accuracies[c]:.2f}"] for c in np.flatnonzero(rows))
    draw(accuracies[rows > 0]).savefig(RESULTS / f"{arguments.name}.png")


def counted(run) -> tuple[np.ndarray, np.ndarray]:
    """Count the test rows of every class, and those that the clients get right, (classes,) each."""
    rows, right = np.zeros((2, run.source.classes), int)
    for client, own in enumerate(run.partition.test):
        labels = run.source.labels[own]
        hits = run.models[client].predict(run.seen(client, own)) == labels
        rows += np.bincount(labels, minlength=len(rows))
        right += np.bincount(labels[hits], minlength=len(rows))
    return rows, right


def draw(accuracies: np.ndarray) -> Figure:
    """Draw a histogram of accuracies (classes,), in percent, with a density fitted to it."""
    figure = Figure((6, 4), layout="constrained", dpi=150)
    axes = figure.subplots()
    axes.hist(accuracies, bins=[*range(0, 101, 5)], density=True, alpha=0.4)
    values = np.linspace(0, 100, 300)
    axes.plot(values, gaussian_kde(accuracies)(values))
    axes.set(xlabel="accuracy of a class (%)", ylabel="density", title=f"{len(accuracies)} classes")
    return figure


if __name__ == "__main__":
    main()
