"""FedRoD: a generic head trained on balanced softmax, and a personal head on what remains.

Chen and Chao 2022, arXiv:2107.00778, section 4 (linear personal head). f is the extractor, G the generic
and P_i the personal head, n_ic client i's training rows of class c. For each batch, z = f(x):

    L_G = CE(G(z) + gamma log n_ic, y)             gradient to f and G
    L_P = CE(stop(G(z)) + P_i(stop(z)), y)         gradient to P_i alone
    f, G <- sum_i n_i (f_i, G_i) / sum_i n_i

The deployed prediction is G(z) + P_i(z), the received one as well, with the newest f and G. P_i starts as a
copy of G. A class that a client lacks has log 0 = -inf: it drops out of the normaliser.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import tree
from jaxfl.clientmap import gather, map_clients, per_group, scatter, sent, sizes
from jaxfl.options import options, within
from jaxfl.training import Training, descend, initial_weights, mean
from jaxfl.types import Algorithm, Info, Method, PerGroup, Predictor


@options
class FedRoD(Training):
    """Options of FedRoD."""

    gamma: float = within("[0, inf)", 1.0)
    """Exponent of the class counts in balanced softmax; 0 is plain cross-entropy."""


class State(NamedTuple):
    """Per group: f and G, shared; and (n_g, ...) the personal heads and local statistics."""

    hyper: FedRoD
    shared: PerGroup
    kept: PerGroup


def build(config: FedRoD) -> Algorithm:
    """A model with one more block, "personal": the second head."""

    def divide(weights):
        """(kept, shared) leaves."""
        return tree.split(
            weights,
            lambda path: path[1] == "personal"
            or (path[0] == "stats" and config.bn_stats == "local"),
        )

    def two_heads(model, log_counts):
        def loss(weights, batch, key):
            params, stats = weights
            z, new_stats = model.body.apply(
                params, stats, batch.x, train=True, key=key, mask=batch.mask
            )
            generic = _generic(model, params, z)
            personal = jax.lax.stop_gradient(generic) + _personal(
                model, params, jax.lax.stop_gradient(z)
            )
            loss_of = optax.softmax_cross_entropy_with_integer_labels
            value = mean(
                loss_of(generic + log_counts[None], batch.y) + loss_of(personal, batch.y), batch
            )
            return value, stats | new_stats

        return loss

    def init(key, federation, hyper):
        def with_personal(weights, model):
            params, (head,) = weights.params, model.head.names
            return divide(weights._replace(params=params | {"personal": params[head]}))

        initial = per_group(with_personal, initial_weights(key, federation), federation.models)
        kept, shared = zip(*initial, strict=True)
        kept = per_group(lambda group, k: tree.stack(k, len(group.id)), federation.groups, kept)
        return State(hyper, shared, kept)

    def predictors(key, state, federation, cohort):
        return per_group(
            lambda shared, kept: Predictor(shared, kept, predict),
            state.shared,
            gather(state.kept, cohort),
        )

    def step(key, state, federation, cohort):
        def client(key, client, shared, kept):
            weights = tree.combine(shared, kept)
            counts = client.class_counts.astype(federation.mean.dtype)
            # A large negative number stands for log 0: -inf times gamma = 0 would be NaN.
            log_counts = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1)), -1e9)
            weights, loss = descend(
                two_heads(client.model, state.hyper.gamma * log_counts),
                weights,
                jax.random.fold_in(key, 0),
                client,
                federation,
                state.hyper,
                blocks=(*client.model.names, "personal"),
                epochs=config.epochs,
            )
            return *divide(weights), loss

        own = gather(state.kept, cohort)
        outputs = map_clients(client, key, federation, cohort, state.shared, own)
        kept, shared, loss = zip(*outputs, strict=True)
        traffic = sent(cohort, state.shared)
        return State(
            state.hyper,
            per_group(tree.weighted_mean, shared, sizes(federation, cohort), state.shared),
            scatter(state.kept, cohort, kept),
        ), Info(loss, up=traffic, down=traffic)

    return Algorithm(init, predictors, step, predictors)


def _generic(model, params, z):
    return model.head.apply(params, {}, z, train=True)[0]


def _personal(model, params, z):
    (head,) = model.head.names
    return model.head.apply({head: params["personal"]}, {}, z, train=True)[0]


def predict(model, shared, own, x):
    """G(z) + P_i(z)."""
    params, stats = tree.combine(shared, own)
    z, _ = model.body.apply(params, stats, x, train=False)
    return _generic(model, params, z) + _personal(model, params, z)


fedrod = Method(
    "fedrod",
    build,
    FedRoD,
    "a generic head on balanced softmax, a personal head on the rest",
    "Chen and Chao 2022, arXiv:2107.00778",
    """@inproceedings{chen2022bridging,
  title={On Bridging Generic and Personalized Federated Learning for Image Classification},
  author={Chen, Hong-You and Chao, Wei-Lun},
  booktitle={ICLR}, year={2022}}""",
)
