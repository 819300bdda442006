"""Curves of one or several runs."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxfl.errors import writing


def draw_curves(runs: dict[str, list[list[dict]]], path: Path) -> None:
    """Write a PNG: accuracy against rounds, and against the bytes moved.

    Args:
      runs: per label the metrics of its seeds; a line is their mean, a band their sample standard
        deviation where there are several.
      path: of the PNG.
    """
    figure = Figure((12, 4.2), layout="constrained", dpi=150)
    left, right = figure.subplots(1, 2, sharey=True)
    for label, seeds in runs.items():
        scored = [[record for record in metrics if "accuracy" in record] for metrics in seeds]
        length = min(len(records) for records in scored)
        if length == 0:
            continue
        accuracy = 100 * np.array(
            [[record["accuracy"]["mean"] for record in records[:length]] for records in scored]
        )
        rounds = [record["round"] for record in scored[0][:length]]
        megabytes = np.mean([_megabytes(metrics, rounds) for metrics in seeds], axis=0)
        mean = accuracy.mean(0)
        (line,) = left.plot(rounds, mean, marker=".", label=label)
        if len(seeds) > 1:
            spread = accuracy.std(0, ddof=1)
            left.fill_between(rounds, mean - spread, mean + spread, color=line.get_color(), alpha=0.15)
        if megabytes[-1] > 0:
            right.plot(megabytes, mean, marker=".", color=line.get_color())
    left.set(xlabel="round", ylabel="accuracy, mean over clients (%)")
    right.set(xlabel="megabytes sent and received")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    with writing(path):
        figure.savefig(path, format="png")


def _megabytes(metrics: list[dict], rounds: list[int]) -> np.ndarray:
    moved = np.cumsum([record["bytes_up"] + record["bytes_down"] for record in metrics]) / 1e6
    return moved[np.array(rounds) - 1]
