"""Pictures of a partition, training rows by client and class, and of a shift, images as clients see them."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def draw(counts: np.ndarray, title: str = "") -> Figure:
    """Draw a field for every client (x) and class (y), white where there are no rows.

    Args:
      counts: (clients, classes) int, training rows.
      title: title of the figure.
    """
    clients, classes = counts.shape
    width, height = np.clip([0.3 * clients + 2, 0.3 * classes + 1.2], [5, 3.5], [14, 9])  # inches
    figure = Figure((width, height), layout="constrained", dpi=150)
    axes = figure.add_subplot(title=title, xlabel="client", ylabel="class")
    held = np.ma.masked_equal(counts.T, 0)
    field = axes.imshow(held, cmap="viridis_r", aspect="auto", origin="lower", vmin=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(field, label="training rows", ticks=MaxNLocator(integer=True))
    return figure


def draw_seen(images: np.ndarray, title: str) -> Figure:
    """Draw a few images as each of a few clients sees them, a line for every client.

    Args:
      images: (clients, k, H, W, C) floats; three channels are drawn in colour, else only the first.
      title: title of the figure.
    """
    clients, k = images.shape[:2]
    low, high = images.min(), images.max()
    images = (images - low) / (high - low or 1)
    figure = Figure((k + 1, clients + 1), layout="constrained", dpi=100)
    figure.suptitle(title)
    fields = figure.subplots(clients, k, squeeze=False)
    for (client, place), axes in np.ndenumerate(fields):
        image = images[client, place]
        axes.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[], ylabel=f"client {client}" if place == 0 else "")
    return figure
