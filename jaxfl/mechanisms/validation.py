"""How good a model is on a client's validation rows, for methods that weigh or prune by that."""

import jax.numpy as jnp

from jaxfl.core.examples import sweep
from jaxfl.data.federation import Client, Federation
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights


def require(federation: Federation, what: str, otherwise: str = "") -> None:
    """Raise `JaxflError` if clients have no validation rows.

    Args:
      federation: the clients.
      what: start of the error's sentence: what is done with these rows.
      otherwise: its end: what else the user may do.
    """
    if not federation.validates:
        raise JaxflError(
            f"{what} validation rows, but clients have none; divide the data with --validation-fraction "
            f"0.2{otherwise}."
        )


def quality(client: Client, w: Weights):
    """Return how good the model is by its task, (), 1 at best: the accuracy, or R^2; 0 without rows."""
    return client.model.task.quality(*_logits_and_outputs(client, w), client.validation_size)


def loss(client: Client, w: Weights):
    """Return the mean of the task's loss, (); 0 for a client without rows."""
    losses = client.model.task.losses(*_logits_and_outputs(client, w))
    real = jnp.arange(len(losses), dtype=jnp.int32) < client.validation_size
    total = losses.sum(where=real)
    return total / jnp.maximum(client.validation_size, 1).astype(total.dtype)


def _logits_and_outputs(client: Client, w: Weights):
    """Return the logits (v, C) in evaluation mode and the right outputs (v,)."""
    rows, model, federation = client.validation_rows, client.model, client.federation

    def logits(x):
        return model.apply(w.params, w.stats, x, train=False)[0]

    return sweep(logits, rows, client.validation_size, federation), federation.outputs(client, rows)
