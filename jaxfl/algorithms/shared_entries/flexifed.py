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

from jaxfl.authoring import (
    Algorithm,
    Info,
    Method,
    Model,
    PerGroup,
    Training,
    cohort_rows,
    each_client,
    gather,
    initial_weights,
    options,
    own_models,
    per_group,
    scatter,
    sent_up,
    tree,
)
from jaxfl.mechanisms import shared_entries
from jaxfl.mechanisms.shared_entries import Places, beginning, in_common, layers


@options
class FlexiFed(Training):
    """Options of FlexiFed."""

    strategy: Literal["max-common", "clustered-common", "basic-common"] = "max-common"
    """Averaged layers: the first layers that any two networks have in common; those that all have in common,
    and the rest within each architecture; or only those that all have in common."""


class State(NamedTuple):
    """The clients' networks per group (n_g, ...)."""

    hyper: FlexiFed
    weights: PerGroup


def basic(models: Sequence[Model]) -> Callable:
    """Map a layer that all have in common to architecture 0, others to None; there is at least one."""
    count = beginning({model: layers(model) for model in models})
    return lambda g, number: 0 if number < count else None


def clustered(models: Sequence[Model]) -> Callable:
    """Map a layer that all have in common to architecture 0, others to their own architecture."""
    count = in_common(*map(layers, models))
    return lambda g, number: 0 if number < count else g


def maximal(models: Sequence[Model]) -> Callable:
    """Map layer l of architecture g to the first architecture with the same layers up to l."""
    networks = [layers(model) for model in models]

    def owner(g, number):
        return next(first for first, other in enumerate(networks) if in_common(other, networks[g]) > number)

    return owner


STRATEGIES = {"basic-common": basic, "clustered-common": clustered, "max-common": maximal}


def build(config: FlexiFed) -> Algorithm:
    """Train own models, and average common layers."""

    def common(models) -> Places:
        places = shared_entries.whole_layers(models, STRATEGIES[config.strategy](models))
        local = config.bn_stats == "local"
        return {leaf: place for leaf, place in places.items() if not (local and leaf[1] == "stats")}

    def init(key, federation, hyper):
        weights, places = initial_weights(key, federation), common(federation.models)
        alike = shared_entries.hand_out(weights, places, weights)
        return State(hyper, each_client(key, alike, federation))

    def step(key, state, federation, cohort):
        places, hyper = common(federation.models), state.hyper

        own = gather(state.weights, cohort)
        trained, loss = own_models.train(key, federation, cohort, own, hyper)
        present = per_group(lambda n: (n > 0).astype(n.dtype), cohort_rows(federation, cohort))
        one = per_group(tree.one, trained)
        nobody = jax.tree.map(jnp.zeros_like, one)
        means = shared_entries.mean(trained, present, places, shared_entries.shared_leaves(nobody, places))
        merged = shared_entries.hand_out(means, places, trained)
        merged = jax.tree.map(lambda leaf, of_all: jnp.broadcast_to(leaf, of_all.shape), merged, trained)
        up = sent_up(cohort, own_models.message(trained, config.bn_stats))
        averaged = shared_entries.scalars_of_several(one, places, per_group(jnp.sum, present))
        down = per_group(lambda slots, count: jnp.where(slots.mask, count, 0), cohort.groups, averaged)
        return State(hyper, scatter(state.weights, cohort, merged)), Info(
            loss, up, down, trained=own_models.predictors(trained)
        )

    return Algorithm(init, own_models.personal, step, own_models.personal)


flexifed = Method(
    "flexifed",
    build,
    FlexiFed,
    "clients of any architecture average the first layers that their networks have in common",
    "Wang et al. 2023, doi:10.1145/3543507.3583347",
    """@inproceedings{wang2023flexifed,
  title={{FlexiFed}: Personalized Federated Learning for Edge Clients with Heterogeneous Model Architectures},
  author={Wang, Kaibin and He, Qiang and Chen, Feifei and Chen, Chunyang and Huang, Faliang and Jin, Hai and
          Yang, Yun},
  booktitle={WWW}, pages={2979--2990}, year={2023}}""",
)
