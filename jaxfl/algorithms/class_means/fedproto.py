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

from jaxfl.authoring import (
    Algorithm,
    Info,
    Method,
    Model,
    PerGroup,
    Predictor,
    Training,
    class_means,
    descend,
    gather,
    map_clients,
    mean,
    options,
    own_models,
    own_rows,
    per_group,
    scatter,
    sent_down,
    within,
)
from jaxfl.mechanisms.class_means import ClassMeans


@options
class FedProto(Training):
    """Options of FedProto."""

    lam: float = within("[0, inf)", 1.0)
    """lambda, the pull towards the prototypes; 0 is Local."""
    uniform: bool = False
    """Weight clients with a class uniformly, as in the paper's code, not by their rows of it."""
    predict: Literal["head", "nearest"] = "head"
    """Prediction of deployed models: by their classifier, or by the nearest prototype."""


class State(NamedTuple):
    """The clients' models per group (n_g, ...), and the prototypes g."""

    hyper: FedProto
    weights: PerGroup
    prototypes: ClassMeans


def build(config: FedProto) -> Algorithm:
    """Train own models, and share only class means."""

    def deployed(weights, g):
        if config.predict == "head":
            return own_models.predictors(weights)
        return per_group(lambda w: Predictor(g, w, nearest), weights)

    def init(key, federation, hyper):
        class_means.require(federation)
        return State(hyper, own_models.start(key, federation), class_means.unknown(federation))

    def personal(key, state, federation, cohort):
        return deployed(gather(state.weights, cohort), state.prototypes)

    def step(key, state, federation, cohort):
        hyper, g = state.hyper, state.prototypes

        def client(key, client, nothing, w):
            loss = objective(client.model, g, hyper.lam)
            trained = descend(loss, w, key, own_rows(client, federation, hyper), hyper)
            z = class_means.of_client(trained.weights, client, federation)
            return trained.weights, trained.loss, trained.steps == 0, z

        own = gather(state.weights, cohort)
        trained, loss, idle, z = zip(*map_clients(client, key, federation, cohort, own=own), strict=True)
        message = g.z.shape[1] + 1
        down = sent_down(cohort, (message,) * len(federation.groups))
        return State(
            hyper,
            scatter(state.weights, cohort, trained),
            class_means.over_clients(z, g, config.uniform),
        ), Info(
            loss,
            up=class_means.scalars(z, beside=1 if config.uniform else 2),
            down=per_group(lambda of_one: of_one * g.known.sum(dtype=jnp.int32), down),
            trained=deployed(trained, g),
            idle=idle,
        )

    return Algorithm(init, personal, step, personal)


def objective(model: Model, g: ClassMeans, lam):
    """Return the loss CE(w) + lam MSE(z, g_y), in the form that `descend` takes."""

    def loss(w, batch, key):
        z, stats = model.body.apply(w.params, w.stats, batch.x, train=True, key=key, mask=batch.mask)
        logits, of_head = model.head.apply(w.params, w.stats, z, train=True, key=key, mask=batch.mask)
        value = mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch.y), batch)
        away = jnp.square(z - g.z[batch.y]).mean(1)
        return value + lam * mean(jnp.where(g.known[batch.y], away, 0), batch), w.stats | stats | of_head

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


fedproto = Method(
    "fedproto",
    build,
    FedProto,
    "clients of any architecture pull their features towards the same prototype of every class",
    "Tan et al. 2022, arXiv:2105.00243",
    """@inproceedings{tan2022fedproto,
  title={{FedProto}: Federated Prototype Learning across Heterogeneous Clients},
  author={Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing and
          Zhang, Chengqi},
  booktitle={AAAI}, year={2022}}""",
    needs=("features",),
)
