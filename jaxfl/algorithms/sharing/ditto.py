"""Ditto: FedAvg, and beside it a personal model pulled towards the global one.

Li et al. 2021, arXiv:2012.04221, Algorithm 1. w is the global model, v_i client i's own:

    v_i <- SGD over CE(v_i) + lam/2 ||v_i - w||^2, E_p epochs; w as received
    w_i <- LocalSGD(w), E epochs
    w   <- sum_i n_i w_i / sum_i n_i

lam is the paper's lambda. v_i starts from the initial w and moves only when client i takes part. What a
client receives is w; what it deploys is v_i.
"""

from typing import Any, NamedTuple

import jax
import optax

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group, scatter
from jaxfl.core.protocol import Algorithm, Method, Phase, Predictor, jointly
from jaxfl.core.training import Training, cross_entropy, descend, initial_weights
from jaxfl.data.federation import PerGroup
from jaxfl.mechanisms.sharing import partial_sharing, predict
from jaxfl.models.model import Model


@options
class Ditto(Training):
    """Options of Ditto."""

    lam: float = within("[0, inf)", 1.0)
    """lambda, the pull towards the global model; 0 leaves the personal models alone (Local)."""
    personal_epochs: int = within("[1, inf)", 5)
    """E_p, epochs of the personal model."""


class State(NamedTuple):
    """FedAvg's state, and per group the personal models v (n_g, ...)."""

    fedavg: Any
    personal: PerGroup


def phases(config: Ditto, model: Model) -> tuple[Phase, ...]:
    """The personal model, then FedAvg's."""
    return Phase(model.names, config.personal_epochs, personal=True), *jointly(config, model)


def build(config: Ditto) -> Algorithm:
    """FedAvg for w, a proximal local training for v."""
    fedavg = partial_sharing(config, keep=lambda model: ())

    def proximal(model, w, lam):
        plain = cross_entropy(model, model.names)

        def loss(v, batch, key):
            value, stats = plain(v, batch, key)
            distance = optax.tree.norm(optax.tree.sub(v.params, w.params), squared=True)
            return value + lam / 2 * distance, stats

        return loss

    def init(key, federation, hyper):
        personal = per_group(
            lambda weights, group: tree.stack(weights, len(group.id)),
            initial_weights(key, federation),
            federation.groups,
        )
        return State(fedavg.init(key, federation, hyper), personal)

    def receive(key, state, federation, cohort):
        return fedavg.receive(key, state.fedavg, federation, cohort)

    def step(key, state, federation, cohort):
        hyper, w = state.fedavg.hyper, state.fedavg.shared

        def client(key, client, w, v):
            model, key = client.model, jax.random.fold_in(key, 1)
            objective, epochs = proximal(model, w, hyper.lam), config.personal_epochs
            return descend(objective, v, key, client, federation, hyper, blocks=model.names, epochs=epochs)[0]

        own = gather(state.personal, cohort)
        trained = map_clients(client, key, federation, cohort, w, own)
        personal = scatter(state.personal, cohort, trained)
        averaged, info = fedavg.step(key, state.fedavg, federation, cohort)
        return State(averaged, personal), info

    def personal(key, state, federation, cohort):
        own = gather(state.personal, cohort)
        return per_group(lambda v: Predictor(None, v, predict), own)

    return Algorithm(init, receive, step, personal)


ditto = Method(
    "ditto",
    build,
    Ditto,
    "FedAvg, and personal models pulled towards the global one",
    "Li et al. 2021, arXiv:2012.04221",
    """@inproceedings{li2021ditto,
  title={Ditto: Fair and Robust Federated Learning Through Personalization},
  author={Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle={ICML}, year={2021}}""",
    phases,
)
