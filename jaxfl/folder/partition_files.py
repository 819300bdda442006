"""Files of a partition without a run: for later runs, to look at, and for other programs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.data import partition_formats, saved_partition
from jaxfl.data.normalisation import Moments
from jaxfl.data.partition import Partition
from jaxfl.data.shift import Drawn, seen
from jaxfl.data.sources import Source, of_vectors
from jaxfl.folder import store
from jaxfl.machine import files

DRAWN = 8, 6  # number of clients, and of images of each


@files.writes
def save_partition(
    folder: Path,
    setup: Setup,
    source: Source,
    partition: Partition,
    drawn: Drawn | None,
    moments: Moments,
    forms: Sequence[str],
) -> list[str]:
    """Write a partition, also in the forms json, fl-bench and pfllib; return the names of what is written.

    The folder need not exist yet. `moments` normalise the images.

    Raises:
      JaxflError: if something cannot be written, or another program has no such partitions.
    """
    from jaxfl.data.pictures import draw, draw_seen  # here, so that commands without plots do not wait for it

    title = f"{setup.data.dataset}, {setup.partition.partition}"
    folder.mkdir(parents=True, exist_ok=True)
    saved_partition.save(folder / store.PARTITION, partition, source)
    counts, names = partition.counts(source.labels), source.class_names
    pictures: dict[str, Any] = {"partition.png": lambda: draw(counts, title, names)}
    if drawn and not of_vectors(source.images.shape[1:]):
        images, what = _seen(source, partition, drawn, moments.std), " ".join(setup.data.shift)
        pictures["shift.png"] = lambda: draw_seen(images, what)
    files.write_pictures(folder, pictures)
    written = [store.PARTITION, *pictures]
    if "json" in forms:
        partition_formats.write_json(folder / "partition.json", partition, source)
        written.append("partition.json")
    if "fl-bench" in forms:
        partition_formats.write_fl_bench(folder / "partition.pkl", partition, source)
        written.append("partition.pkl")
    if "pfllib" in forms:
        name = setup.partition.partition
        partition_formats.write_pfllib(folder / "pfllib", partition, source, name, drawn, moments)
        written.append("pfllib/")
    return written


def _seen(source: Source, partition: Partition, drawn: Drawn, std: np.ndarray) -> np.ndarray:
    """Return the first images of the data as a few clients see them, (clients, k, H, W, C)."""
    clients, k = min(DRAWN[0], len(partition.train)), min(DRAWN[1], len(source.labels))
    rows = np.arange(k, dtype=np.int32)
    return np.stack([seen(drawn, source.images, std, client, rows) for client in range(clients)])
