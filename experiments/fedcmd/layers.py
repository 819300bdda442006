"""The distribution of every layer's features on every client: FedCMD's Figure 4.

    python experiments/fedcmd/layers.py RUN --name layers

RUN is a run folder whose data set must be available. Each client's deployed network sees the client's own
test images. A Gaussian describes a layer's output, as in FedCMD's scores: mean and deviation of the values,
scaled to [0, 1]. Writes NAME.csv, in hundredths, and NAME.png beside this file; a curve is a client's
Gaussian. Means over clients of the distance W (Chen et al. 2024, eq. 6): "between clients" from one half of a
client's images to the other half of another client's, "within clients" to its own other half, which is
chance. "from the layer before" is how far a layer moves a client's features.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import jaxfl

MOST = 200  # test images of a client
WAYS = ("between clients", "within clients", "from the layer before")
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Write a table and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("--name", default="layers")
    arguments = parser.parse_args()
    names, gaussians = of_clients(jaxfl.load(arguments.run))
    oneself = np.eye(gaussians.shape[1], dtype=bool)
    with (RESULTS / f"{arguments.name}.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["layer", "mean", "deviation", *WAYS])
        for number, (name, layer) in enumerate(zip(names, gaussians, strict=True)):
            between = distances(layer[:, None, 0], layer[None, :, 1])
            moved = distances(layer, gaussians[number - 1]).mean() if number else np.nan
            figures = *layer.mean((0, 1)), between[~oneself].mean(), between[oneself].mean(), moved
            lines.writerow([name, *(f"{100 * figure:.2f}" for figure in figures)])
    draw(names, gaussians.mean(2)).savefig(RESULTS / f"{arguments.name}.png")


def of_clients(run) -> tuple[list[str], np.ndarray]:
    """Return layers' names, and mean and deviation of features on two halves, (layers, clients, 2, 2)."""
    found = []
    for client, rows in enumerate(run.partition.test):
        model, images = run.models[client], run.seen(client, rows[:MOST])
        layers = {"images": images, **model.outputs(images)}
        found.append([[gaussian(part) for part in (of[::2], of[1::2])] for of in layers.values()])
    return list(layers), np.array(found).swapaxes(0, 1)


def gaussian(features: np.ndarray) -> tuple[float, float]:
    """Return mean and deviation of values scaled to [0, 1]."""
    features = features.astype(float)
    scaled = (features - features.min()) / max(np.ptp(features), 1e-12)
    return float(scaled.mean()), float(scaled.std())


def distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return W of Gaussians (..., 2) in one dimension: the distance of the points (mean, deviation)."""
    return np.linalg.norm(one - other, axis=-1)


def draw(names: list[str], gaussians: np.ndarray) -> Figure:
    """Draw a panel for each layer, a curve for each client."""
    figure = Figure((2.6 * len(names), 3), layout="constrained", dpi=150)
    values = np.linspace(0, 1, 200)
    for axes, name, layer in zip(figure.subplots(1, len(names)), names, gaussians, strict=True):
        for mean, deviation in layer:
            density = np.exp(-(((values - mean) / deviation) ** 2) / 2) / deviation / np.sqrt(2 * np.pi)
            axes.plot(values, density, color="C0", alpha=0.2, linewidth=0.8)
        axes.set(title=name, xlabel="scaled feature", yticks=[])
    return figure


if __name__ == "__main__":
    main()
