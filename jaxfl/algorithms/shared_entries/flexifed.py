"""FlexiFed: clients of any architecture average the first layers that their networks have in common.

Wang et al. 2023, "FlexiFed: Personalized Federated Learning for Edge Clients with Heterogeneous Model
Architectures", WWW 2023, section 3. w_il is layer l of client i's own network, S_t the cohort:

    w_i  <- LocalSGD(w_i)                                    i in S_t
    w_il <- mean_j w_jl                                      over C_il, some clients of S_t

    basic-common        C_il = S_t, for the layers that the networks of all architectures have in common from
                        the first on; all others are the client's own
    clustered-common    and for these others the clients with the architecture of i
    max-common          the clients whose first l layers are like those of i

Two layers are alike if they are of the same kind and their leaves have the same shapes; BatchNorm goes with
its layer. All architectures are compared, not only the networks present in a round; in the authors' code all
clients take part. If not all architectures begin with the same layer, basic-common raises an error,
clustered-common averages within each architecture, and max-common still averages what some have in common.
Common layers start from the same weights; in the code all clients start from their own (`--initial own`).
Means are uniform. Absent clients keep their networks, and clients deploy their own.

Traffic: the network up; down only layers that at least one other client of S_t has, too.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl


@fl.options
class FlexiFed(fl.Training):
    """Options of FlexiFed."""

    strategy: Literal["max-common", "clustered-common", "basic-common"] = "max-common"
    """Averaged layers: the first layers that any two networks have in common; those that all have in common,
    and the rest within each architecture; or only those that all have in common."""


class State(NamedTuple):
    """The clients' networks per group (n_g, ...)."""

    hyper: FlexiFed
    weights: fl.PerGroup


def basic(models: Sequence[fl.Model]) -> Callable:
    """Map a layer that all have in common to architecture 0, others to None; there is at least one."""
    count = fl.shared_entries.beginning({model: fl.shared_entries.layers(model) for model in models})
    return lambda g, number: 0 if number < count else None


def clustered(models: Sequence[fl.Model]) -> Callable:
    """Map a layer that all have in common to architecture 0, others to their own architecture."""
    count = fl.shared_entries.in_common(*map(fl.shared_entries.layers, models))
    return lambda g, number: 0 if number < count else g


def maximal(models: Sequence[fl.Model]) -> Callable:
    """Map layer l of architecture g to the first architecture with the same layers up to l."""
    networks = [fl.shared_entries.layers(model) for model in models]

    def owner(g, number):
        return next(
            first
            for first, other in enumerate(networks)
            if fl.shared_entries.in_common(other, networks[g]) > number
        )

    return owner


STRATEGIES = {"basic-common": basic, "clustered-common": clustered, "max-common": maximal}


def build(config: FlexiFed) -> fl.Algorithm:
    """Train own models, and average common layers."""

    def common(models) -> fl.shared_entries.Places:
        places = fl.shared_entries.whole_layers(models, STRATEGIES[config.strategy](models))
        local = config.bn_stats == "local"
        return {leaf: place for leaf, place in places.items() if not (local and leaf[1] == "stats")}

    def init(key, federation, hyper):
        weights, places = fl.initial_weights(key, federation), common(federation.models)
        alike = fl.shared_entries.hand_out(weights, places, weights)
        return State(hyper, fl.each_client(key, alike, federation))

    def step(key, state, federation, cohort):
        places, hyper = common(federation.models), state.hyper

        own = fl.gather(state.weights, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, own, hyper)
        present = fl.per_group(lambda n: (n > 0).astype(n.dtype), fl.cohort_rows(federation, cohort))
        one = fl.per_group(fl.tree.one, trained)
        nobody = jax.tree.map(jnp.zeros_like, one)
        means = fl.shared_entries.mean(
            trained, present, places, fl.shared_entries.shared_leaves(nobody, places)
        )
        merged = fl.shared_entries.hand_out(means, places, trained)
        merged = jax.tree.map(lambda leaf, of_all: jnp.broadcast_to(leaf, of_all.shape), merged, trained)
        up = fl.sent_up(cohort, fl.own_models.message(trained, config.bn_stats))
        averaged = fl.shared_entries.scalars_of_several(one, places, fl.per_group(jnp.sum, present))
        down = fl.per_group(lambda slots, count: jnp.where(slots.mask, count, 0), cohort.groups, averaged)
        return State(hyper, fl.scatter(state.weights, cohort, merged)), fl.Info(
            loss, up, down, trained=fl.own_models.predictors(trained)
        )

    return fl.Algorithm(init, fl.own_models.personal, step, fl.own_models.personal, wire=("rows",))


flexifed = fl.Method("flexifed", build, FlexiFed)
