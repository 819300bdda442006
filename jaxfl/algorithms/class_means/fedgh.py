"""FedGH: own extractors under one classifier for all architectures, trained by the server on class means.

Yi et al. 2023, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM,
arXiv:2303.13137, Algorithm 1. theta_i is client i's extractor. H is the header: one linear classifier for all
architectures, which have equally many features. z_ic is the mean of client i's features over its training
rows of class c, S_t the cohort:

    theta_i <- that of LocalSGD over CE(theta_i, H)               E epochs of the whole model
    z_ic     = mean of theta_i(x) over client i's rows of class c, in evaluation mode
    H       <- SGD over CE(H(z_ic), c)                            i in S_t, R epochs

In every round all clients start from the same H; the first H is the initial classifier of the first
architecture. A client's trained H is discarded; it deploys (theta_i, H) with the newest H. The server trains
as in HtFLlib, by plain SGD with the clients' batch size. In the paper's own code the server steps the
optimiser of a client's network, so H never moves.

Traffic: up z_ic and c for each class of the client; down H.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class FedGH(fl.Training):
    """Options of FedGH."""

    server_epochs: int = fl.within("[0, inf)", 100)
    """R, the server's passes over the round's class means."""
    server_lr: float = fl.within("(0, inf)", 0.01)
    """Learning rate of the header on the server."""


class State(NamedTuple):
    """The extractors theta per group (n_g, ...), and the header H for all."""

    hyper: FedGH
    extractors: fl.PerGroup
    header: dict


def build(config: FedGH) -> fl.Algorithm:
    """Train own extractors under one header."""

    def init(key, federation, hyper):
        fl.class_means.require(federation)
        for model in federation.models:
            fl.require_plain_head(model)
        initial = fl.initial_weights(key, federation)
        headers = fl.per_group(header, federation.models, initial)
        if len({str(jax.tree.map(jnp.shape, of_group)) for of_group in headers}) > 1:
            raise fl.JaxflError(
                "fedgh has one classifier for all models, but theirs have different parameters; end your own "
                "models with a linear layer (jaxfl.models.blocks.Linear, or Flax's)."
            )
        extractors = fl.per_group(extractor, federation.models, initial)
        return State(hyper, fl.each_client(key, extractors, federation), headers[0])

    def personal(key, state, federation, cohort):
        own = fl.gather(state.extractors, cohort)
        return fl.per_group(lambda theta: fl.Predictor(state.header, theta, predict), own)

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, h, theta):
            model, rows = client.model, fl.own_rows(client, hyper)
            trained = fl.descend(fl.task_loss(model), joined(model, h, theta), key, rows, hyper)
            z = fl.class_means.of_client(key, trained.weights, client)
            return trained.weights, trained.loss, trained.steps == 0, z

        h = (state.header,) * len(federation.groups)
        own = fl.gather(state.extractors, cohort)
        trained, loss, idle, z = zip(*fl.map_clients(client, key, federation, cohort, h, own), strict=True)
        theta = fl.per_group(extractor, federation.models, trained)
        return State(
            hyper,
            fl.scatter(state.extractors, cohort, theta),
            train_header(key, state.header, examples_of(z, federation, cohort), federation.models[0], hyper),
        ), fl.Info(
            loss,
            up=fl.class_means.up(federation, z, beside=1),
            down=fl.sent_down(cohort, h),
            trained=fl.own_models.predictors(trained),
            idle=idle,
        )

    return fl.Algorithm(init, personal, step, personal, wire=("messages",))


def header(model, w):
    """Return the parameters of a model's classifier."""
    (name,) = model.head.names
    return w.params[name]


def extractor(model, w):
    """Return a model without its classifier."""
    return w._replace(params={name: w.params[name] for name in model.body.names})


def joined(model, h, theta):
    """Return the model (theta, H)."""
    (name,) = model.head.names
    return theta._replace(params=theta.params | {name: h})


def predict(model, h, theta, x):
    """Return the logits of (theta, H)."""
    w = joined(model, h, theta)
    return model.apply(w.params, w.stats, x, train=False)[0]


def examples_of(means: fl.PerGroup, federation: fl.Federation, cohort: fl.Cohort) -> fl.Examples:
    """Return the pairs (z_ic, c) of a round, sorted by client id and class."""
    z, n = (jnp.concatenate(parts) for parts in zip(*means, strict=True))  # (K, C, d), (K, C)
    classes = n.shape[1]
    i, c = (
        jnp.concatenate(fl.mixing.ids(federation, cohort))[:, None],
        jnp.arange(classes, dtype=jnp.int32)[None],
    )
    rank = jnp.where(n > 0, i * classes + c, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(rank.reshape(-1)).astype(jnp.int32)
    return fl.arrays(z.reshape(len(order), -1)[order], order % classes, (n > 0).sum(dtype=jnp.int32))


def train_header(key, h, examples: fl.Examples, model: fl.Model, hyper: FedGH):
    """Return H after the server's epochs, trained as the head of any one of the models."""
    (name,) = model.head.names
    trained = fl.descend(
        fl.task_loss(model.head),
        fl.Weights({name: h}, {name: {}}),
        jax.random.fold_in(key, fl.streams.SERVER),
        examples,
        dataclasses.replace(hyper, clip_norm=None),
        epochs=hyper.server_epochs,
        optimizer=optax.sgd(hyper.server_lr),
    )
    return header(model, trained.weights)


fedgh = fl.Method("fedgh", build, FedGH, needs=("features", "classes"))
