"""The mechanism of FedAvg and of all methods that share a model or a part of it.

Round t, every client i of the cohort S_t with n_i training rows, s the shared and p_i the kept leaves:

    (s_i, p_i) <- LocalSGD(s, p_i)                 phases: which blocks train, for how many epochs
    s          <- sum_i n_i s_i / sum_i n_i        per architecture

A method says where it differs: which leaves are kept, the phases, what is fine-tuned before use, the loss
(which sees the weights as received), or a `Memory` of clients and server that corrects gradients and
averages.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxfl.config.options import options, within
from jaxfl.core import tree
from jaxfl.core.client_map import gather, map_clients, per_group, scatter, sent_down, sent_up, upload_weights
from jaxfl.core.examples import own_rows
from jaxfl.core.protocol import Algorithm, Info, Predictor
from jaxfl.core.training import Training, cross_entropy, descend, initial_weights
from jaxfl.data.federation import Client, PerGroup
from jaxfl.models.model import Model, Weights


class Phase(NamedTuple):
    """A part of a client's round: some blocks train while the others stand still."""

    blocks: tuple[str, ...]
    epochs: int


Phases = Callable[[Model], tuple[Phase, ...]]  # the phases of local training, in order
Keep = Callable[[Model], Callable[[tuple[str, ...]], bool]]  # whether a leaf stays on its client, by its path


class Local(NamedTuple):
    """What a client has in hand when its local training begins.

    Args:
      client: its data and its model.
      received: the model it starts from: what was received, and what it kept.
      memory: what it remembers, see `Memory`; None without.
      broadcast: what the server tells beside the model, see `Memory`; None without.
      hyper: the method's options.
    """

    client: Client
    received: Weights
    memory: Any
    broadcast: Any
    hyper: Any


class Uploads(NamedTuple):
    """What the server gets from the cohort's clients of one architecture.

    Args:
      models: the shared leaves after local training, (k, ...).
      messages: what `Memory.update` sends, (k, ...).
      rows: (k,) float, training rows; 0 in an empty place.
      clients: of this architecture in the federation.
    """

    models: Weights
    messages: Any
    rows: jax.Array
    clients: int

    @property
    def present(self) -> jax.Array:
        """(k,) float, 1 for a client and 0 for an empty place: weights of a uniform mean."""
        return (self.rows > 0).astype(self.rows.dtype)


def nothing(*_) -> None:
    """No memory, no message, no correction."""


def mean_by_rows(shared: Weights, server: Any, uploads: Uploads, hyper: Any) -> tuple[Weights, Any]:
    """FedAvg: sum_i n_i s_i / sum_i n_i."""
    return tree.weighted_mean(uploads.models, uploads.rows, shared), server


class Memory(NamedTuple):
    """What a method remembers beside the model, and what it does with it (FedDyn, SCAFFOLD).

    Args:
      client: shared leaves -> what a client remembers at the start.
      server: shared leaves -> what the server remembers at the start.
      broadcast: the server's memory -> the part of it that clients receive with the model.
      correct: ``Local -> optax.GradientTransformation``, of gradients before the optimiser; None for none.
      update: ``(Local, trained weights, steps) -> (the client's new memory, its message to the server)``.
      aggregate: ``(shared, server, Uploads, hyper) -> (shared, server)``; not called for nobody.
    """

    client: Callable = nothing
    server: Callable = nothing
    broadcast: Callable = nothing
    correct: Callable = nothing
    update: Callable = lambda local, trained, steps: (None, None)
    aggregate: Callable = mean_by_rows


class State(NamedTuple):
    """What lives between rounds, per group; None in the place of leaves that are elsewhere.

    Args:
      hyper: the method's options.
      shared: what all clients share.
      kept: what each keeps (n_g, ...).
      memory: what each remembers (n_g, ...).
      server: what the server remembers.
    """

    hyper: Any
    shared: PerGroup
    kept: PerGroup
    memory: PerGroup
    server: PerGroup


@options
class FineTuning(Training):
    """Options of methods that fine-tune a copy of the model before they use it."""

    ft_epochs: int | None = within("[0, inf)", 0)
    """Epochs of fine-tuning, on a copy, before the model is used; never uploaded. None: E."""
    ft_part: Literal["head", "all"] = "all"
    """What is fine-tuned."""


def fine_tuning(config: FineTuning) -> Phases | None:
    """The phases that `ft_part` and `ft_epochs` describe; None for 0 epochs."""
    epochs = config.epochs if config.ft_epochs is None else config.ft_epochs
    if epochs == 0:
        return None
    return lambda model: (Phase(model.head.names if config.ft_part == "head" else model.names, epochs),)


def no_leaf(model: Model) -> Callable:
    """Keep nothing: all is shared."""
    return lambda path: False


def every_leaf(model: Model) -> Callable:
    """Keep all: nothing is shared."""
    return lambda path: True


def head(model: Model) -> Callable:
    """Keep the head."""
    return lambda path: path[1] in model.head.names


def body(model: Model) -> Callable:
    """Keep the extractor."""
    return lambda path: path[1] in model.body.names


def separate(weights: Weights, keep: Callable, bn_stats: str) -> tuple[Weights, Weights]:
    """(kept, shared) leaves, None in the other's places.

    Args:
      weights: of a model.
      keep: whether a leaf stays, by its path ``("params" or "stats", block, ..., leaf)``. BatchNorm's running
        statistics go with their layer.
      bn_stats: "local" keeps all of these.
    """
    return tree.split(weights, lambda path: keep(path) or (path[0] == "stats" and bn_stats == "local"))


def predict(model, shared, own, x):
    """Logits of the model whose leaves are partly shared, partly the client's own."""
    weights = tree.combine(shared, own)
    return model.apply(weights.params, weights.stats, x, train=False)[0]


def sharing(
    config: Training,
    keep: Keep = no_leaf,
    *,
    phases: Phases | None = None,
    tune: Phases | None = None,
    extend: Callable = lambda model, weights: weights,
    objective: Callable = lambda local, blocks: cross_entropy(local.client.model, blocks),
    predict: Callable = predict,
    memory: Memory = Memory(),  # noqa: B008
) -> Algorithm:
    """Build a method that shares a model or a part of it.

    Args:
      config: the method's options.
      keep: which leaves never leave a client.
      phases: the local phases of a round; by default all blocks train jointly for `config.epochs`.
      tune: phases that a copy goes through before it is used; it is never uploaded.
      extend: ``(model, weights) -> weights``, adds blocks of the method's own to the initial ones.
      objective: ``(Local, names of the blocks that train) -> loss``, see `jaxfl.core.training.descend`.
      predict: see `Predictor`.
      memory: what clients and server remember.
    """
    phases = phases or (lambda model: (Phase(model.names, config.epochs),))

    def divide(model, weights):
        """(kept, shared)."""
        return separate(weights, keep(model), config.bn_stats)

    def train(key, local, federation, phases):
        """The trained weights, the loss of the last phase, and the number of all steps."""
        rows, weights, steps = own_rows(local.client, federation, local.hyper), local.received, 0
        for number, (blocks, epochs) in enumerate(phases):
            weights, loss, taken, _ = descend(
                objective(local, blocks),
                weights,
                key,
                rows,
                local.hyper,
                blocks=blocks,
                epochs=epochs,
                phase=number,
                correction=memory.correct(local),
            )
            steps = steps + taken
        return weights, loss, steps

    def on_clients(f, key, state, federation, cohort):
        """``f(key, Local)`` for the clients of a cohort."""

        def client(key, client, common, own):
            (shared, broadcast), (kept, remembered) = common, own
            return f(key, Local(client, tree.combine(shared, kept), remembered, broadcast, state.hyper))

        common = tuple(zip(state.shared, map(memory.broadcast, state.server), strict=True))
        own = tuple(zip(gather(state.kept, cohort), gather(state.memory, cohort), strict=True))
        return map_clients(client, key, federation, cohort, common, own)

    def init(key, federation, hyper):
        weights = per_group(extend, federation.models, initial_weights(key, federation))
        kept, shared = zip(*per_group(divide, federation.models, weights), strict=True)

        def of_clients(group, leaves):
            return tree.stack(leaves, len(group.id))

        remembered = per_group(of_clients, federation.groups, tuple(map(memory.client, shared)))
        kept = per_group(of_clients, federation.groups, kept)
        return State(hyper, shared, kept, remembered, tuple(map(memory.server, shared)))

    def receive(key, state, federation, cohort):
        return per_group(
            lambda shared, kept: Predictor(shared, kept, predict),
            state.shared,
            gather(state.kept, cohort),
        )

    def step(key, state, federation, cohort):
        def client(key, local):
            model = local.client.model
            weights, loss, steps = train(key, local, federation, phases(model))
            kept, shared = divide(model, weights)
            remembered, message = memory.update(local, weights, steps)
            return kept, shared, remembered, message, loss

        outputs = on_clients(client, key, state, federation, cohort)
        kept, shared, remembered, messages, loss = zip(*outputs, strict=True)

        def serve(group, before, server, models, messages, rows):
            uploads = Uploads(models, messages, rows, len(group.id))
            after = memory.aggregate(before, server, uploads, state.hyper)
            return tree.where((rows > 0).any(), after, (before, server))

        served = per_group(
            serve,
            federation.groups,
            state.shared,
            state.server,
            shared,
            messages,
            upload_weights(federation, cohort),
        )
        new_shared, new_server = zip(*served, strict=True)
        up = sent_up(cohort, per_group(lambda s, m: (s, tree.one(m)), state.shared, messages))
        down = sent_down(cohort, per_group(lambda s, c: (s, memory.broadcast(c)), state.shared, state.server))
        trained = per_group(lambda s, k: Predictor(None, tree.combine(s, k), predict), shared, kept)
        return State(
            state.hyper,
            new_shared,
            scatter(state.kept, cohort, kept),
            scatter(state.memory, cohort, remembered),
            new_server,
        ), Info(loss, up, down, trained=trained)

    def tuned(key, state, federation, cohort):
        def client(key, local):
            return train(key, local, federation, tune(local.client.model))[0]

        weights = on_clients(client, key, state, federation, cohort)
        return per_group(lambda w: Predictor(None, w, predict), weights)

    return Algorithm(init, receive, step, personal=tuned if tune else receive)
