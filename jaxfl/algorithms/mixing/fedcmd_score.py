"""FedCMD's score: how far a layer moves the distribution of features between input and label.

Chen et al. 2024, section V-A, eqs. 5-6, and Algorithm 2, lines 8-12. A tensor a is represented by the
Gaussian with the mean mu and the standard deviation sd of all its entries. The distance of two is the closed
form of the 2-Wasserstein distance in one dimension,

    W(a, b) = sqrt((mu_a - mu_b)^2 + (sd_a - sd_b)^2)

With the images x as the network gets them, the labels y as numbers and the output o_l of layer l (after its
ReLU), its score is

    s_l = | [W(o_l, y) - W(o_{l-1}, y)]  -  [W(o_l, x) - W(o_{l-1}, x)] |

which is eq. 6 with its terms in another order. The least score gets the vote.

Paper: z is fitted to "the local data", and scores follow ClientUpdate. So a client scores once, over all its
rows, and tensors are as they are. In which mode the trained network then is, the paper does not say: it is in
evaluation mode, as in any measurement of a trained model, and images are not augmented.

Code: every mini-batch is scored while the network trains, in training mode, and each tensor is first scaled
to [0, 1] by its least and greatest entry, which leaves few differences between layers. Of a tensor whose
entries are all equal we take the Gaussian (0, 0); the code then sets the distance to 0.

Rows have equally many entries, so the moments of rows give those of all of them exactly, and no outputs of
layers are kept.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl


class Moments(NamedTuple):
    """Mean, variance, least and greatest entry of each row of a tensor, (B,) each."""

    mean: jax.Array
    variance: jax.Array
    low: jax.Array
    high: jax.Array


class Gaussian(NamedTuple):
    """Mean and standard deviation of a tensor's entries, () each."""

    mean: jax.Array
    deviation: jax.Array


class Tally(NamedTuple):
    """A client's votes and scores."""

    votes: jax.Array  # (candidates,) int32, one vote, or one for each mini-batch; none if it does not vote
    scores: jax.Array  # (candidates,), of all its rows, or the mean over mini-batches


def candidates(model: fl.Model, which: str) -> tuple[str, ...]:
    """Return the names of "all" blocks with weights, or of the "dense" ones, without convolutions."""
    axes = {name: [leaf.ndim for leaf in jax.tree.leaves(block)] for name, block in model.form.params.items()}
    too_many = 4 if which == "dense" else jnp.inf
    return tuple(name for name in model.names if 0 < max(axes[name], default=0) < too_many)


def moments(tensor) -> Moments:
    """Return the moments of each row: (B, ...) -> (B,)."""
    flat = tensor.reshape(len(tensor), -1)
    return Moments(flat.mean(1), flat.var(1), flat.min(1), flat.max(1))


def gaussian(rows: Moments, real, scale: str) -> Gaussian:
    """Return the Gaussian of all entries of the rows in `real` (B,), perhaps scaled by "min-max"."""
    count = jnp.maximum(real.sum(), 1).astype(rows.mean.dtype)
    mu = jnp.sum(rows.mean, where=real) / count
    sd = jnp.sqrt(jnp.sum(rows.variance + (rows.mean - mu) ** 2, where=real) / count)
    if scale == "none":
        return Gaussian(mu, sd)
    low = jnp.min(rows.low, where=real, initial=jnp.inf)
    spread = jnp.max(rows.high, where=real, initial=-jnp.inf) - low
    return Gaussian(jnp.where(spread > 0, (mu - low) / spread, 0), jnp.where(spread > 0, sd / spread, 0))


def wasserstein(a: Gaussian, b: Gaussian, distance: str):
    """Return the distance of two Gaussians; "mean" ignores the deviations."""
    means, deviations = a.mean - b.mean, a.deviation - b.deviation
    return jnp.abs(means) if distance == "mean" else jnp.sqrt(means**2 + deviations**2)


def flow(x, outputs) -> tuple[Moments, ...]:
    """Return the moments of images (B, H, W, C) and of the outputs of all blocks, (B, ...) each."""
    return tuple(map(moments, (x, *outputs)))


def ballot(model: fl.Model, seen: tuple[Moments, ...], y, real, config) -> Tally:
    """Score the candidates by what `flow` has seen and labels y (B,) int32, and vote for one.

    Only rows in `real` (B,) bool count.
    """
    labels = moments(y.astype(seen[0].mean.dtype))
    x, *outputs, y = (gaussian(rows, real, config.score_scale) for rows in (*seen, labels))

    def moved(before, now, towards):
        before, now = (wasserstein(layer, towards, config.distance) for layer in (before, now))
        return jnp.abs(now - before) if config.score == "absolute" else now - before

    names = candidates(model, config.candidates)
    layers = dict(zip(model.names, itertools.pairwise((x, *outputs)), strict=True))
    scores = jnp.stack([jnp.abs(moved(*layers[name], y) - moved(*layers[name], x)) for name in names])
    return Tally(vote(scores, names, config.ties), scores)


def vote(scores, names: tuple[str, ...], ties: str):
    """Return one vote for the least score, (candidates,) int32; ties go to `ties`, else the earliest."""
    least = scores == scores.min()
    winner = least.argmax()
    if ties in names:
        winner = jnp.where(least[names.index(ties)], names.index(ties), winner)
    return jax.nn.one_hot(winner, len(names), dtype=jnp.int32)


def train_and_vote(key, client: fl.Client, w: fl.Weights, hyper, voting) -> fl.Trained:
    """Train a client's model w on the cross-entropy; its `Tally` has no votes unless `voting`, () bool."""
    rows = fl.own_rows(client, hyper)
    if hyper.vote_on == "rows":
        trained = fl.descend(fl.task_loss(client.model), w, key, rows, hyper)
        tally = after_training(client, trained.weights, jnp.where(voting, client.size, 0), hyper)
    else:
        count = len(candidates(client.model, hyper.candidates))
        nothing = Tally(jnp.zeros(count, jnp.int32), jnp.zeros(count))
        trained = fl.descend(voting_loss(client.model, hyper), w, key, rows, hyper, tally=nothing)
        batches = jnp.maximum(trained.steps, 1).astype(nothing.scores.dtype)
        tally = trained.tally._replace(scores=trained.tally.scores / batches)
    return trained._replace(tally=tally._replace(votes=jnp.where(voting, tally.votes, 0)))


def after_training(client: fl.Client, w: fl.Weights, size, config) -> Tally:
    """Return the vote and scores on a client's first `size` () training rows, in evaluation mode."""
    federation = client.federation

    def of_images(x):
        return flow(x, client.model.outputs(w.params, w.stats, x, train=False)[0])

    seen = fl.sweep(of_images, client.rows, size, federation)
    real = jnp.arange(len(client.rows), dtype=jnp.int32) < size
    return ballot(client.model, seen, federation.outputs(client, client.rows), real, config)


def voting_loss(model: fl.Model, config):
    """Return the plain loss, which also observes the `Tally` of a mini-batch."""

    def loss(weights, batch, key):
        outputs, stats = model.outputs(
            weights.params, weights.stats, batch.x, train=model.names, key=key, mask=batch.mask
        )
        value = fl.mean(model.task.losses(outputs[-1], batch.y), batch)
        seen = flow(batch.x, jax.lax.stop_gradient(outputs))
        return value, stats, ballot(model, seen, batch.y, batch.mask, config)

    return loss
