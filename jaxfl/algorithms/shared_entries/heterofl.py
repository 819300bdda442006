"""HeteroFL: clients train slices of one network, each as wide as they can afford.

Diao et al. 2021, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients", arXiv:2010.01264, Algorithm 1. The architectures of the federation are one network in several
widths; the server has the widest one, W. W[r] has the first channels of all its hidden layers, a share r of
them. Client i has the width r_i and the classes Y_i:

    W_i  <- LocalSGD over CE(mask_i f(W_i / r_i)), from W[r_i]       i in S_t
    W_e  <- mean_i (W_i)_e                                           over those i in S_t that hold entry e

    scaler      what a convolution or a hidden dense layer puts out is divided by r_i, before its norm: here
                its kernel and its bias are. Where widths were rounded, r_i is the share of that layer. A
                depthwise convolution is not scaled, the dense layers of a squeeze-and-excitation gate are.
    mask_i      makes the logits of classes that i lacks 0; i holds the classifier's entries of Y_i
    static BN   no running statistics: batches are normalised by themselves, and before networks are used they
                gather statistics over the training rows of all clients with that width, see `static_norm`
                (of all clients in the authors' code, whose one network is tested as a whole);
                with bn_stats="local", and for scores right after training, over the client's own

Means are uniform, entries that nobody holds stay, and gradients are clipped to norm 1, as in the authors'
code.

The paper predicts with the whole W and static statistics over all data. Here a client deploys its slice, as
in pFedClub's comparison, with its mask, as in the authors' code. The paper's W needs no scaler, because its r
is 1. A slice keeps its scaler: without it, every layer that no norm follows would put out r_i times what it
did in training.

Networks whose layers have different names share nothing; each has its own W.

Traffic: the slice each way, without static statistics. A client with a single training row has no batch for
statistics of its own (``bn_stats=local``, and scores right after training); there it has means 0 and
variances 1.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.shared_entries.static_norm import gathered, rows_of_all, unknown


@fl.options
class HeteroFL(fl.Training):
    """Options of HeteroFL."""

    clip_norm: float | None = fl.within("(0, inf)", 1.0)
    """Largest norm of a mini-batch gradient; larger ones are scaled down to it."""
    scaler: bool = True
    """Divide hidden layers' outputs by the share of channels that a client has."""
    masked: bool = True
    """Set the logits of classes that a client lacks to 0, in training and prediction."""
    static_bn: bool = True
    """Gather BatchNorm's statistics before networks are used; otherwise average running ones."""


class State(NamedTuple):
    """Per group: W in the place of the widest network, None elsewhere; clients' leaves (n_g, ...)."""

    hyper: HeteroFL
    shared: fl.PerGroup
    kept: fl.PerGroup


def build(config: HeteroFL) -> fl.Algorithm:
    """Send slices of W, and average their entries."""

    def divide(weights):
        """Split into (kept, shared) leaves. Static statistics are neither."""
        statistics = "local" if config.static_bn else config.bn_stats
        kept, shared = fl.separate(weights, lambda path: False, statistics)
        return jax.tree.map(lambda leaf: None, kept) if config.static_bn else kept, shared

    def init(key, federation, hyper):
        for model in federation.models:
            fl.class_means.require_classes_last(model, "HeteroFL")
        fl.wire.require_no_noise(federation, "HeteroFL")
        weights, places = fl.initial_weights(key, federation), fl.shared_entries.slices(federation.models)
        kept, shared = zip(*map(divide, fl.shared_entries.hand_out(weights, places, weights)), strict=True)
        return State(
            hyper, fl.shared_entries.shared_leaves(shared, places), fl.each_client(key, kept, federation)
        )

    def cut_out(state, federation):
        """Return each group's slice of W, without the leaves that clients keep."""
        _, form = zip(*(divide(model.form) for model in federation.models), strict=True)
        return fl.shared_entries.hand_out(state.shared, fl.shared_entries.slices(federation.models), form)

    def scalers(federation):
        """Return r of every leaf of the parameters, per group."""
        found = rates(federation.models)
        return found if config.scaler else jax.tree.map(lambda r: 1.0, found)

    def classes(federation, cohort):
        """Return the classes that clients say they have, (k_g, C) bool per group; of no rows all."""
        clients = fl.per_group(fl.tree.take, federation.groups, cohort.groups)
        said = clients if federation.wire is None else map(federation.wire.relabelled, clients)
        return tuple((of.class_counts > 0) | (of.size == 0)[:, None] for of in said)

    def predictors(shared, kept, federation, cohort):
        known = classes(federation, cohort) if config.masked else (None,) * len(kept)
        return fl.per_group(lambda w, *own: fl.Predictor(w, own, predict), shared, kept, known)

    def receive(key, state, federation, cohort):
        shared, kept = cut_out(state, federation), fl.gather(state.kept, cohort)
        shared = fl.per_group(
            lambda w, r: w._replace(params=scaled(w.params, r)), shared, scalers(federation)
        )

        def of_all(group, w):
            stats = gathered(group.model, w.params, *rows_of_all(group), federation, key)
            return w._replace(stats=stats)

        def of_client(key, client, w, own):
            stats = gathered(client.model, w.params, client.rows, client.size, federation, key)
            return own._replace(stats=stats)

        if config.static_bn and config.bn_stats == "aggregate":
            if any(jax.tree.leaves(unknown(model)) for model in federation.models):
                federation.require_all()
            shared = fl.per_group(of_all, federation.groups, shared)
        elif config.static_bn:
            kept = fl.map_clients(of_client, key, federation, cohort, shared, kept)
        return predictors(shared, kept, federation, cohort)

    def step(key, state, federation, cohort):
        hyper, models = state.hyper, federation.models
        received = cut_out(state, federation)

        def client(key, client, common, kept):
            (w, r), model = common, client.model
            start = fl.tree.combine(w, kept)
            if config.static_bn:
                start = start._replace(stats=unknown(model))
            known = client.class_counts > 0 if config.masked else None
            rows = fl.own_rows(client, hyper)
            trained = fl.descend(objective(model, r, known), start, key, rows, hyper)
            kept, shared = divide(trained.weights)
            used = trained.weights._replace(params=scaled(shared.params, r))
            if config.static_bn:
                with fl.flops.collect():  # this is not training
                    stats = gathered(model, used.params, client.rows, client.size, federation, key)
                used = used._replace(stats=stats)
            return kept, fl.wire.sent(key, client, shared, w), used, trained.loss

        common, own = (
            fl.per_group(lambda *both: both, received, scalers(federation)),
            fl.gather(state.kept, cohort),
        )
        kept, sent, used, loss = zip(
            *fl.map_clients(client, key, federation, cohort, common, own), strict=True
        )

        def weights(model, rows, known):
            """Return 1 for each client present; in the classifier, for each class that it has."""
            present = (rows > 0).astype(rows.dtype)
            of_blocks = dict.fromkeys(model.names, present)
            of_classes = present[:, None] * known.astype(rows.dtype)
            return fl.Weights(of_blocks | dict.fromkeys(model.head.names, of_classes), present)

        holders = fl.per_group(
            weights, models, fl.cohort_rows(federation, cohort), classes(federation, cohort)
        )
        shared = fl.shared_entries.mean(sent, holders, fl.shared_entries.slices(models), state.shared)
        traffic = fl.per_group(fl.tree.one, sent)
        return State(hyper, shared, fl.scatter(state.kept, cohort, kept)), fl.Info(
            loss,
            fl.wire.up(federation, cohort, traffic),
            fl.sent_down(cohort, traffic),
            trained=predictors((None,) * len(models), used, federation, cohort),
        )

    return fl.Algorithm(init, receive, step, receive, wire=("messages",))


@functools.cache
def rates(models: tuple[fl.Model, ...]) -> fl.PerGroup:
    """Return r of every leaf of the parameters, per group; 1 if not a kernel or bias of a hidden layer."""
    forms = tuple(model.form for model in models)
    leaves, places = fl.tree.by_path(forms), fl.shared_entries.slices(models)

    def of_leaf(path, leaf):
        group, _, block, *_ = name = fl.tree.names(path)
        # A depthwise kernel, of three axes, sums over no other channels, so nothing is missing there.
        kernel = leaves.get((*name[:-1], "kernel"))
        linear = kernel is not None and kernel.ndim in (2, 4)
        hidden = block not in models[int(group)].head.names
        return leaf.shape[-1] / leaves[places[name].leaf].shape[-1] if linear and hidden else 1.0

    return tuple(w.params for w in jax.tree.map_with_path(of_leaf, forms))


def scaled(params, r):
    """Return W / r of every layer."""
    return jax.tree.map(lambda leaf, r: leaf if r == 1 else leaf / r, params, r)


def masked(logits, known):
    """Set logits (B, ..., C) to 0 for classes that a client lacks; `known` is (C,) bool, None for no mask."""
    if known is None:
        return logits
    return jnp.where(known.reshape(*[1] * (logits.ndim - 1), -1), logits, 0)


def objective(model: fl.Model, r, known) -> Callable:
    """Return the loss CE(mask f(W / r)), in the form that `descend` takes."""

    def loss(w, batch, key):
        logits, stats = model.apply(
            scaled(w.params, r), w.stats, batch.x, train=True, key=key, mask=batch.mask
        )
        return fl.mean(model.task.losses(masked(logits, known), batch.y), batch), stats

    return loss


def predict(model, shared, own, x):
    """Return the masked logits; the weights are scaled, and partly shared, partly the client's own."""
    kept, known = own
    weights = fl.tree.combine(shared, kept)
    return masked(model.apply(weights.params, weights.stats, x, train=False)[0], known)


heterofl = fl.Method("heterofl", build, HeteroFL)
