"""FedAP: each client gets a mixture of all models by similarity of activations, and keeps its norm layers.

Lu et al. 2022, "Personalized Federated Learning with Adaptive Batchnorm for Healthcare", IEEE Transactions on
Big Data, arXiv:2112.00734. w_i is client i's model without its normalisation layers, b_i these layers
(BatchNorm's scales, biases and statistics).

Before the first round one model visits all clients of an architecture one after another, again and again.
Each trains it on a part of its rows that is held out of the rounds, and passes it on. All clients start from
that model. m_il and v_il are its mean and variance of each channel of the l-th layer's outputs over the rows
of client i, and

    d_ij = sum_l sqrt(|m_il - m_jl|^2 + |sqrt(v_il) - sqrt(v_jl)|^2)
    W_ij = (1 - mu) (1/d_ij) / sum_{k != i} (1/d_ik),    W_ii = mu

among these clients. A newcomer was not measured and has equal weights for all of them.

In a round client i trains sum_j W_ij w_j with its b_i on its other rows; the mixture has the models that
absent clients sent last. A client deploys its own model. The comparison uses the outputs of all convolutions,
which are what norms see (but in a DenseNet, whose norms follow concatenations); in a network without
convolutions, those of all hidden layers.

d-FedAP is ``layers="last"``. f-FedAP is ``pretraining="fedavg"``: FedAvg on the held-out rows instead of the
visits. The passes carry BatchNorm's statistics along, whatever `bn_stats` is. They are additional to the
rounds; in FL-bench, which made FedCMD's table, they are half of the rounds. If clients are given initial
models, the first client's model goes round. Simulated seconds of the passes are those of the slowest client
alone, although the clients wait for each other.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl


@fl.options
class FedAP(fl.Training):
    """Options of FedAP."""

    mu: float = fl.within("[0, 1]", 0.5)
    """Weight of a client's own model in its mixture."""
    held_out: float = fl.within("[0, 1)", 0.3)
    """Share of a client's rows that only the passes before the first round use."""
    passes: int | None = fl.within("[0, inf)", None)
    """Passes of the model over all clients before the first round, one epoch at each client; by default half
    the number of rounds."""
    pretraining: Literal["sequential", "fedavg"] = "sequential"
    """One client after another, or all in parallel and averaged (f-FedAP)."""
    layers: Literal["all", "last"] = "all"
    """Norms whose inputs are compared: all, or the last one (d-FedAP)."""


class State(NamedTuple):
    """The clients' models (n, ...), and their closeness (n, n): rows sum to 1, diagonal 0."""

    hyper: FedAP
    weights: fl.Weights
    closeness: jax.Array


def held_out_rows(client: fl.Client, hyper: FedAP) -> fl.Examples:
    """Return the client's first rows, a share rounded down.

    A partition that is drawn has a client's rows in random order; one that is read from a file should, too.
    """
    return fl.stretch(fl.own_rows(client, hyper), 0, part(client, hyper))


def other_rows(client: fl.Client, hyper: FedAP) -> fl.Examples:
    """Return the rows that the client trains on in rounds."""
    first = part(client, hyper)
    return fl.stretch(fl.own_rows(client, hyper), first, client.size - first)


def part(client: fl.Client, hyper: FedAP):
    """Return the number of held-out rows, () int32; at least one row of a client is for its training."""
    rows = hyper.held_out * client.size.astype(float)
    rows = jnp.floor(rows + 1e-4).astype(client.size.dtype)  # 0.7 of 10 is 7 in any precision
    return jnp.clip(rows, 0, jnp.maximum(client.size - 1, 0))


def moments(client: fl.Client, w: fl.Weights) -> tuple[jax.Array, ...]:
    """Return, per layer (2 C,), means and standard deviations of its output channels over a client's rows."""

    def of_images(x):
        inputs = [y.reshape(len(y), -1, y.shape[-1]) for y in client.model.norm_inputs(w.params, w.stats, x)]
        return [(y.mean(1), y.var(1)) for y in inputs]

    real = jnp.arange(len(client.rows), dtype=jnp.int32) < client.size

    def pooled(mean, variance):
        m = mean.mean(0, where=real[:, None])
        v = variance.mean(0, where=real[:, None]) + mean.var(0, where=real[:, None])
        return jnp.concatenate([m, jnp.sqrt(v)])

    return tuple(pooled(*layer) for layer in fl.sweep(of_images, client.rows, client.size, client.federation))


def distances(layers: tuple[jax.Array, ...]):
    """Return d_ij (n, n) of clients with moments (n, 2 C) of each layer."""

    def to_all(of_client):
        return sum(
            jnp.sqrt(jnp.square(one[None] - of_all).sum(1))
            for one, of_all in zip(of_client, layers, strict=True)
        )

    return jax.lax.map(to_all, layers)


def require_inputs(model: fl.Model) -> None:
    """Raise `JaxflError` if a network has no layers to compare."""
    weights = model.form
    if not jax.eval_shape(model.norm_inputs, *weights, model.examples()):
        raise fl.JaxflError(
            f"fedap compares outputs of layers, but {model.name} has neither convolutions nor hidden dense "
            "layers that jaxfl knows; choose another model."
        )


def build(config: FedAP) -> fl.Algorithm:
    """Visit the clients, compare, mix and train."""

    def init(key, federation, hyper):
        group, n = federation.group, len(federation.group.id)
        require_inputs(group.model)
        alike = closeness(jnp.ones((n, n)), group.newcomer)
        return State(hyper, fl.own_models.start(key, federation), alike)

    def closeness(d, newcomer):
        """Return 1/d_ij (n, n), rows that sum to 1, 0 for the client itself and for newcomers (n,)."""
        d = jnp.where(newcomer[:, None], 1, jnp.maximum(d, 1e-8))
        near = jnp.where(jnp.eye(len(d), dtype=bool) | newcomer[None], 0, 1 / d)
        return near / jnp.maximum(near.sum(1, keepdims=True), 1e-8)

    def prepare(key, state, federation, cohort):
        """Make the passes, and measure the matrix."""
        hyper, passes = state.hyper, cohort.rounds // 2 if config.passes is None else config.passes
        clients = len(federation.group.id)

        def trained(key, client, w):
            rows = held_out_rows(client, hyper)
            return fl.descend(fl.task_loss(client.model), w, key, rows, hyper, epochs=1).weights

        def visits(key, model):
            def visit(key, client, w, nothing):
                return trained(key, client, w), None

            return fl.visit_clients(visit, model, key, federation, cohort)[0]

        def averaged(key, model):
            def of_client(key, client, w, nothing):
                return trained(key, client, w), part(client, hyper).astype(federation.mean.dtype)

            sent, held_out = fl.map_clients(of_client, key, federation, cohort, model)
            return fl.tree.weighted_mean(sent, held_out, model)

        once = averaged if config.pretraining == "fedavg" else visits
        model = jax.tree.map(lambda leaf: leaf[0], state.weights)
        model = fl.fori_loop(0, passes, lambda t, model: once(jax.random.fold_in(key, t), model), model)

        def seen(key, client, w, nothing):
            return moments(client, w)[-1 if config.layers == "last" else 0 :]

        found = fl.map_clients(seen, key, federation, cohort, model)
        blank = tuple(jnp.zeros((clients, *layer.shape[1:]), layer.dtype) for layer in found)
        near = closeness(distances(fl.scatter(blank, cohort, found)), federation.group.newcomer)
        # Up: the model after each visit, and the moments. Down: the model before each visit, and at the end.
        present, size = cohort.slots.mask.astype(jnp.int32), fl.tree.scalars(model)
        up = {size: passes * present, fl.tree.scalars(fl.tree.one(found)): present}
        loss = jnp.zeros_like(fl.cohort_rows(federation, cohort))
        info = fl.Info(loss, up, {size: (passes + 1) * present})
        return State(hyper, fl.tree.repeat(model, clients), near), info

    def weights(state, i, j):
        """Return W (k, m) for clients in these places, rows that sum to 1."""
        mu, near = state.hyper.mu, fl.mixing.pairs(state.closeness, i, j)
        oneself = (i[:, None] == j[None]).astype(near.dtype)
        return fl.mixing.row_stochastic(mu * oneself + (1 - mu) * near, i, j)

    def mixed(state, federation, cohort):
        """Return the models that a cohort's clients start from (k, ...)."""
        model, newcomer = federation.group.model, federation.group.newcomer
        # A newcomer is in nobody's mixture: its place is none of these.
        everyone = jnp.where(newcomer, fl.NOBODY, jnp.arange(len(newcomer), dtype=jnp.int32))
        c = weights(state, fl.mixing.places(cohort.slots), everyone)
        kept, _ = fl.tree.split(fl.gather(state.weights, cohort), fl.norms(model))
        _, sent = fl.tree.split(state.weights, fl.norms(model))
        return fl.tree.combine(kept, fl.tree.weighted_sum(c, sent))

    def receive(key, state, federation, cohort):
        return fl.own_models.predictor(mixed(state, federation, cohort))

    def step(key, state, federation, cohort):
        start = mixed(state, federation, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, start, state.hyper, other_rows)
        _, sent = fl.tree.split(fl.tree.one(trained), fl.norms(federation.group.model))
        up, down = fl.sent_up(cohort, sent), fl.sent_down(cohort, sent)
        state = state._replace(weights=fl.scatter(state.weights, cohort, trained))
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictor(trained))

    def matrices(state):
        everyone = jnp.arange(len(state.closeness), dtype=jnp.int32)
        return {"mixture": weights(state, everyone, everyone)}

    one = fl.Algorithm(init, receive, step, fl.own_models.personal, matrices=matrices, prepare=prepare)
    return fl.each_architecture(one)


fedap = fl.Method("fedap", build, FedAP)
