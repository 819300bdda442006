"""Places of the drafts of networks of several depths: DraftFed's Figure 4.

    python experiments/draftfed/drafts.py RUN [RUN ...] --name drafts

RUN is a run folder whose data set must be available, one for each seed. A point is one client's draft of one
public image. On the left each client shows its last convolution, at its network's depth; on the right all
show the convolution at which the shallowest network ends. Maps get its shape as in DraftFed (eq. 7).
Writes NAME.png, a t-SNE of the first run, and NAME.csv with scores of all runs' drafts themselves: how far
points of one architecture are together and apart from the others (silhouette, 0 where they mix, 1 where they
are apart), and the same after each image's mean is subtracted.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score

import jaxfl
from jaxfl.models.maps import match

IMAGES = 60
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Write a table and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--name", default="drafts")
    arguments = parser.parse_args()
    found = [drafts(jaxfl.load(run)) for run in arguments.runs]
    with (RESULTS / f"{arguments.name}.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["drafts", "seed", "silhouette", "without the image"])
        for seed, (names, kinds) in enumerate(found):
            models = np.repeat(names, IMAGES)
            for title, drawn in kinds.items():
                flat = (each.reshape(len(models), -1) for each in (drawn, drawn - drawn.mean(0)))
                lines.writerow([title, seed, *(f"{silhouette_score(each, models):.3f}" for each in flat)])
    names, kinds = found[0]
    figure = Figure((10, 4.4), layout="constrained", dpi=150)
    for axes, (title, drawn) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
        scatter(axes, drawn.reshape(len(names) * IMAGES, -1), np.repeat(names, IMAGES))
        axes.set_title(title)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(RESULTS / f"{arguments.name}.png")


def drafts(run) -> tuple[list[str], dict[str, np.ndarray]]:
    """Return the clients' architectures, and drafts of each kind, (clients, images, d)."""
    public = np.random.default_rng(0).choice(run.partition.public, IMAGES, replace=False)
    clients = range(len(run.partition.train))
    names = [run.models[client].model.name for client in clients]
    taps = [run.models[client].taps(run.source.images[public]) for client in clients]
    depth, shallowest = min((max(of_client), client) for client, of_client in enumerate(taps))
    shape = taps[shallowest][depth].shape[1:]

    def at(depths):
        maps = [match(of_client[d], shape) for of_client, d in zip(taps, depths, strict=True)]
        return np.stack(maps).reshape(len(maps), IMAGES, -1)

    own = [max(of_client) for of_client in taps]
    of_all = ", ".join(map(str, sorted(set(own))))
    return names, {
        f"last convolutions, at depths {of_all}": at(own),
        f"convolutions at depth {depth} of all": at([depth] * len(taps)),
    }


def scatter(axes, points: np.ndarray, models: np.ndarray) -> None:
    """Draw the t-SNE of points (n, d), coloured by their models (n,)."""
    places = TSNE(random_state=0, init="pca").fit_transform(points)
    for name in dict.fromkeys(models):
        axes.scatter(*places[models == name].T, s=6, label=name)
    axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    main()
