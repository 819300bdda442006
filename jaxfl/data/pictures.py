"""Pictures of a partition, training rows by client and class, and of a shift, images as clients see them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

MOST_NAMED = 40  # clients or classes whose names fit in a picture


def draw(counts: np.ndarray, title: str = "", class_names: Sequence[str] = ()) -> Figure:
    """Draw training rows (clients, classes): a field for every client and class, white without rows."""
    clients, classes = counts.shape
    width, height = np.clip([0.3 * clients + 2, 0.3 * classes + 1.2], [5, 3.5], [14, 9])  # inches
    figure = Figure((width, height), layout="constrained", dpi=150)
    axes = figure.add_subplot(title=title, xlabel="client", ylabel="class")
    held = np.ma.masked_equal(counts.T, 0)
    field = axes.imshow(held, cmap="viridis_r", aspect="auto", origin="lower", vmin=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    name_classes(axes.yaxis, class_names)
    figure.colorbar(field, label="training rows", ticks=MaxNLocator(integer=True))
    return figure


def name_classes(axis, names: Sequence[str]) -> None:
    """Let the ticks of an axis be the names of classes, or whole numbers if there are none or too many."""
    if 0 < len(names) <= MOST_NAMED:
        turned = {"rotation": 45, "ha": "right"} if axis.axis_name == "x" else {}
        axis.set_ticks(range(len(names)), [name.replace("$", "\\$") for name in names], **turned)
    else:
        axis.set_major_locator(MaxNLocator(integer=True))


def draw_seen(images: np.ndarray, title: str) -> Figure:
    """Draw a few images as each of a few clients sees them, a line for every client.

    The images are (clients, k, H, W, C) floats; three channels are drawn in colour, else only the first.
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
