"""Distillation on the server: a network learns on public images what an ensemble of clients says of them.

D_r are a round's public images, T the temperature. From a network f with weights w and a teacher's soft
predictions t of D_r,

    w <- Adam over T^2 KL(t || softmax(f(w, D_r) / T))            R passes, its rate falling as a cosine

The server needs no labels, and no client takes part: what clients' networks say of D_r is computed by the
server as well, and all these operations are its own.
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
    """|D_r|, public images of a round; all where there are fewer."""
    public_batch: int = within("[1, inf)", 128)
    """Public images of a mini-batch."""
    server_epochs: int = within("[0, inf)", 1)
    """R, the server's passes over the round's public images."""
    server_lr: float = within("[0, inf)", 1e-3)
    """The first rate of the server's Adam, which falls to 0 as a cosine."""
    temperature: float = within("(0, inf)", 1.0)
    """T of the predictions that are compared."""


def client_logits(
    weights: PerGroup, federation: Federation, cohort: Cohort, rows, key, model: Model | None = None
) -> jax.Array:
    """Logits of the networks that a cohort has sent, on public images, in evaluation mode.

    Args:
      weights: of the networks, per group (k_g, ...).
      federation: the images.
      cohort: whose they are.
      rows: (R,) int32, of the images.
      key: of the round.
      model: of all networks, where these are not of their clients' architectures.

    Returns:
      Logits (K, R, outputs); 0 of an empty place.
    """

    def logits(key, client, nothing, w):
        client = dataclasses.replace(client, model=model) if model else client
        return public_images.logits(w, client, federation, rows)

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
    """Train a network to say what a teacher says.

    Args:
      model: the network.
      weights: where it starts.
      teacher: (R, outputs), soft predictions.
      rows: (R,) int32, of which images they are.
      key: of the round; the server has a stream of its own.
      federation: the images.
      hyper: its epochs, batches, rate and temperature.
      present: () bool, whether anybody is there to learn for; otherwise no batch runs.
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
