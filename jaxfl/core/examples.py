"""Sources of mini-batches: a client's rows, public rows, or arrays such as features and class means."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.config.options import Unread
from jaxfl.core import flops
from jaxfl.core.augment import augmentation
from jaxfl.core.streams import AUGMENTATION, POISON
from jaxfl.data.federation import Batch, Client, Federation
from jaxfl.errors import JaxflError

SWEPT = 64  # images that a sweep takes at once


@dataclasses.dataclass(frozen=True)
class Examples:
    """A list of examples that can be cut into mini-batches.

    Args:
      size: () int32, number of real examples; 0 for an absent client, which runs no batch.
      capacity: length of the list with its padding.
      take: ``(position (B,), mask (B,), key) -> Batch`` (or any pytree) of the examples at some positions;
        `mask` marks the real ones.
      privacy: clip norm and noise of single rows' gradients, see `jaxfl.core.dp_sgd`; None without.
    """

    size: jax.Array
    capacity: int
    take: Callable[[jax.Array, jax.Array, jax.Array], Any]
    privacy: Any = None


class _Sealed(Unread):
    """What is made of a client's training rows, under `--privacy rows`; a method that reads it is refused."""

    def __init__(self, content: Any):
        """Put it under seal."""
        super().__init__(
            "--privacy rows protects what descend learns from own_rows, so that nothing else may read a "
            "client's rows or class_counts"
        )
        self._content = content


def as_trained(client: Client) -> Client:
    """Return a client of a client map: an attacker may have other labels, see `Wire.relabelled`.

    If the run protects single rows, only `own_rows` takes them.
    """
    wire = client.federation.wire
    client = wire.relabelled(client) if wire else client
    if not (wire and wire.rows):
        return client
    return dataclasses.replace(client, rows=_Sealed(client.rows), class_counts=_Sealed(client.class_counts))


def own_rows(client: Client, hyper) -> Examples:
    """Return the training rows of a client in a client map; `hyper.augment` changes images at random.

    Attackers may change their rows, see `jaxfl.mechanisms.wire.attacks`. With `--privacy rows` only `descend`
    takes them.
    """
    federation: Federation = client.federation
    wire, transform, privacy = federation.wire, augmentation(hyper.augment), None
    poison = wire and wire.poison
    lies = poison and wire.is_attacker(client)
    if isinstance(client.rows, _Sealed):
        client, privacy = dataclasses.replace(client, rows=client.rows._content), wire.rows

    def take(position, mask, key):
        if not (hyper.augment or poison):
            return federation.batch(client, position, mask)
        augmented, poisoned = (jax.random.fold_in(key, stream) for stream in (AUGMENTATION, POISON))

        def changed(images):
            images = transform(augmented, images)
            return jnp.where(lies, poison.images(poisoned, client, images), images) if poison else images

        batch = federation.batch(client, position, mask, changed)
        if not poison:
            return batch
        return batch._replace(y=jnp.where(lies, poison.labels(poisoned, client, batch.y), batch.y))

    return Examples(client.size, client.rows.shape[0], take, privacy)


def stretch(examples: Examples, first, size) -> Examples:
    """Return `size` of the examples, from position `first` on, both () int32.

    Raises:
      JaxflError: if single rows are private: the accountant knows how often each of all is drawn.
    """
    last = examples.capacity - 1
    if examples.privacy:
        raise JaxflError(
            "--privacy rows draws from all rows of a client, but the method trains on a part of them; "
            "leave it out."
        )

    def take(position, mask, key):
        return examples.take(jnp.minimum(first + position, last), mask, key)

    return Examples(size, examples.capacity, take)


def public_rows(rows, client: Client) -> Examples:
    """Return public images (R,), all real, labelled by the client's outputs; none for an absent client."""
    guest, federation = visiting(client, rows), client.federation
    return Examples(guest.size, len(rows), lambda at, mask, key: federation.batch(guest, at, mask))


def server_rows(rows, size, federation: Federation) -> Examples:
    """Return images (R,) for training on the server, labelled by the source's classes; `size` () are real."""

    def take(position, mask, key):
        at = rows[position]
        return Batch(federation.inputs(at), federation.labels[at], mask, position)

    return Examples(size, len(rows), take)


def visiting(client: Client, rows) -> Client:
    """Return the client with other training rows (R,); an absent client still has none."""
    size = jnp.where(client.size > 0, len(rows), 0).astype(client.size.dtype)
    return dataclasses.replace(client, rows=rows, size=size)


def arrays(x, y, size) -> Examples:
    """Return arrays x (m, ...) with outputs y (m,) as examples; the first `size` are real."""
    return Examples(size, len(y), lambda at, mask, key: Batch(x[at], y[at], mask, at))


def sweep(f: Callable, rows, size, federation: Federation, *by_row):
    """Apply a function to images in order, `SWEPT` at a time, without training.

    Args:
      f: ``(x (B, H, W, C), *others (B, ...)) -> pytree of (B, ...)``.
      rows: (m,) int32, padded.
      size: () int32, number of real rows; only batches with a real row run.
      federation: the images.
      *by_row: arrays (N, ...) beside the images, of which f gets the entries of its rows.

    Returns:
      The outputs as leaves (m, ...). Entries after `size` are outputs of padding, or zero where no batch ran.
    """
    m = rows.shape[0]
    batch_size = max(1, min(SWEPT, m))
    rows = jnp.pad(rows, (0, max(-m % batch_size, batch_size - m)))
    f = jax.jit(f, inline=True)  # traced once, for its operations, its shapes and the loop

    def given(rows):
        return federation.inputs(rows), *(array[rows] for array in by_row)

    forms = jax.eval_shape(given, rows[:batch_size])
    flops.add(flops.of(f, *forms) / batch_size * size.astype(float))
    example = jax.eval_shape(f, *forms)
    filled = jax.tree.map(lambda leaf: jnp.zeros((rows.shape[0], *leaf.shape[1:]), leaf.dtype), example)

    def step(b, filled):
        start = b * batch_size
        outputs = f(*given(jax.lax.dynamic_slice_in_dim(rows, start, batch_size)))
        return jax.tree.map(
            lambda all_, new: jax.lax.dynamic_update_slice_in_dim(all_, new, start, 0),
            filled,
            outputs,
        )

    if m > 0:  # otherwise no client has such rows, and the loop need not be compiled
        steps = (size + batch_size - 1) // batch_size
        filled = jax.lax.fori_loop(jnp.zeros_like(steps), steps, step, filled)
    return jax.tree.map(lambda leaf: leaf[:m], filled)
