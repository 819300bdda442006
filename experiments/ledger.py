"""The megabytes that clients would send and receive in a round of networks too large to train here.

    python experiments/ledger.py OUT METHOD ... @FILE.args [--data-dir DIR]

A round is traced and only its ledger is compiled, so nothing is trained: bytes follow from shapes and from
the clients that take part. Not for methods whose server works on the host, or whose bytes change in training.
Writes OUT.csv, and OUT.png with a bar for each method, the mean of all clients.
"""

import csv
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from jaxfl.cli.words import expand, names_and_flags, parse
from jaxfl.config.setup import Setup
from jaxfl.core.cohorts import these_clients
from jaxfl.core.job import traced
from jaxfl.core.training import Training
from jaxfl.data.federation import Federation
from jaxfl.folder.variant import Variant
from jaxfl.grid.resolve import resolve
from jaxfl.runs.prepare import prepare


class Line(NamedTuple):
    """The megabytes that a client of an architecture sends and receives under a method."""

    method: str
    architecture: str
    clients: int
    parameters: int
    up: float
    down: float


def main() -> None:
    """Write the table and the bars."""
    (out, *named), flags = names_and_flags(expand(sys.argv[1:]))
    (asked,) = parse("ledger.py", flags, [Setup(), Training()], compared=named)
    variants, setup = resolve("ledger.py", named, asked)
    data, lines = prepare(setup), []
    for variant in variants:
        for (model, clients), up, down in zip(data.models, *ledger(variant, data.federation), strict=True):
            lines.append(Line(variant.label, model.name, clients, model.size, 4 * up / 1e6, 4 * down / 1e6))
    with Path(f"{out}.csv").open("w") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["client", "clients", "parameters", "MB up", "MB down"])
        for line in lines:
            megabytes = f"{line.up:.2f}", f"{line.down:.2f}"
            table.writerow([f"{line.method}, {line.architecture}", line.clients, line.parameters, *megabytes])
    draw(lines).savefig(f"{out}.png")


def ledger(variant: Variant, federation: Federation) -> tuple[list[float], list[float]]:
    """Return the scalars that a client of each architecture sends and receives, where all take part."""

    @jax.jit
    def of_round(key, federation, cohort):
        state = variant.algorithm.init(key, federation, traced(variant.config))
        _, info = variant.algorithm.step(key, state, federation, cohort)
        return info.up, info.down

    everyone = these_clients(federation, [np.ones(len(group.id), bool) for group in federation.groups], 1)
    up, down = of_round(jax.random.key(0), federation, everyone)
    return [float(np.mean(n)) for n in up], [float(np.mean(n)) for n in down]


def draw(lines: list[Line]) -> Figure:
    """Draw megabytes up and down for each method, means of all clients."""
    methods = list(dict.fromkeys(line.method for line in lines))
    figure = Figure((6, 1 + 0.5 * len(methods)), layout="constrained", dpi=150)
    axes = figure.subplots()
    for offset, way in ((-0.2, "up"), (0.2, "down")):
        means = []
        for method in methods:
            of_method = [line for line in lines if line.method == method]
            sent = [getattr(line, way) for line in of_method]
            means.append(np.average(sent, weights=[line.clients for line in of_method]))
        bars = axes.barh(np.arange(len(methods)) + offset, means, 0.38, label=way)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
    axes.set(yticks=range(len(methods)), yticklabels=methods, xlabel="MB of a client in a round")
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
