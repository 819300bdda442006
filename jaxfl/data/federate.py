"""Making a federation: of a data set, a partition and the clients' networks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.data.absent import ABSENT
from jaxfl.data.federation import Client, Federation, PerGroup
from jaxfl.data.normalisation import Moments, normalised, training_moments
from jaxfl.data.partition import Partition
from jaxfl.data.public import Public
from jaxfl.data.shift import Drawn, shifted
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError
from jaxfl.machine import placement
from jaxfl.machine.processes import agree
from jaxfl.models.model import Model
from jaxfl.tasks import CLASSES


def federate(
    source: Source,
    partition: Partition,
    models: Sequence[tuple[Model, int]],
    clients_at_once: int = 1,
    devices: int = 1,
    public: Public | None = None,
    links: np.ndarray | None = None,
    drawn: Drawn | None = None,
    on_host: bool = False,
    moments: Moments | None = None,
) -> Federation:
    """Put a data set on the device and give every client an architecture.

    Args:
      source: images and labels.
      partition: rows of every client; any partition can be used with any models.
      models: pairs (architecture, number of clients), in the order of client ids.
      clients_at_once: see `Federation`.
      devices: number of JAX's devices that share the clients of a round.
      public: public images of another set; by default the partition's public rows.
      links: (N, N) bool, which clients are linked; none by default.
      drawn: shift of each client's images, if any.
      on_host: whether images and labels stay in host memory, for `jaxfl.core.window`.
      moments: by which images are normalised; by default the `training_moments`.

    Raises:
      JaxflError: if the numbers of clients or outputs do not agree, there are too few devices, or not the
        same number on each process.
    """
    _check(partition, models)
    mean, std, target = moments or training_moments(source, partition.train)
    dtype = jnp.result_type(float)
    images, labels, rows = source.images, source.labels, partition.public
    unified = labelled = _unified(partition)
    if public is not None:
        rows = len(labels) + np.arange(len(public.labels))
        images, labels = np.concatenate([images, public.images]), np.concatenate([labels, public.labels])
        labelled = unified and public.labelled
    if target is None:
        labels = labels.astype(np.int32)
    else:
        target = target[0].astype(dtype), target[1].astype(dtype)
        labels = normalised(labels, *target)
    class_counts, shift = _class_counts(source, partition), None
    if drawn is not None:
        partition, shift = shifted(partition, rows, drawn)
        labels, rows = labels[np.asarray(shift.image)], partition.public
    groups = _groups(partition, models, class_counts)
    kept = placement.aligned(images.shape, images.dtype)
    kept[...] = images
    federation = Federation(
        images=cast(Any, kept),  # NumPy's until `replicate` puts them on all devices at once
        labels=cast(Any, labels),
        mean=jax.device_put(mean.astype(dtype)),
        std=jax.device_put(std.astype(dtype)),
        groups=groups,
        training_rows=_training_rows(groups),
        public=jax.device_put(rows.astype(np.int32)),
        links=_matrix(links),
        clients_at_once=clients_at_once,
        mesh=placement.mesh_of(devices),
        unified=unified,
        labelled=labelled,
        shift=shift,
        target=cast(Any, jax.device_put(target)),
        vocabulary=source.vocabulary,
    )
    if not on_host:
        return federation.replicate(federation)
    of_host = {"images": federation.images, "labels": federation.labels}
    agree("data", list(of_host.values()))
    rest = federation.replicate(dataclasses.replace(federation, **dict.fromkeys(of_host)))
    return dataclasses.replace(rest, **of_host)


def set_apart(federation: Federation, newcomers: Sequence[np.ndarray]) -> Federation:
    """Return the federation with newcomers, who take part in no round: (n_g,) bool of each group."""
    groups = [
        dataclasses.replace(group, newcomer=jnp.asarray(apart))
        for group, apart in zip(federation.groups, newcomers, strict=True)
    ]
    groups, training_rows = federation.replicate((tuple(groups), _training_rows(groups)))
    return dataclasses.replace(federation, groups=groups, training_rows=training_rows)


def without_data(
    partition: Partition,
    models: Sequence[tuple[Model, int]],
    moments: Moments,
    public: int,
    links: np.ndarray | None,
    vocabulary: int = 0,
) -> Federation:
    """Return a federation on one device without images and labels, see `jaxfl.data.absent`.

    Of `public` images there is only the number; the other arguments are as in `federate`.

    Raises:
      JaxflError: if the numbers of clients or outputs do not agree.
    """
    _check(partition, models)
    dtype = jnp.result_type(float)
    mean, std, target = moments
    absent: Any = ABSENT
    groups = _groups(partition, models, absent)
    return Federation(
        images=absent,
        labels=absent,
        mean=jnp.asarray(mean, dtype),
        std=jnp.asarray(std, dtype),
        groups=groups,
        training_rows=_training_rows(groups),
        public=jnp.zeros(public, jnp.int32),
        links=_matrix(links),
        unified=_unified(partition),
        labelled=_unified(partition),
        vocabulary=vocabulary,
        target=target and (jnp.asarray(target[0], dtype), jnp.asarray(target[1], dtype)),
    )


def _matrix(links: np.ndarray | None) -> jax.Array:
    return jax.device_put(np.zeros((0, 0), bool) if links is None else links.copy())


def _check(partition: Partition, models: Sequence[tuple[Model, int]]) -> None:
    clients = len(partition.train)
    if sum(count for _, count in models) != clients:
        raise JaxflError(
            f"The models are given to {sum(count for _, count in models)} clients, but the partition has "
            f"{clients}; make the counts add up to {clients}."
        )
    for model, _ in models:
        if model.classes != partition.outputs:
            raise JaxflError(
                f"{model.name} has {model.classes} outputs, but the partition's clients have "
                f"{partition.outputs} classes; build it with classes={partition.outputs}."
            )


def _unified(partition: Partition) -> bool:
    """Return whether a class is the same output on all clients."""
    return bool((partition.relabel == np.arange(partition.relabel.shape[1])).all())


def _class_counts(source: Source, partition: Partition) -> np.ndarray:
    """Return training rows per output, (clients, outputs) int32; all of them where outputs are no classes."""
    if source.task is not CLASSES:
        return np.repeat([[len(rows)] for rows in partition.train], partition.outputs, 1).astype(np.int32)
    outputs = [own[source.labels[rows]] for own, rows in zip(partition.relabel, partition.train, strict=True)]
    return np.stack([np.bincount(y, minlength=partition.outputs) for y in outputs]).astype(np.int32)


def _groups(partition: Partition, models: Sequence[tuple[Model, int]], class_counts) -> PerGroup:
    """Return the clients (n_g, ...) of each architecture; class_counts is (clients, outputs), or `ABSENT`."""
    starts = np.cumsum([0] + [count for _, count in models])
    return tuple(
        _group(partition, model, np.arange(start, start + count), class_counts)
        for start, (model, count) in zip(starts[:-1], models, strict=True)
    )


def _training_rows(groups: Sequence[Client]) -> jax.Array:
    rows = [np.where(group.newcomer, 0, group.size).sum() for group in groups]
    return jax.device_put(np.array(rows, float))


def _group(partition: Partition, model: Model, ids: np.ndarray, class_counts) -> Client:
    def padded(rows):
        # One capacity for all groups: a client's batches do not depend on whom it is grouped with.
        capacity = max(len(of_client) for of_client in rows)
        # Filled up with the client's own rows (row 0 where it has none): no client reads another's images.
        table = np.stack([np.resize(rows[i], capacity) for i in ids]).astype(np.int32)
        return jax.device_put(table), jax.device_put(np.array([len(rows[i]) for i in ids], np.int32))

    rows, size = padded(partition.train)
    validation_rows, validation_size = padded(partition.validation)
    test_rows, test_size = padded(partition.test)
    return Client(
        id=jax.device_put(ids.astype(np.int32)),
        rows=rows,
        size=size,
        validation_rows=validation_rows,
        validation_size=validation_size,
        test_rows=test_rows,
        test_size=test_size,
        relabel=jax.device_put(partition.relabel[ids].astype(np.int32)),
        class_counts=class_counts if class_counts is ABSENT else jax.device_put(class_counts[ids]),
        newcomer=jax.device_put(np.array([not len(partition.train[i]) for i in ids])),
        model=model,
    )
