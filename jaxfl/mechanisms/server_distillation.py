"""Distillation on the server: a network learns an ensemble of clients' predictions on public images.

D_r are a round's public images, T the temperature. For a network f with weights w and a teacher's soft
predictions t on D_r,

    w <- Adam over T^2 KL(t || softmax(f(w, D_r) / T))            R passes, its rate falling as a cosine

The server needs no labels, and no client takes part: the server also computes the predictions of clients'
networks on D_r, and all these operations count as its own.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.core import flops
from jaxfl.core.client_map import map_clients
from jaxfl.core.examples import server_rows
from jaxfl.core.protocol import Cohort
from jaxfl.core.streams import SERVER
from jaxfl.core.training import Training, descend
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.mechanisms import public_images
from jaxfl.mechanisms.losses import distillation
from jaxfl.models.model import Model, Weights


@options
class ServerDistillation(Training):
    """Options of methods whose server distils."""

    public_size: int = within("[1, inf)", 3000)
    """|D_r|, public images per round; all if there are fewer."""
    public_batch: int = within("[1, inf)", 128)
    """Public images per mini-batch."""
    server_epochs: int = within("[0, inf)", 1)
    """R, the server's passes over the round's public images."""
    server_lr: float = within("[0, inf)", 1e-3)
    """Initial learning rate of the server's Adam, which falls to 0 as a cosine."""
    temperature: float = within("(0, inf)", 1.0)
    """T of the compared predictions."""


def client_logits(
    weights: PerGroup, federation: Federation, cohort: Cohort, rows, key, model: Model | None = None
) -> jax.Array:
    """Return the logits of a cohort's networks on public images, in evaluation mode.

    Args:
      weights: weights of the networks, per group (k_g, ...).
      federation: holds the images.
      cohort: the clients whose networks they are.
      rows: (R,) int32, rows of the images.
      key: key of the round.
      model: architecture of all networks, if it is not that of their clients.

    Returns:
      Logits (K, R, outputs); 0 in an empty place.
    """

    def logits(key, client, nothing, w):
        client = dataclasses.replace(client, model=model) if model else client
        return public_images.logits(w, client, rows)

    with flops.on_server():
        return jnp.concatenate(map_clients(logits, key, federation, cohort, own=weights))


def distil(
    model: Model,
    weights: Weights,
    teacher,
    rows,
    key,
    federation: Federation,
    hyper: ServerDistillation,
    present: jax.Array,
) -> Weights:
    """Train a network to predict what a teacher predicts.

    Args:
      model: the network.
      weights: its initial weights.
      teacher: (R, outputs), soft predictions.
      rows: (R,) int32, rows of their images.
      key: key of the round; the server uses a separate stream.
      federation: holds the images.
      hyper: the server's epochs, batch size, learning rate and temperature.
      present: () bool, whether any client is present; otherwise no batch runs.
    """
    images = server_rows(rows, jnp.where(present, jnp.int32(len(rows)), 0), federation)
    steps = max(1, hyper.server_epochs * -(-len(rows) // hyper.public_batch))
    temperature = hyper.temperature
    return descend(
        distillation(model, teacher, temperature, temperature**2),
        weights,
        jax.random.fold_in(key, SERVER),
        images,
        dataclasses.replace(hyper, clip_norm=None),  # clients' clipping is not the server's
        epochs=hyper.server_epochs,
        batch_size=hyper.public_batch,
        optimizer=optax.adam(optax.cosine_decay_schedule(hyper.server_lr, steps)),
    ).weights
