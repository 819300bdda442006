"""The size of teachers in pictures, figure-3.png and figure-6.png, from figure-6.csv, which sizes.py writes.

    python experiments/pfedclub/draw_sizes.py

A line or bar is the mean over seeds of phi, the parameters of a teacher over those of its client's network,
minus one: of every round (Figure 6), and of all rounds with its deviation over seeds (Figure 3).
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
phi = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))  # by network, method and round
with (RESULTS / "figure-6.csv").open() as file:
    for row in csv.DictReader(file):
        phi[row["network"]][row["method"].split(",")[0]][int(row["round"])].append(
            (int(row["seed"]), float(row["phi"]))
        )
networks = sorted(phi, key=lambda network: (network == "all", int(network) if network != "all" else 0))
titles = [name if name == "all" else f"{int(name):,} parameters" for name in networks]
methods = list(phi["all"])

figure = Figure((4 * len(networks), 3.6), layout="constrained", dpi=120)
panels = figure.subplots(1, len(networks), sharey=True)
for axes, network, title in zip(panels, networks, titles, strict=True):
    for method in methods:
        of_rounds = {t: np.mean([each for _, each in found]) for t, found in phi[network][method].items()}
        axes.plot(*zip(*sorted(of_rounds.items()), strict=True), label=method)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set(title=title, xlabel="round")
    axes.grid(alpha=0.3)
panels[0].set_ylabel("size of teachers, over the client's own, - 1")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
figure.savefig(RESULTS / "figure-6.png")

figure = Figure((8, 3.6), layout="constrained", dpi=120)
axes = figure.add_subplot(ylabel="size of teachers, over the client's own, - 1")
for number, method in enumerate(methods):
    of_seeds = defaultdict(lambda: defaultdict(list))
    for network in networks:
        for of_round in phi[network][method].values():
            for seed, each in of_round:
                of_seeds[network][seed].append(each)
    means = [[np.mean(of_seed) for of_seed in of_seeds[network].values()] for network in networks]
    places = np.arange(len(networks)) + 0.27 * (number - (len(methods) - 1) / 2)
    spread = [np.std(of_network, ddof=1) for of_network in means]
    axes.bar(places, np.mean(means, axis=1), 0.25, yerr=spread, capsize=2, label=method)
axes.axhline(0, color="0.5", linewidth=0.8)
axes.set_xticks(range(len(networks)), titles, fontsize="small")
axes.grid(alpha=0.3, axis="y")
axes.legend(fontsize="small")
figure.savefig(RESULTS / "figure-3.png")
