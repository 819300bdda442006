"""Hermes: every client prunes its own network, and entries that several clients hold are averaged.

Li et al. 2021, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients", MobiCom,
doi:10.1145/3447993.3483278. w_i is client i's model, m_i its mask (full at first), S_t the cohort. In a
round a client of S_t

    takes what the server has averaged of its entries from the round when it was last there on; the others
        stay its own
    prunes, if the accuracy on its validation rows >= threshold and its kept ratio > target:
        m_i loses a share p of what is left of each layer but the classifier
    w_i <- LocalSGD over CE(m_i w_i), E epochs

and then, per architecture, for every entry that at least two clients of S_t hold,

    w   <- sum_{i in S_t} m_i w_i / sum_{i in S_t} m_i

An entry that only one client holds stays that client's. The kept ratio is that of parameters, ||m_i||_0 /
||1||_0. Clients prune channels (of convolutions, units of dense layers) with all that is lost with them, or
single weights (see `hermes_pruning`). With `rewind` the remaining weights restart from their initial values
whenever a client has pruned, as in lottery tickets.

**Other code.** The authors have published no code. LotteryFL's, by some of them, prunes weights; Plato's
version of Hermes prunes channels. Where the paper leaves something open we do what both do: prune before
local training, so that clients send trained weights; after it, a rewound client would send its initial
weights. But both measure the accuracy on test rows and also prune the classifier, so that Plato's clients
lose classes. LotteryFL's server also takes what only one client holds. Plato's server averages only what all
hold, by their rows; its pruned channels leave behind their biases, norms and next layers' inputs, which enter
the means although nothing changes them.

**DraftFed's comparison** (doi:10.1109/TMC.2023.3283557) has ``granularity=weight,rewind=true``, p = 0.2 and
targets (`target_ratio`) from 0.8 to 0.1. It stops once a ratio is not above its target, and may then be far
below it. Here a client's last step prunes only what is still missing: the share x = (kept - target) / (kept
in layers that can be pruned) of the weights, or 1 - sqrt(1 - x) of the channels, because a share y of these
takes about 1 - (1 - y)^2 of the weights, by inputs and outputs. Pruning weights meets the target. Pruning
channels nearly meets it, because their number is rounded and biases, norms and the classifier's inputs go
with them (LeNet5 ends at 0.78 for a target of 0.8, at 0.49 for 0.5 and at 0.201 for 0.2). If the target is
below what is never pruned (with weights: classifier, biases, norms and a ViT's positions), clients prune
until they miss the threshold.

A client without validation rows does not prune (unless the threshold is 0). A client deploys w_i with the
newest averages, as it would start a round. Traffic both ways: the held entries, with BatchNorm's statistics
if these are averaged, and the mask, 32 bits to a scalar. Operations are counted for the whole network. The
mean and the least kept ratio of each round's clients are logged and plotted.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.shared_entries import hermes_pruning as pruning
from jaxfl.algorithms.shared_entries.hermes_pruning import Mask


@fl.options
class Hermes(fl.Training):
    """Options of Hermes."""

    granularity: Literal["channel", "weight"] = "channel"
    """Prune channels of convolutions and units of dense layers, or single weights."""
    prune: float = fl.within("[0, 1)", 0.2)
    """p, share of each layer's remaining channels (or weights) that a client prunes in a round."""
    target_ratio: float = fl.within("(0, 1]", 0.5)
    """Kept ratio of the parameters down to which a client prunes; 1 prunes nothing."""
    threshold: float = fl.within("[0, 1]", 0.5)
    """Least accuracy of the received model, on the client's validation rows, at which the client prunes."""
    rewind: bool = False
    """Whether remaining weights restart from their initial values whenever a client has pruned."""


class Own(NamedTuple):
    """What a client keeps."""

    weights: fl.Weights  # 0 where pruned
    held: Mask
    since: jax.Array  # () int32, number of rounds when it last took part
    initial: fl.Weights | None  # the weights that it rewinds to; None if it does not


class Server(NamedTuple):
    """The server's part of an architecture."""

    mean: fl.Weights  # the last average of every entry
    since: fl.Weights  # int32, number of rounds when it was made; -1 for initial weights, which all have


class State(NamedTuple):
    """The server's and the clients' (n_g, ...) parts per group, and the number of rounds so far."""

    hyper: Hermes
    server: fl.PerGroup
    own: fl.PerGroup
    rounds: jax.Array


def begun(server: Server, own: Own) -> fl.Weights:
    """Return the model that a client starts a round from: per entry the newer of the server's and its own."""
    return jax.tree.map(
        lambda held, mean, since, w: jnp.where(held & (since >= own.since), mean, w),
        own.held,
        server.mean,
        server.since,
        own.weights,
    )


def kept_ratio(held: Mask):
    """Return ||m||_0 / ||1||_0 of the parameters, ()."""
    return pruning.scalars(held.params).astype(float) / fl.tree.scalars(held.params)


def averaged(server: Server, sent: Mask, weights: fl.Weights, present, now) -> Server:
    """Return the server after round number `now` (), in which clients sent masks and models (k, ...).

    Models are 0 where they are pruned. `present` (k,) is False in empty places, and for who joins without
    rows.
    """
    counted = jax.tree.map(lambda sent, w: sent.astype(w.dtype), sent, weights)
    sums, counts = fl.tree.weighted_sum(present, weights), fl.tree.weighted_sum(present, counted)
    return server._replace(
        mean=fl.tree.mean_of_holders(sums, counts, server.mean, least=2),
        since=jax.tree.map(lambda count, since: jnp.where(count >= 2, now, since), counts, server.since),
    )


def build(config: Hermes) -> fl.Algorithm:
    """Receive, prune, train, and average common entries."""

    def init(key, federation, hyper):
        fl.validation.require(federation, "hermes prunes by the accuracy on")

        def start(g, w, own):
            never = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, jnp.int32), w)
            mask, since = federation.of_each((pruning.whole(w), jnp.int32(0)), g)
            return Server(w, never), Own(own, mask, since, own if config.rewind else None)

        weights = fl.initial_weights(key, federation)
        groups = fl.per_group(start, range(len(weights)), weights, fl.each_client(key, weights, federation))
        server, own = zip(*groups, strict=True)
        return State(hyper, server, own, jnp.int32(0))

    def receive(key, state, federation, cohort):
        def client(key, client, server, own):
            return begun(server, own)

        own = fl.gather(state.own, cohort)
        return fl.own_models.predictors(fl.map_clients(client, key, federation, cohort, state.server, own))

    def share_to_prune(client, held, w, hyper):
        """Return the share that a client prunes of what is left in each layer, ()."""
        layers = pruning.kernels(client.model, held, config.granularity)
        of_layers = pruning.scalars(layers).astype(float) / fl.tree.scalars(held.params)
        missing = jnp.clip((kept_ratio(held) - hyper.target_ratio) / of_layers, 0, 1)
        if config.granularity == "channel":  # which lose inputs and outputs
            missing = 1 - jnp.sqrt(1 - missing)
        good = fl.validation.quality(client, w) >= hyper.threshold
        return jnp.where(good, jnp.minimum(hyper.prune, missing), 0)

    def step(key, state, federation, cohort):
        hyper, now = state.hyper, state.rounds + 1

        def client(key, client, server, own):
            model, w = client.model, begun(server, own)
            part = share_to_prune(client, own.held, w, hyper)
            held = pruning.pruned(model, own.held, w, part, config.granularity)
            if config.rewind:
                has_pruned = pruning.scalars(held) < pruning.scalars(own.held)
                w = fl.tree.where(has_pruned, own.initial, w)
            plain = fl.task_loss(model)
            trained = fl.descend(
                lambda w, batch, key: plain(pruning.only(held, w), batch, key),
                pruning.only(held, w),
                key,
                fl.own_rows(client, hyper),
                hyper,
            )
            # Pruned entries stay 0, without gradient or decay; BatchNorm sees zeros there.
            traffic = message(model, held), message(model, own.held)
            own = Own(trained.weights, held, now, own.initial)
            return own, trained.loss, trained.steps == 0, *traffic, kept_ratio(held)

        own = fl.gather(state.own, cohort)
        outputs = fl.map_clients(client, key, federation, cohort, state.server, own)
        own, loss, idle, up, down, kept = zip(*outputs, strict=True)
        server = fl.per_group(
            lambda server, own, n: averaged(server, sent(own.held), own.weights, n > 0, now),
            state.server,
            own,
            fl.cohort_rows(federation, cohort),
        )
        return State(hyper, server, fl.scatter(state.own, cohort, own), now), fl.Info(
            loss,
            fl.sent_up(cohort, up),
            fl.sent_down(cohort, down),
            {"kept": summary(kept, cohort)},
            fl.own_models.predictors(tuple(of_group.weights for of_group in own)),
            idle=idle,
        )

    def sent(held: Mask) -> Mask:
        """Return the held entries that a client sends: no statistics if they stay local."""
        if config.bn_stats == "aggregate":
            return held
        return held._replace(stats=jax.tree.map(jnp.zeros_like, held.stats))

    def message(model, held):
        """Return the number of scalars of a model and its mask, () int32."""
        return pruning.scalars(sent(held)) + -(-pruning.bits(model, held, config.granularity) // 32)

    return fl.Algorithm(init, receive, step, personal=receive)


def summary(kept: fl.PerGroup, cohort: fl.Cohort) -> dict:
    """Return mean and least of the kept ratios (k_g,) of the round's clients."""
    ratios = jnp.concatenate(kept)
    present = jnp.concatenate([slots.mask for slots in cohort.groups])
    return {"mean": ratios.mean(where=present), "least": ratios.min(where=present, initial=1)}


hermes = fl.Method("hermes", build, Hermes, needs=("validation",))
