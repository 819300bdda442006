"""FedProto: clients of any architecture pull their features towards the same prototype of every class.

Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients", arXiv:2105.00243,
Algorithm 1. z = f_i(x) are the features that client i's classifier gets, equally many for all architectures.
n_ic is the number of its training rows of class c, g_c the prototype of class c, S_t the cohort:

    w_i  <- LocalSGD over CE(w_i) + lam mean MSE(z, g_y)          E epochs
    z_ic  = mean of f_i(x) over client i's rows of class c
    g_c  <- sum_i n_ic z_ic / sum_i n_ic                          over the clients of S_t that have c

lam is the paper's lambda. As in its code every row is pulled, MSE is the mean over the features, and a row
whose class has no prototype yet adds 0. The code takes z_ic from the batches of the last local epoch, while
the model still moves; here one more pass in evaluation mode follows. The code forgets a class that nobody in
S_t has; here its last prototype stays. A client deploys w_i with its own classifier; `predict="nearest"`
predicts by the nearest of the newest prototypes, as in the paper.

Traffic: up z_ic, c and (if not `uniform`) n_ic for each class of the client; down each g_c and c.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class FedProto(fl.Training):
    """Options of FedProto."""

    lam: float = fl.within("[0, inf)", 1.0)
    """lambda, the pull towards the prototypes; 0 is Local."""
    uniform: bool = False
    """Weight clients with a class uniformly, as in the paper's code, not by their rows of it."""
    predict: Literal["head", "nearest"] = "head"
    """Prediction of deployed models: by their classifier, or by the nearest prototype."""


class State(NamedTuple):
    """The clients' models per group (n_g, ...), and the prototypes g."""

    hyper: FedProto
    weights: fl.PerGroup
    prototypes: fl.class_means.ClassMeans


def build(config: FedProto) -> fl.Algorithm:
    """Train own models, and share only class means."""

    def deployed(weights, g):
        if config.predict == "head":
            return fl.own_models.predictors(weights)
        return fl.per_group(lambda w: fl.Predictor(g, w, nearest), weights)

    def init(key, federation, hyper):
        fl.class_means.require(federation)
        return State(hyper, fl.own_models.start(key, federation), fl.class_means.unknown(federation))

    def personal(key, state, federation, cohort):
        return deployed(fl.gather(state.weights, cohort), state.prototypes)

    def step(key, state, federation, cohort):
        hyper, g = state.hyper, state.prototypes

        def client(key, client, nothing, w):
            loss = objective(client.model, g, hyper.lam)
            trained = fl.descend(loss, w, key, fl.own_rows(client, hyper), hyper)
            z = fl.class_means.of_client(key, trained.weights, client)
            return trained.weights, trained.loss, trained.steps == 0, z

        own = fl.gather(state.weights, cohort)
        trained, loss, idle, z = zip(*fl.map_clients(client, key, federation, cohort, own=own), strict=True)
        message = g.z.shape[1] + 1
        down = fl.sent_down(cohort, (message,) * len(federation.groups))
        return State(
            hyper,
            fl.scatter(state.weights, cohort, trained),
            fl.class_means.over_clients(z, g, config.uniform),
        ), fl.Info(
            loss,
            up=fl.class_means.up(federation, z, beside=1 if config.uniform else 2),
            down=fl.per_group(lambda of_one: of_one * g.known.sum(dtype=jnp.int32), down),
            trained=deployed(trained, g),
            idle=idle,
        )

    return fl.Algorithm(init, personal, step, personal, wire=("messages",))


def objective(model: fl.Model, g: fl.class_means.ClassMeans, lam):
    """Return the loss CE(w) + lam MSE(z, g_y), in the form that `descend` takes."""

    def loss(w, batch, key):
        z, stats = model.body.apply(w.params, w.stats, batch.x, train=True, key=key, mask=batch.mask)
        logits, of_head = model.head.apply(w.params, w.stats, z, train=True, key=key, mask=batch.mask)
        value = fl.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch)
        away = jnp.square(z - g.z[batch.y]).mean(1)
        return value + lam * fl.mean(jnp.where(g.known[batch.y], away, 0), batch), w.stats | stats | of_head

    return loss


def nearest(model, g, w, x):
    """Return -||z - g_c||^2 per class c (B, C), or the least finite number if c has no prototype."""
    z, _ = model.body.apply(w.params, w.stats, x, train=False)
    # Centred: features far from 0 have squares whose leading digits are the same.
    centre = g.z.sum(0) / jnp.maximum(g.known.sum(), 1).astype(g.z.dtype)
    z, prototypes = z - centre[None], g.z - centre[None]
    products = jnp.matmul(z, prototypes.T, precision="highest")
    away = jnp.square(z).sum(1)[:, None] - 2 * products + jnp.square(prototypes).sum(1)[None]
    return jnp.where(g.known[None], -away, jnp.finfo(away.dtype).min)


fedproto = fl.Method("fedproto", build, FedProto, needs=("features", "classes"))
