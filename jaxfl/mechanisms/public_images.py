"""Public images, on which clients of any architecture can compare predictions.

A round takes some of them; every client predicts them, and may learn from the others' predictions. A client
trains on public images in the same way as on its own.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jaxfl.core.examples import sweep, visiting
from jaxfl.core.streams import PUBLIC
from jaxfl.data.federation import Client, Federation
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights


def require(federation: Federation) -> None:
    """Refuse a federation whose clients cannot compare predictions on public images.

    Raises:
      JaxflError: if there are none, or each client numbers its classes differently.
    """
    if len(federation.public) == 0:
        raise JaxflError(
            "The method needs public images, but the federation has none; add --public held-out or a data "
            "set."
        )
    require_unified(federation, "predictions on public images")


def require_unified(federation: Federation, what: str) -> None:
    """Refuse a federation whose clients' `what` cannot be compared: each numbers its classes differently."""
    if not federation.unified:
        raise JaxflError(
            f"The method compares clients' {what}, but every client numbers classes differently under "
            "--labels independent or permuted; leave --labels out (a saved partition keeps the labels that "
            "it was divided with)."
        )


def require_for_server(federation: Federation, models: Iterable[Model], bn_stats: str) -> None:
    """Refuse a federation whose server cannot run these networks on public images.

    Raises:
      JaxflError: as `require`, or if the server never gets BatchNorm's statistics.
    """
    require(federation)
    if bn_stats == "local" and any(model.normalised for model in models):
        raise JaxflError(
            "The server runs networks of clients and needs their BatchNorm statistics, which "
            'bn_stats=local never sends; leave that out, or build the networks with norm="none".'
        )


def subset(key, federation: Federation, size: int):
    """Draw the public images of a round without replacement; all if there are fewer than `size`.

    The key is that of the round; the draw uses a separate stream.

    Returns:
      (R,) int32, rows of the federation's images.

    Raises:
      JaxflError: see `require`.
    """
    return federation.public[shuffled(key, federation)[:size]]


def shuffled(key, federation: Federation) -> jax.Array:
    """Return places in the list of public images, (P,) int32, shuffled for the round.

    A state that refers to images holds places, because rows differ where a round has only its own clients'
    images, see `jaxfl.core.window`.

    Raises:
      JaxflError: see `require`.
    """
    require(federation)
    places = jnp.arange(len(federation.public), dtype=jnp.int32)
    return jax.random.permutation(jax.random.fold_in(key, PUBLIC), places)


def logits(weights: Weights, client: Client, rows):
    """Return a client's logits on public images (R,) in evaluation mode: (R, outputs); 0 if it is absent."""
    client = visiting(client, rows)

    def scores(x):
        return client.model.apply(weights.params, weights.stats, x, train=False)[0]

    return sweep(scores, client.rows, client.size, client.federation)
