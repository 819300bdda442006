"""A model's accuracy and loss on a client's validation rows, for methods that weigh or prune by them."""

import jax.numpy as jnp
import optax

from jaxfl.core.examples import sweep
from jaxfl.core.training import count_correct
from jaxfl.data.federation import Client, Federation
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights


def require(federation: Federation, what: str, otherwise: str = "") -> None:
    """Refuse clients without validation rows.

    Args:
      federation: the clients.
      what: start of the error's sentence: what is done with these rows.
      otherwise: its end: what else the user may do.

    Raises:
      JaxflError: if clients have none.
    """
    if not federation.validates:
        raise JaxflError(
            f"{what} validation rows, but clients have none; divide the data with --validation-fraction "
            f"0.2{otherwise}."
        )


def accuracy(client: Client, w: Weights):
    """Return the share of the rows that the model gets right, (); 0 for a client without rows."""
    scores, y = _logits_and_outputs(client, w)
    return _share(count_correct(scores, y, client.validation_size).astype(scores.dtype), client)


def loss(client: Client, w: Weights):
    """Return the mean cross-entropy, (); 0 for a client without rows."""
    scores, y = _logits_and_outputs(client, w)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, y)
    real = jnp.arange(len(y), dtype=jnp.int32) < client.validation_size
    return _share(losses.sum(where=real), client)


def _logits_and_outputs(client: Client, w: Weights):
    """Return the logits (v, C) in evaluation mode and the right outputs (v,)."""
    rows, model, federation = client.validation_rows, client.model, client.federation

    def logits(x):
        return model.apply(w.params, w.stats, x, train=False)[0]

    return sweep(logits, rows, client.validation_size, federation), federation.outputs(client, rows)


def _share(total, client: Client):
    return total / jnp.maximum(client.validation_size, 1).astype(total.dtype)
