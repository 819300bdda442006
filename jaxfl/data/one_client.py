"""A federation of one client with images that no other client has: what a real device sees."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfl.data.federation import Client, Federation
from jaxfl.data.normalisation import normalised
from jaxfl.errors import JaxflError
from jaxfl.tasks import CLASSES


class Own(NamedTuple):
    """The labelled images of one client, in the form of a data set."""

    images: np.ndarray  # (n, H, W, C), training images
    labels: np.ndarray  # (n,) int, classes of the data set; or (n, k), targets and the like
    test_images: np.ndarray  # (m, H, W, C)
    test_labels: np.ndarray  # (m, ...)


def of_one_client(own: Own, whole: Federation, client: int) -> Federation:
    """Return a federation of a single client, which has only its own images.

    `whole`, perhaps without data, has the moments that normalise them.

    Raises:
      JaxflError: if there are not as many labels as images, one is of a class that the client lacks, or a
        target is no number.
    """
    (group,) = (group for group in whole.groups if client in np.asarray(group.id))
    (relabel,) = np.asarray(group.relabel)[np.asarray(group.id) == client]
    targets, task = whole.target, group.model.task
    for what, images, labels in (("training", *own[:2]), ("test", *own[2:])):
        where = f"Client {client} has {what} labels of {labels.dtype.name} and shape {labels.shape}"
        if task is not CLASSES:
            wanted = (len(images), *group.model.output[: task.form[1] - 1])
            if labels.shape != wanted or not np.isfinite(labels.astype(float)).all():
                raise JaxflError(f"{where}; give numbers {wanted}, all finite.")
            continue
        if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iu"):
            raise JaxflError(f"{where}; give whole numbers, one for each image.")
        known = np.isin(labels, np.nonzero(relabel >= 0)[0])
        if len(images) != len(labels) or not known.all():
            raise JaxflError(
                f"Client {client} has {len(images)} {what} images and {len(labels)} labels, {known.sum()} of "
                "them of classes that it knows; give one such label for each image."
            )

    if not len(own.labels):
        raise JaxflError(f"Client {client} has no training images; give it at least one.")
    test_images, test_labels = own[2:] if len(own.test_labels) else own[:2]  # placeholders: `test_size` is 0

    def filled(array):  # clients whose rows are filled up to the same number share a program
        return np.resize(array, (1 << max(0, len(array) - 1).bit_length(), *array.shape[1:]))

    train, test = filled(np.arange(len(own.labels))), filled(np.arange(len(test_labels)))
    outputs, size = group.model.classes, len(own.labels)
    class_counts = np.full(outputs, size)
    if task is CLASSES:
        class_counts = np.bincount(relabel[own.labels], minlength=outputs)
    leaves = {
        "id": client,
        "rows": train,
        "size": len(own.labels),
        "validation_rows": np.zeros(0),
        "validation_size": 0,
        "test_rows": len(train) + test,
        "test_size": len(own.test_labels),
        "relabel": relabel,
        "class_counts": class_counts,
    }
    arrays = {name: jnp.asarray(leaf, jnp.int32)[None] for name, leaf in leaves.items()}
    arrays["newcomer"] = jnp.zeros(1, bool)
    labels = np.concatenate([own.labels[train], test_labels[test]])
    labels = (
        normalised(labels.astype(float), *map(np.asarray, targets)) if targets else labels.astype(np.int32)
    )
    return dataclasses.replace(
        whole,
        images=jnp.asarray(np.concatenate([own.images[train], test_images[test]])),
        labels=jnp.asarray(labels),
        groups=(Client(**arrays, model=group.model),),
        training_rows=jnp.array([len(own.labels)], float),
        public=whole.public[:0],
        links=whole.links[:0, :0],
        initial=None,
    )
