"""FCCL: clients of any architecture correlate their logits on public images, and do not forget.

Huang et al. 2022, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR, section 3.
w_i is client i's model, w_i^0 the same after training alone before the federation, w_i^- the same after its
last local training (before its first round: w_i^0, so that both terms are the same), S_t the cohort. Over a
batch of B public images Z_i are client i's logits and Zbar is their mean over S_t; A_i and M are Z_i and Zbar
with standardised columns:

    w_i <- LocalSGD over CE(w_i) + KL(f(w_i^-) || f(w_i)) + KL(f(w_i^0) || f(w_i))
    for each public batch:
        w_i <- an Adam step along sum_u (1 - C_uu)^2 + lambda sum_{u != v} (1 + C_uv)^2,  C = A_i^T M / B

Adam restarts at every batch, as in the authors' code. Its first step moves every parameter by the full
rate, whatever the size of its gradient. So gradients that are only rounding errors are set to 0, such as that
of the last bias, on which standardised columns do not depend. Off the diagonal the paper has +1, which Barlow
Twins lacks. The mean is over the logits of all clients of S_t, the learner included (FCCL+), in evaluation
mode. As in all methods here that exchange predictions, a round begins with local training; the paper's ends
with it. A client that joins at the end has not trained alone and has nothing to remember. Without
pre-training w_i^0 is not remembered, and w_i^- is the initial model in a client's first round. Pre-training
lasts as long as a round's local training, in the authors' code 50 epochs. lambda is `lam`.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class FCCL(fl.Training):
    """Options of FCCL."""

    public_size: int = fl.within("[1, inf)", 3000)
    """Public images per round; all if there are fewer."""
    public_batch: int = fl.within("[2, inf)", 256)
    """B, public images per batch; a smaller last batch is dropped, unless it is the only one."""
    public_epochs: int = fl.within("[0, inf)", 1)
    """Passes over the round's public images, in the same batches."""
    public_lr: float = fl.client_rate("[0, inf)", 1e-3)
    """Learning rate of Adam on public images."""
    lam: float = fl.within("[0, inf)", 0.0051)
    """lambda, weight of correlations between classes."""
    pretraining_epochs: int | None = fl.within("[0, inf)", None)
    """Epochs of every client alone before the first round; by default E."""
    remember: float = fl.within("[0, inf)", 1.0)
    """Weight of both divergences from a client's earlier models."""


class State(NamedTuple):
    """The models w, those after the last local training and those trained alone, per group (n_g, ...)."""

    hyper: FCCL
    weights: fl.PerGroup
    before: fl.PerGroup
    alone: fl.PerGroup


def standardised(z):
    """Scale columns of logits (B, C) to mean 0, variance 1; a column constant up to rounding becomes 0."""
    apart = z - z.mean(0, keepdims=True)
    variance = jnp.square(apart).sum(0, keepdims=True) / max(len(z) - 1, 1)
    least = jnp.square(16 * jnp.finfo(z.dtype).eps * jnp.abs(z).max(0, keepdims=True))
    varies = variance > least
    return jnp.where(varies, apart / jnp.sqrt(jnp.where(varies, variance, 1)), 0)


def correlation(model: fl.Model, target, lam):
    """Return the loss of a public batch with the mean logits (B, C), or (B, T, C), as target.

    The network computes in full precision, where gradients can be told from rounding errors.
    """
    model = dataclasses.replace(model, precision="full")

    def loss(w, batch, key):
        z, stats = fl.forward(model, w, batch, key)
        z, m = (y.reshape(-1, y.shape[-1]) for y in (z, target[batch.position]))
        c = jnp.matmul(standardised(z).T, standardised(m), precision="highest") / len(z)
        same = jnp.eye(len(c), dtype=bool)
        return jnp.where(same, jnp.square(1 - c), lam * jnp.square(1 + c)).sum(), stats

    return loss


def without_rounding(gradients, params):
    """Set gradients to 0 that are so small beside the largest that they may be rounding errors."""
    leaves = jax.tree.leaves(gradients)
    largest = jnp.stack([jnp.abs(leaf).max() for leaf in leaves]).max()
    least = 16 * jnp.finfo(largest.dtype).eps * largest
    return jax.tree.map(lambda g: jnp.where(jnp.abs(g) > least, g, 0), gradients)


def remembering(model: fl.Model, memories: tuple[fl.Weights, ...], weight):
    """Return the loss CE(w) + weight * sum of KL(f(memory) || f(w))."""

    def loss(w, batch, key):
        z, stats = fl.forward(model, w, batch, key)
        values = model.task.losses(z, batch.y)
        for known in memories:
            said, _ = model.apply(known.params, known.stats, batch.x, train=False)
            values = values + weight * model.task.apart(z, model.task.soft(said))
        return fl.mean(values, batch), stats

    return loss


def build(config: FCCL) -> fl.Algorithm:
    """Train locally, then correlate."""
    epochs = config.length if config.pretraining_epochs is None else config.pretraining_epochs

    def init(key, federation, hyper):
        fl.public_images.require(federation)
        weights = fl.own_models.start(key, federation)
        return State(hyper, weights, weights, weights)

    def prepare(key, state, federation, cohort):
        """Train every client alone."""
        own = fl.gather(state.weights, cohort)
        weights, loss = fl.own_models.train(key, federation, cohort, own, state.hyper, epochs=epochs)
        weights = fl.scatter(state.weights, cohort, weights)
        nothing = (0,) * len(weights)
        info = fl.Info(loss, fl.sent_up(cohort, nothing), fl.sent_down(cohort, nothing))
        return State(state.hyper, weights, weights, weights), info

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def learn(key, client, nothing, own):
            w, before, alone = own
            weight = jnp.where(client.newcomer, 0, hyper.remember)
            memories = (before, alone) if epochs else (before,)
            loss = remembering(client.model, memories, weight)
            trained = fl.descend(loss, w, key, fl.own_rows(client, hyper), hyper)
            return trained.weights, trained.loss, trained.steps == 0

        own = fl.gather(tuple(zip(state.weights, state.before, state.alone, strict=True)), cohort)
        weights, loss, idle = zip(*fl.map_clients(learn, key, federation, cohort, own=own), strict=True)
        present = jnp.concatenate(fl.cohort_rows(federation, cohort)) > 0
        whole = cut(fl.public_images.subset(key, federation, config.public_size))
        batches = jnp.tile(whole, (config.public_epochs, 1))

        def correlate(weights, numbered):
            number, rows = numbered
            batch_key = jax.random.fold_in(key, fl.streams.SHARED_BATCHES - number)

            def say(key, client, nothing, w):
                return fl.public_images.logits(w, client, rows)

            logits = jnp.concatenate(fl.map_clients(say, batch_key, federation, cohort, own=weights))
            here = present.reshape(-1, *[1] * (logits.ndim - 1))
            target = jnp.mean(logits, 0, where=here)

            def follow(key, client, nothing, w):
                return fl.descend(
                    correlation(client.model, target, hyper.lam),
                    w,
                    key,
                    fl.public_rows(rows, client),
                    hyper,
                    epochs=1,
                    batch_size=len(rows),
                    optimizer=optax.adam(hyper.public_lr),
                    correction=optax.stateless(without_rounding),
                ).weights

            return fl.map_clients(follow, batch_key, federation, cohort, own=weights), None

        correlated, _ = fl.scan(correlate, weights, (jnp.arange(len(batches), dtype=jnp.int32), batches))
        spoken = batches.size * math.prod(federation.models[0].output)
        told = min(whole.size, batches.size)  # which images
        up = fl.sent_up(cohort, (spoken,) * len(weights))
        down = fl.sent_down(cohort, (spoken + told,) * len(weights))
        return State(
            hyper,
            fl.scatter(state.weights, cohort, correlated),
            fl.scatter(state.before, cohort, weights),
            state.alone,
        ), fl.Info(loss, up, down, trained=fl.own_models.predictors(weights), idle=idle)

    def cut(rows):
        """Return the public images of every batch, (batches, B)."""
        batch = min(config.public_batch, len(rows))
        return rows[: len(rows) // batch * batch].reshape(-1, batch)

    own = fl.own_models.personal
    return fl.Algorithm(init, own, step, own, prepare=prepare, wire=("rows",))


fccl = fl.Method("fccl", build, FCCL, needs=("public",))
