"""The mechanism of FedAvg and of all methods that share a model or a part of it.

In round t, with n_i the training rows of client i in the cohort S_t, s the shared and p_i the kept leaves:

    (s_i, p_i) <- LocalSGD(s, p_i)                 phases: which blocks train, for how many epochs
    s          <- sum_i n_i s_i / sum_i n_i        per architecture; n_i = 1 if weighting is uniform

A method states where it differs: which leaves are kept, how clients train (phases, a loss that sees the
weights as received, a correction of gradients), what is fine-tuned before use, or a `Memory` of clients and
server.
"""

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.config.options import Unread, options, within
from jaxfl.config.own_code import line_of, require_call
from jaxfl.core import tree
from jaxfl.core.batches import Epochs
from jaxfl.core.client_map import cohort_rows, gather, map_clients, scatter
from jaxfl.core.examples import own_rows
from jaxfl.core.initial_weights import each_client, initial_weights
from jaxfl.core.protocol import WIRE, Algorithm, Averaged, Cohort, Info, Predictor, Slots
from jaxfl.core.streams import EXTENSION
from jaxfl.core.traffic import sent_down
from jaxfl.core.training import Trained, Training, descend, task_loss
from jaxfl.data.federation import Client
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import hooks, wire
from jaxfl.mechanisms.each_architecture import each_architecture
from jaxfl.mechanisms.hooks import expect
from jaxfl.mechanisms.kept_leaves import Keep, no_leaf, separate
from jaxfl.models.model import Model, Weights


class Phase(NamedTuple):
    """A part of a client's round: some blocks train while the others are frozen. None: all train."""

    blocks: tuple[str, ...] | None
    epochs: Epochs


Phases = Callable[[Model], tuple[Phase, ...]]  # the phases of local training, in order


class Participant(NamedTuple):
    """A client of the round before its local training.

    Args:
      client: its data and its model.
      received: the whole model that it starts from: received and kept leaves.
      memory: what it remembers, see `Memory`; None without.
      broadcast: what the server sends besides the model, see `Memory`; without, its use is refused.
      hyper: the method's options.
    """

    client: Client
    received: Weights
    memory: Any
    broadcast: Any
    hyper: Any

    @property
    def model(self) -> Model:
        """The client's architecture."""
        return self.client.model


Train = Callable[[Any, Participant], Trained]  # local training: (key, participant)


class Means(NamedTuple):
    """The means of the answers of the cohort's clients of one architecture.

    Answers are added up while clients train, so memory holds only those of clients that run at the same time.

    Args:
      model: the architecture.
      shared: the mean of the shared leaves after local training.
      message: the mean of what `Memory.update` sends.
      participation: () float, |S|/N, the share of this architecture's clients that answered; newcomers count
        where they join.
    """

    model: Model
    shared: Weights
    message: Any
    participation: jax.Array


def nothing(*_) -> None:
    """Return None: no memory, no correction."""


NOT_SENT = Unread(
    "the server sends nothing besides the model; give Memory a function broadcast, from the server's memory "
    "to the part of it that clients receive"
)


def no_broadcast(server: Any) -> None:
    """Return nothing that clients receive besides the model."""


def no_message(participant: Participant, trained: Trained) -> tuple[None, None]:
    """Return no new memory and no message."""
    return None, None


def take_mean(shared: Weights, server: Any, means: Means, hyper: Any) -> tuple[Weights, Any]:
    """Return the mean as the new model (FedAvg)."""
    return means.shared, server


class Memory(NamedTuple):
    """The memory of a method from round to round besides the model (FedDyn, SCAFFOLD).

    Args:
      client: ``(model, shared leaves, hyper)`` -> what a client of this architecture remembers at the start;
        a leaf that stays on the client is None among the shared ones.
      server: the same -> what the server remembers at the start.
      broadcast: the server's memory -> the part of it that clients receive with the model.
      update: ``(Participant, Trained) -> (the client's new memory, its message to the server)``.
      aggregate: ``(shared, server, Means, hyper) -> (shared, server)``, for each architecture; its result is
        not used if no client of that architecture is present.
      by_rows: whether means weigh clients by their training rows, n_i / sum_i n_i, or equally, 1 / |S_t|.
    """

    client: Callable = nothing
    server: Callable = nothing
    broadcast: Callable = no_broadcast
    update: Callable = no_message
    aggregate: Callable = take_mean
    by_rows: bool = True

    def averaged(self, step: Callable) -> Averaged | None:
        """Return what the server averages in a round; None if anybody remembers anything or it does more."""
        if self._replace(by_rows=True) != Memory():
            return None
        return Averaged("shared", "kept", self.by_rows, step)


class State(NamedTuple):
    """The state between rounds of an architecture; None in the place of leaves that are elsewhere."""

    hyper: Any
    shared: Weights  # the leaves that all clients share
    kept: Weights  # the leaves that each client keeps (n_g, ...)
    memory: Any  # what each client remembers (n_g, ...)
    server: Any  # what the server remembers
    owed: Any = None  # what compression has lost of each client's messages (n_g, ...), with error feedback
    clip: Any = None  # the clip norm (), if it adapts


@options
class Averaging(Training):
    """Options of methods whose server averages what clients of the round send."""

    weighting: Literal["rows", "uniform"] = "rows"
    """How the server's means weigh clients: by their training rows, or equally."""

    def weights(self, n: jax.Array) -> jax.Array:
        """Return the weights (k,) of clients with n_i rows; 0 in places that have 0."""
        return n if self.weighting == "rows" else jnp.sign(n)


@options
class FineTuning(Averaging):
    """Options of methods that fine-tune a copy of the model before they use it."""

    ft_epochs: int | None = within("[0, inf)", 0)
    """Epochs of fine-tuning a copy of the model before use; it is never uploaded. None: E."""
    ft_part: Literal["head", "all"] = "all"
    """Part that is fine-tuned."""


@options
class FineTuned(FineTuning):
    """Options of methods that always fine-tune a copy of the model before they use it."""

    ft_epochs: int | None = within("[0, inf)", None)
    """Epochs of fine-tuning a copy of the model before use; it is never uploaded. By default E."""


def plain(participant: Participant, blocks: Collection[str]) -> Callable:
    """Return the cross-entropy, whatever was received."""
    return task_loss(participant.model, blocks)


def local_training(
    config: Training,
    *,
    phases: Phases | None = None,
    objective: Callable = plain,
    correction: Callable = nothing,
) -> Train:
    """Build local training in phases.

    Args:
      config: the method's options.
      phases: the phases in order; by default all blocks train jointly for `config.length`.
      objective: ``(Participant, names of the blocks that train) -> loss``, see
        `jaxfl.core.training.descend`.
      correction: ``(Participant, names of the blocks that train) -> optax.GradientTransformation``, applied
        to the gradients of these blocks before the optimiser sees them; None for none.

    Returns:
      A function whose `Trained` has the loss of the last phase and the steps of all.
    """
    phases = phases or (lambda model: (Phase(None, config.length),))
    require_call("objective", objective, "participant", "blocks")
    require_call("correction", correction, "participant", "blocks")

    def train(key, participant):
        hyper, steps = participant.hyper, jnp.int32(0)
        rows, weights = own_rows(participant.client, hyper), participant.received
        every = tuple(dict.fromkeys((*participant.model.names, *weights.params)))  # in order, added ones last
        for number, (blocks, epochs) in enumerate(phases(participant.model)):
            blocks = every if blocks is None else blocks
            hooks.require("a phase", phases, hooks.some_of(every), blocks)
            trained = descend(
                objective(participant, blocks),
                weights,
                key,
                rows,
                hyper,
                blocks=blocks,
                epochs=epochs,
                phase=number,
                correction=correction(participant, blocks),
            )
            weights, steps = trained.weights, steps + trained.steps
        return trained._replace(steps=steps)

    return train


def fine_tuning(config: FineTuning) -> Train | None:
    """Build plain training of `ft_part` for `ft_epochs`; None for 0 epochs."""
    epochs = config.length if config.ft_epochs is None else config.ft_epochs
    if epochs == 0:
        return None

    def phases(model):
        return (Phase(model.head.names if config.ft_part == "head" else None, epochs),)

    return local_training(config, phases=phases)


def predict(model, shared, own, x):
    """Return the logits of a model whose leaves are partly shared, partly the client's own."""
    weights = tree.combine(shared, own)
    return model.apply(weights.params, weights.stats, x, train=False)[0]


def sharing(
    config: Training,
    *,
    keep: Keep = no_leaf,
    train: Train | None = None,
    tune: Train | None = None,
    memory: Memory = Memory(),  # noqa: B008
    extend: Callable = lambda key, model, weights, hyper: weights,
    predict: Callable = predict,
) -> Algorithm:
    """Build a method that shares a model or a part of it.

    Args:
      config: the method's options.
      keep: which leaves never leave a client.
      train: local training; by default all blocks jointly.
      tune: training of a copy before it is used; the copy is never uploaded.
      memory: what clients and server remember, and how the server averages.
      extend: ``(key, model, weights, hyper) -> weights``, adds the method's own blocks to the initial
        weights. They train and decay like the others, unless `phases` names fewer.
      predict: see `Predictor`.
    """
    train = expect("train", train or local_training(config), "key", "participant", form=hooks.trained)
    keep = hooks.expect_keep(keep)
    extend = expect("extend", extend, "key", "model", "weights", "hyper", form=hooks.weights)
    if isinstance(config, Averaging) and config.weighting == "uniform":
        memory = memory._replace(by_rows=False)
    remember = expect("Memory.client", memory.client, "model", "shared", "hyper")
    begin = expect("Memory.server", memory.server, "model", "shared", "hyper")
    broadcast = expect("Memory.broadcast", memory.broadcast, "server")
    update = expect("Memory.update", memory.update, "participant", "trained", form=hooks.memory_and_message)
    aggregate = expect(
        "Memory.aggregate",
        memory.aggregate,
        "shared",
        "server",
        "means",
        "hyper",
        form=hooks.model_and_memory,
    )
    if memory.client is not nothing and memory.update is no_message:
        raise JaxflError(
            f"{line_of(memory.client)}: Memory has client but no update, which returns the next memory "
            "and its message (None for none)."
        )

    def divide(model, weights):
        """Return (kept, shared)."""
        return separate(weights, keep(model), config.bn_stats)

    def participating(f, state, cohort):
        """Return ``f(key, Participant)`` and what a cohort's clients have, as `map_clients` takes them."""

        def client(key, client, common, own):
            (shared, told), (kept, remembered) = common, own
            received = tree.combine(shared, kept)
            told = NOT_SENT if memory.broadcast is no_broadcast else told
            return f(key, Participant(client, received, remembered, told, state.hyper))

        common = state.shared, broadcast(state.server)
        return client, common, (gather(state.kept, cohort), gather(state.memory, cohort))

    def init(key, federation, hyper):
        model, (number,) = federation.group.model, federation.numbers
        of_group = jax.random.fold_in(jax.random.fold_in(key, EXTENSION), number)
        weights = extend(of_group, model, initial_weights(key, federation), hyper)
        kept, shared = divide(model, weights)
        remembered = federation.of_each(remember(model, shared, hyper), 0)
        own, clip = each_client(key, kept, federation), wire.first_clip(federation)
        state = State(hyper, shared, own, remembered, begin(model, shared, hyper), clip=clip)
        return state._replace(owed=wire.nothing_owed(federation, lambda: message_of(key, state, federation)))

    def receive(key, state, federation, cohort):
        return Predictor(state.shared, gather(state.kept, cohort), predict)

    def client(key, participant):
        """Return what stays with a client after its training, and what it sends."""
        trained = train(key, participant)
        kept, shared = divide(participant.model, trained.weights)
        remembered, message = update(participant, trained)
        return (kept, shared, remembered, trained.loss, trained.steps == 0), (shared, message)

    def message_of(key, state, federation):
        """Return the form of what a client sends."""
        first = Cohort(jnp.int32(0), (Slots(jnp.zeros(1, jnp.int32), jnp.ones(1, bool)),), 1, alone=True)
        trains, common, own = participating(client, state, first)
        _, message = jax.eval_shape(lambda: map_clients(trains, key, federation, first, common, own))
        return tree.one(message)

    def step(key, state, federation, cohort):
        n = cohort_rows(federation, cohort)
        present = (n > 0).astype(n.dtype)
        trains, common, own = participating(client, state, cohort)
        weights, owed = n if memory.by_rows else present, gather(state.owed, cohort)
        for_wire = {"known": (state.shared, None), "owed": owed, "clip": state.clip}
        made = wire.averaged(trains, key, federation, cohort, weights, common, own, **for_wire)
        (kept, shared, remembered, loss, idle), (mean_shared, message) = made.outputs, made.mean

        if made.left_out is not None:
            present = jnp.where(made.left_out, 0, present)
        joining = tree.take(federation.group.newcomer, cohort.slots).astype(n.dtype)
        clients = federation.participants[0] + (joining * present).sum()
        part = present.sum() / clients if made.part is None else made.part
        means = Means(federation.group.model, mean_shared, message, part)
        before = state.shared, state.server
        after = aggregate(*before, means, state.hyper)
        after = after if made.always else tree.where(present.any(), after, before)
        up = wire.up(federation, cohort, made.mean)  # a mean has the shape of a message
        state = State(
            state.hyper,
            after[0],
            scatter(state.kept, made.heard, kept),
            scatter(state.memory, made.heard, remembered),
            after[1],
            scatter(state.owed, made.heard, made.owed),
            made.clip,
        )
        trained = Predictor(None, tree.combine(shared, kept), predict)
        return state, made.told(Info(loss, up, sent_down(cohort, common), trained=trained, idle=idle))

    one = Algorithm(init, receive, step, receive, averaged=memory.averaged(step), wire=WIRE)
    if tune is None:
        return each_architecture(one)

    tune = expect("tune", tune, "key", "participant", form=hooks.trained)

    def tuned(key, state, federation, cohort):
        def client(key, participant):
            return tune(key, participant).weights

        tunes, common, own = participating(client, state, cohort)
        return Predictor(None, map_clients(tunes, key, federation, cohort, common, own), predict)

    return each_architecture(one._replace(personal=tuned))
