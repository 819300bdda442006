"""The mini-batches of a local phase: how many there are, and in which order rows are taken."""

from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
    """A number of mini-batches, whatever the number of rows, instead of a number of epochs."""

    number: int


# Passes over some rows, whole or a fraction, or a number of mini-batches; () int32 may differ by client.
Epochs = int | float | Steps | jax.Array


def batch_order(key, size, capacity: int):
    """Return the order of a list's rows in one epoch; its first `size` entries are a permutation.

    Args:
      key: ``fold_in(key of the local phase, epoch)``.
      size: () int32, number of real rows.
      capacity: length of the padded list of rows. The order does not depend on it.

    Returns:
      (capacity,) int32.
    """
    bits = jax.random.bits(key, (capacity,), jnp.uint32) >> 1
    padding = jnp.uint32(2**32 - 1)
    real = jnp.arange(capacity, dtype=jnp.int32) < size
    return jnp.argsort(jnp.where(real, bits, padding)).astype(jnp.int32)


def batches_per_epoch(size, batch_size: int, skip_single_row: bool):
    """Return the number of batches in an epoch of `size` rows: ceil(size / batch_size).

    With `skip_single_row` a last batch of a single row is left out, see `fit`.
    """
    count = (size + batch_size - 1) // batch_size
    return count - (size % batch_size == 1).astype(count.dtype) if skip_single_row else count


def batches_per_phase(epochs: Epochs, count):
    """Return the number of mini-batches in a local phase whose epochs have `count` () int32; 0 without rows.

    A fraction of an epoch is rounded up to whole batches.
    """
    if isinstance(epochs, Steps):
        return jnp.where(count > 0, jnp.int32(epochs.number), 0)
    if isinstance(epochs, jax.Array):
        if not jnp.issubdtype(epochs.dtype, jnp.integer):
            raise TypeError(
                f"epochs that may differ by client must be integers, not {epochs.dtype}; a share of an epoch "
                "is a Python number, and Steps(n) is a number of mini-batches"
            )
        return count * epochs
    whole, share = divmod(Fraction(epochs).limit_denominator(1000), 1)  # 0.1 is no binary fraction
    full, rest = jnp.divmod(count, share.denominator)  # count * share.numerator may not fit an int32
    part = full * share.numerator + (rest * share.numerator + share.denominator - 1) // share.denominator
    return count * int(whole) + part


def complete_passes(epochs: Epochs) -> int | jax.Array | None:
    """Return the number of passes; None if the last one may end early: for a fraction or steps."""
    if isinstance(epochs, jax.Array):
        return epochs
    return None if isinstance(epochs, Steps) or epochs % 1 else int(epochs)
