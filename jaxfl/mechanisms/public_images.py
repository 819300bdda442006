"""Public images: what clients of any architecture can tell each other about.

A round takes some of them; every client says what it sees there, and may learn from what others saw. A
client learns from public images by the same local training as from its own.
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
    """Refuse a federation whose clients cannot tell each other what they see on public images.

    Raises:
      JaxflError: if there are none, or every client numbers its classes anew.
    """
    if len(federation.public) == 0:
        raise JaxflError(
            "The method needs public images and the federation has none; add --public held-out or a data set."
        )
    if not federation.unified:
        raise JaxflError(
            "The method compares clients' predictions on public images, which mean other classes on every "
            "client under --labels independent or permuted; leave that out."
        )


def require_for_server(federation: Federation, models: Iterable[Model], bn_stats: str) -> None:
    """Refuse what a server cannot do that runs these networks on public images.

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
    """Some public images of a round, drawn without replacement.

    Args:
      key: of the round; the draw has a stream of its own.
      federation: its public images.
      size: how many; all where there are fewer.

    Returns:
      (R,) int32, rows of the federation's images.

    Raises:
      JaxflError: see `require`.
    """
    return federation.public[shuffled(key, federation)[:size]]


def shuffled(key, federation: Federation) -> jax.Array:
    """(P,) int32, the places of the list of public images in an order of the round.

    A state that is to say which images it means holds places, because rows are others where a round has its
    own clients' images alone, see `jaxfl.core.window`.

    Raises:
      JaxflError: see `require`.
    """
    require(federation)
    places = jnp.arange(len(federation.public), dtype=jnp.int32)
    return jax.random.permutation(jax.random.fold_in(key, PUBLIC), places)


def logits(weights: Weights, client: Client, federation: Federation, rows):
    """What a client says of public images (R,) in evaluation mode: (R, outputs); 0 of an absent client."""
    client = visiting(client, rows)

    def scores(x):
        return client.model.apply(weights.params, weights.stats, x, train=False)[0]

    return sweep(scores, client.rows, client.size, federation)
