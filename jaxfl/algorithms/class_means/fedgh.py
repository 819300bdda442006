"""FedGH: clients of any architecture share a classifier, which the server trains on their class means.

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

from jaxfl.authoring import (
    Algorithm,
    Cohort,
    Examples,
    Federation,
    Info,
    JaxflError,
    Method,
    Model,
    PerGroup,
    Predictor,
    Training,
    Weights,
    arrays,
    class_means,
    cross_entropy,
    descend,
    each_client,
    gather,
    initial_weights,
    map_clients,
    options,
    own_models,
    own_rows,
    per_group,
    require_plain_head,
    scatter,
    sent_down,
    within,
)
from jaxfl.core.streams import SERVER
from jaxfl.mechanisms.mixing import ids


@options
class FedGH(Training):
    """Options of FedGH."""

    server_epochs: int = within("[0, inf)", 100)
    """R, the server's passes over the round's class means."""
    server_lr: float = within("(0, inf)", 0.01)
    """Learning rate of the header on the server."""


class State(NamedTuple):
    """The extractors theta per group (n_g, ...), and the header H for all."""

    hyper: FedGH
    extractors: PerGroup
    header: dict


def build(config: FedGH) -> Algorithm:
    """Train own extractors under one header."""

    def init(key, federation, hyper):
        class_means.require(federation)
        for model in federation.models:
            require_plain_head(model)
        initial = initial_weights(key, federation)
        headers = per_group(header, federation.models, initial)
        if len({str(jax.tree.map(jnp.shape, of_group)) for of_group in headers}) > 1:
            raise JaxflError(
                "fedgh has one classifier for all models, but theirs have different parameters; end your own "
                "models with a linear layer (jaxfl.models.blocks.Linear, or Flax's)."
            )
        extractors = per_group(extractor, federation.models, initial)
        return State(hyper, each_client(key, extractors, federation), headers[0])

    def personal(key, state, federation, cohort):
        own = gather(state.extractors, cohort)
        return per_group(lambda theta: Predictor(state.header, theta, predict), own)

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, h, theta):
            model, rows = client.model, own_rows(client, federation, hyper)
            trained = descend(cross_entropy(model), joined(model, h, theta), key, rows, hyper)
            z = class_means.of_client(trained.weights, client, federation)
            return trained.weights, trained.loss, trained.steps == 0, z

        h = (state.header,) * len(federation.groups)
        own = gather(state.extractors, cohort)
        trained, loss, idle, z = zip(*map_clients(client, key, federation, cohort, h, own), strict=True)
        theta = per_group(extractor, federation.models, trained)
        return State(
            hyper,
            scatter(state.extractors, cohort, theta),
            train_header(key, state.header, examples_of(z, federation, cohort), federation.models[0], hyper),
        ), Info(
            loss,
            up=class_means.scalars(z, beside=1),
            down=sent_down(cohort, h),
            trained=own_models.predictors(trained),
            idle=idle,
        )

    return Algorithm(init, personal, step, personal)


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


def examples_of(means: PerGroup, federation: Federation, cohort: Cohort) -> Examples:
    """Return the pairs (z_ic, c) of a round, sorted by client id and class."""
    z, n = (jnp.concatenate(parts) for parts in zip(*means, strict=True))  # (K, C, d), (K, C)
    classes = n.shape[1]
    i, c = jnp.concatenate(ids(federation, cohort))[:, None], jnp.arange(classes, dtype=jnp.int32)[None]
    rank = jnp.where(n > 0, i * classes + c, jnp.iinfo(jnp.int32).max)
    order = jnp.argsort(rank.reshape(-1)).astype(jnp.int32)
    return arrays(z.reshape(len(order), -1)[order], order % classes, (n > 0).sum(dtype=jnp.int32))


def train_header(key, h, examples: Examples, model: Model, hyper: FedGH):
    """Return H after the server's epochs, trained as the head of any one of the models."""
    (name,) = model.head.names
    trained = descend(
        cross_entropy(model.head),
        Weights({name: h}, {name: {}}),
        jax.random.fold_in(key, SERVER),
        examples,
        dataclasses.replace(hyper, clip_norm=None),
        epochs=hyper.server_epochs,
        optimizer=optax.sgd(hyper.server_lr),
    )
    return header(model, trained.weights)


fedgh = Method(
    "fedgh",
    build,
    FedGH,
    "own extractors under one classifier for all architectures, trained by the server on class means",
    "Yi et al. 2023, arXiv:2303.13137",
    """@inproceedings{yi2023fedgh,
  title={{FedGH}: Heterogeneous Federated Learning with Generalized Global Header},
  author={Yi, Liping and Wang, Gang and Liu, Xiaoguang and Shi, Zhuan and Yu, Han},
  booktitle={ACM MM}, year={2023}}""",
    needs=("features",),
)
