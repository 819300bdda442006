"""The ledger of a round: how many scalars each client sends and receives."""

import numbers

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.core.client_map import one_or_all, per_group
from jaxfl.core.protocol import Cohort, Slots
from jaxfl.data.federation import PerGroup
from jaxfl.errors import JaxflError

LARGEST_MESSAGE = 2**31 - 1  # scalars that an int32 counts


@one_or_all("messages")
def sent_up(cohort: Cohort, messages: PerGroup) -> PerGroup:
    """The scalars of one message for each client whose answer reaches the server.

    Args:
      cohort: of the round.
      messages: per group what one client sends: a tree of arrays or shapes, or a number of scalars; or the
        scalars that each client sends, (k_g,) int32.

    Returns:
      Per group (k_g,) int32.

    Raises:
      JaxflError: if a message has more scalars than an int32 counts.
      ValueError: if their number is a float.
    """
    return per_group(_counts, cohort.groups, messages)


@one_or_all("messages")
def sent_down(cohort: Cohort, messages: PerGroup) -> PerGroup:
    """The scalars of one message for each client that receives it; all else as in `sent_up`."""
    return per_group(_counts, cohort.groups, messages)


def _counts(slots: Slots, message) -> jax.Array:
    if isinstance(message, float):
        raise ValueError(f"a message has a whole number of scalars, not {message}; round it, as by math.ceil")
    counted = getattr(message, "shape", None) == slots.mask.shape
    if counted and jnp.issubdtype(message.dtype, jnp.integer):
        return jnp.where(slots.mask, message, 0)
    scalars = int(message) if isinstance(message, numbers.Integral) else tree.scalars(message)
    if scalars > LARGEST_MESSAGE:
        raise JaxflError(
            f"A message of one client would have {scalars:,} scalars, more than the ledger counts "
            f"({LARGEST_MESSAGE:,}); choose fewer public images or smaller networks."
        )
    return jnp.where(slots.mask, jnp.int32(scalars), 0)
