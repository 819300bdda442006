"""The mechanism of FedAvg and of all methods that share only some blocks of the model.

Round t, every client i of the cohort S_t with n_i training rows, s the shared and p_i the kept leaves:

    (s_i, p_i) <- LocalSGD(s, p_i)                 phases: which blocks train, for how many epochs
    s          <- sum_i n_i s_i / sum_i n_i        per architecture

The methods differ in which blocks are kept, in the phases, and in what is fine-tuned before use.
"""

import functools
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

import jax

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group, scatter, sent, sizes
from jaxfl.core.protocol import Algorithm, Info, Phase, Predictor, jointly
from jaxfl.core.training import Training, cross_entropy, descend, initial_weights
from jaxfl.data.federation import PerGroup
from jaxfl.models.model import Model, Weights

# model -> the phases of local training, in order
Phases = Callable[[Model], tuple[Phase, ...]]


@options
class FineTuning(Training):
    """Options of methods that fine-tune a copy of the model before they use it."""

    ft_epochs: int = within("[0, inf)", 0)
    """Epochs of fine-tuning, on a copy, before the model is used; never uploaded."""
    ft_part: Literal["head", "all"] = "all"
    """What is fine-tuned."""


def fine_tuning(config: FineTuning) -> Phases | None:
    """The phases that `ft_part` and `ft_epochs` describe; None for 0 epochs."""
    if config.ft_epochs == 0:
        return None
    if config.ft_part == "head":
        return lambda model: (Phase(model.head.names, config.ft_epochs),)
    return lambda model: (Phase(model.names, config.ft_epochs),)


def separate(weights: Weights, stays: Collection[str], bn_stats: str) -> tuple:
    """(kept, shared) leaves, None in the other's places.

    Kept are the blocks that stay; BatchNorm statistics go with their block, or stay under
    bn_stats="local".
    """
    return tree.split(weights, lambda path: path[1] in stays or (path[0] == "stats" and bn_stats == "local"))


def predict(model, shared, own, x):
    """Logits of the model whose leaves are partly shared, partly the client's own."""
    weights = tree.combine(shared, own)
    return model.apply(weights.params, weights.stats, x, train=False)[0]


class State(NamedTuple):
    """Per group: what all clients share, and what each keeps (n_g, ...); None in the other's places."""

    hyper: Training
    shared: PerGroup
    kept: PerGroup


def partial_sharing(
    config: Training,
    keep: Callable,
    phases: Phases | None = None,
    tune: Phases | None = None,
    *,
    extend: Callable = lambda model, weights: weights,
    objective: Callable = lambda client, blocks, hyper: cross_entropy(client.model, blocks),
    predict: Callable = predict,
) -> Algorithm:
    """Build a method that shares part of a model.

    Args:
      config: the method's options.
      keep: ``model -> names`` of the blocks that never leave a client.
      phases: the local phases of a round; by default all blocks train jointly for `config.epochs`.
      tune: phases that a copy goes through before it is used; it is never uploaded.
      extend: ``(model, weights) -> weights``, adds blocks of the method's own to the initial ones.
      objective: ``(client, names of the blocks that train, hyper) -> loss``, see `descend`.
      predict: see `Predictor`.
    """
    phases = phases or functools.partial(jointly, config)

    def divide(model, weights):
        """(kept, shared)."""
        return separate(weights, keep(model), config.bn_stats)

    def train(key, client, federation, weights, hyper, phases):
        for number, (blocks, epochs, _) in enumerate(phases):
            phase_key = jax.random.fold_in(key, number)
            loss = objective(client, blocks, hyper)
            weights, value = descend(
                loss, weights, phase_key, client, federation, hyper, blocks=blocks, epochs=epochs
            )
        return weights, value

    def init(key, federation, hyper):
        weights = per_group(extend, federation.models, initial_weights(key, federation))
        kept, shared = zip(*per_group(divide, federation.models, weights), strict=True)
        kept = per_group(lambda group, k: tree.stack(k, len(group.id)), federation.groups, kept)
        return State(hyper, shared, kept)

    def receive(key, state, federation, cohort):
        return per_group(
            lambda shared, kept: Predictor(shared, kept, predict),
            state.shared,
            gather(state.kept, cohort),
        )

    def step(key, state, federation, cohort):
        def client(key, client, shared, kept):
            weights = tree.combine(shared, kept)
            local_phases = phases(client.model)
            weights, loss = train(key, client, federation, weights, state.hyper, local_phases)
            return *divide(client.model, weights), loss

        own = gather(state.kept, cohort)
        outputs = map_clients(client, key, federation, cohort, state.shared, own)
        kept, shared, loss = zip(*outputs, strict=True)
        traffic = sent(cohort, state.shared)
        return State(
            state.hyper,
            per_group(tree.weighted_mean, shared, sizes(federation, cohort), state.shared),
            scatter(state.kept, cohort, kept),
        ), Info(loss, up=traffic, down=traffic)

    def tuned(key, state, federation, cohort):
        def client(key, client, shared, kept):
            weights = tree.combine(shared, kept)
            return train(key, client, federation, weights, state.hyper, tune(client.model))[0]

        own = gather(state.kept, cohort)
        weights = map_clients(client, key, federation, cohort, state.shared, own)
        return per_group(lambda w: Predictor(None, w, predict), weights)

    return Algorithm(init, receive, step, personal=tuned if tune else receive)
