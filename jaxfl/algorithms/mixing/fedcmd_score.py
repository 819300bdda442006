"""FedCMD's score: how far a layer moves the distribution of features between input and label.

Chen et al. 2024, section V-A, eqs. 5-6. A tensor a of a mini-batch is represented by the Gaussian of its
normalised values, nu(a) = (a - min a) / (max a - min a), as in the authors' code, with mean mu and standard
deviation sd over all entries. The distance of two is the closed form of the 2-Wasserstein distance in one
dimension,

    W(a, b) = sqrt((mu_a - mu_b)^2 + (sd_a - sd_b)^2)

With the images x, the labels y as numbers and the output o_l of layer l (after its ReLU), its score is

    s_l = | [W(o_l, y) - W(o_{l-1}, y)]  -  [W(o_l, x) - W(o_{l-1}, x)] |

which is eq. 6 with its terms in another order.
A mini-batch votes for the layer with the least score. Candidates are the dense layers:
blocks with weights and without convolutions.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.core.training import mean
from jaxfl.models.model import Model


class Gaussian(NamedTuple):
    """Mean and standard deviation of a tensor's normalised values, () each."""

    mean: jax.Array
    deviation: jax.Array


def candidates(model: Model) -> tuple[str, ...]:
    """Return the names of the dense layers: blocks with weights and without convolutions."""
    shapes = model.form.params
    kernels = {name: [leaf.ndim for leaf in jax.tree.leaves(leaves)] for name, leaves in shapes.items()}
    return tuple(name for name in model.names if 0 < max(kernels[name], default=0) < 4)


class Tally(NamedTuple):
    """Votes and scores of the candidates, summed over a client's mini-batches.

    Args:
      votes: (candidates,) int32, number of votes.
      scores: (candidates,), sum of scores.
    """

    votes: jax.Array
    scores: jax.Array


def gaussian(a, mask) -> Gaussian:
    """Return the Gaussian of the rows of a batch (B, ...) in `mask` (B,); one without spread is all 0."""
    real = mask.reshape(-1, *(1,) * (a.ndim - 1)) & jnp.ones(a.shape, bool)
    low, high = jnp.min(a, where=real, initial=jnp.inf), jnp.max(a, where=real, initial=-jnp.inf)
    spread = jnp.where(high > low, high - low, 1)
    normalised = (a - low) / spread
    return Gaussian(jnp.mean(normalised, where=real), jnp.std(normalised, where=real))


def wasserstein(a: Gaussian, b: Gaussian, distance: str):
    """Return the distance of two Gaussians; "mean" ignores the deviations."""
    means, deviations = a.mean - b.mean, a.deviation - b.deviation
    return jnp.abs(means) if distance == "mean" else jnp.sqrt(means**2 + deviations**2)


def scores(model: Model, outputs, batch, *, distance: str, score: str):
    """Return the candidates' scores on a mini-batch.

    Args:
      model: the architecture.
      outputs: outputs of every block, (B, ...) each.
      batch: the mini-batch they come from.
      distance: "wasserstein", or "mean" for only the difference of means.
      score: "signed" is eq. 6; "absolute" drops the sign of both differences.

    Returns:
      (candidates,).
    """
    x, y = (gaussian(a.astype(outputs[-1].dtype), batch.mask) for a in (batch.x, batch.y))
    layers = [x, *(gaussian(output, batch.mask) for output in outputs)]  # the first layer's input is x

    def moved(block, towards):
        before, now = (wasserstein(layers[i], towards, distance) for i in (block, block + 1))
        return jnp.abs(now - before) if score == "absolute" else now - before

    places = [model.names.index(name) for name in candidates(model)]
    return jnp.stack([jnp.abs(moved(b, y) - moved(b, x)) for b in places])


def vote(scores, names: tuple[str, ...], ties: str):
    """Return one vote for the least score, (candidates,) int32; ties go to `ties`, else the earliest."""
    least = scores == scores.min()
    winner = least.argmax()
    if ties in names:
        winner = jnp.where(least[names.index(ties)], names.index(ties), winner)
    return jax.nn.one_hot(winner, len(names), dtype=jnp.int32)


def no_votes(model: Model) -> Tally:
    """Return the tally before the first mini-batch."""
    names = candidates(model)
    return Tally(jnp.zeros(len(names), jnp.int32), jnp.zeros(len(names)))


def voting_loss(model: Model, config) -> Callable:
    """Return the plain loss, which also observes a `Tally` of each mini-batch's vote.

    Args:
      model: the client's architecture.
      config: FedCMD's options.
    """
    names = candidates(model)

    def loss(weights, batch, key):
        outputs, stats = model.outputs(
            weights.params, weights.stats, batch.x, train=model.names, key=key, mask=batch.mask
        )
        value = mean(optax.softmax_cross_entropy_with_integer_labels(outputs[-1], batch.y), batch)
        seen = jax.lax.stop_gradient(outputs)
        new = scores(model, seen, batch, distance=config.distance, score=config.score)
        return value, stats, Tally(vote(new, names, config.ties), new)

    return loss


def of_batches(tally: Tally) -> Tally:
    """Return the tally with its summed scores averaged over mini-batches."""
    batches = jnp.maximum(tally.votes.sum(), 1).astype(tally.scores.dtype)
    return tally._replace(scores=tally.scores / batches)
