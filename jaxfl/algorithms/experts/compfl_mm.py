"""CompFL-MM: no server: experts trained one after another, the largest first, with gossip.

Xu et al. 2024 (see `compfl`), appendix E, M/M. Experts are trained from the largest to the smallest, each
for T / M of the T rounds. Every client holds a copy theta_ij of the expert j whose turn it is. In a round,
for the clients that take part:

1. adapt, weigh      as `compfl`; teachers are the copies of larger experts that the client has saved
2. update (eq. 4)    (theta_ij, phi_ij) <- SGD over L = CE + lam L_f + mu L_kd     where j <= j_i
3. gossip            theta_ij <- sum_k W_ik theta_kj         W of Metropolis, see `jaxfl.mechanisms.topology`

A client saves its copy of j as it is after the last of these rounds. Clients that cannot run j relay it:
they do not train it, but still average, so that the graph stays connected (``relay``).

There is no greedy selection, because all clients that can run an expert train it in its turn. Distillation
comes only from larger experts, as appendix E says; appendix C has smaller ones. It needs no warm-up, because
teachers are trained before. With ``teachers="all"`` theta_ij teaches too, as gossip left it. There is no
ensemble, because smaller experts are untrained until their turns.

T counts the rounds of all experts together; for the budget that `compfl` has in T rounds take M T. A client
receives and deploys its copy of its own expert, as gossip left it, under its adapted head. While smaller
experts have their turns this copy is a teacher, so its head is adapted in each of their rounds too (with
``head_init="keep+ft"`` starting from the last head). Without distillation it is adapted only before use.

A message to a neighbour counts once, for the sender.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.experts.compfl_client import (
    Cooperation,
    begin,
    local_round,
    needs_links,
    newest,
    replaced,
    runnable,
)


@fl.options
class CompFLMM(Cooperation):
    """Options of CompFL model by model."""

    relay: bool = True
    """Let clients average experts that they cannot run; else they are not in these experts' graphs."""


class Held(NamedTuple):
    """The experts that a group's clients hold, (n_g, ...)."""

    copies: fl.PerGroup  # per expert j, theta_ij; None for experts that they do not hold
    heads: fl.PerGroup  # per expert that they can run, phi_ij
    saved: jax.Array  # (n_g, experts that they can run) bool, whether they have taken part in its training


class State(NamedTuple):
    """State carried between rounds."""

    hyper: CompFLMM
    clients: fl.PerGroup  # per group `Held`


def build(config: CompFLMM) -> fl.Algorithm:
    """Build CompFL model by model for the federation's architectures."""

    def init(key, federation, hyper):
        heads, thetas = begin(key, federation, config)
        fl.topology.require_links(federation)

        def held(g, js, heads, own):
            copies = (own if j == js[-1] else federation.of_each(theta, g) for j, theta in enumerate(thetas))
            copies = tuple(copy if config.relay or j in js else None for j, copy in enumerate(copies))
            return Held(copies, heads, jnp.zeros((len(federation.groups[g].id), len(js)), bool))

        own, js = fl.each_client(key, thetas, federation), runnable(federation.models)
        return State(hyper, fl.per_group(held, range(len(thetas)), js, heads, own))

    def receive(key, state, federation, cohort):
        def client(key, client, shared, own):
            theta, phi = own
            return newest(key, client, theta, phi, state.hyper)

        own = tuple((held.copies[g], held.heads[-1]) for g, held in enumerate(state.clients))
        weights = fl.map_clients(client, key, federation, cohort, own=fl.gather(own, cohort))
        return fl.own_models.predictors(weights)

    def as_held(clients):
        """Return predictors of clients' own experts under their current heads."""
        own = (fl.tree.combine(held.copies[g], held.heads[-1]) for g, held in enumerate(clients))
        return fl.own_models.predictors(tuple(own))

    def turn(j, key, federation, cohort, hyper, before):
        """Run a round of expert j: from the cohort's (held, info) before it to those after it."""
        clients, info = before
        models, experts = federation.models, runnable(federation.models)

        def client(key, client, js, held):
            if j not in js:
                return held, jnp.zeros((), federation.mean.dtype), jnp.bool(True)
            e = js.index(j)
            of_use = range(e, len(js)) if config.kd else (e,)
            local = local_round(
                jax.random.split(key),
                client,
                experts=[models[k] for k in js],
                thetas={k: held.copies[js[k]] for k in of_use},
                phis=held.heads,
                trainable=(e,),
                heard={k: held.saved[k] for k in of_use},
                hyper=hyper,
                mu=hyper.mu,
            )
            copies = replaced(held.copies, j, local.thetas[e])
            return Held(copies, local.phis, held.saved.at[e].set(True)), local.loss, local.idle

        done = fl.map_clients(client, key, federation, cohort, experts, clients)
        held, loss, idle = zip(*done, strict=True)
        trained = as_held(held)
        to_mix = {g: mine.copies[j] for g, mine in enumerate(held) if mine.copies[j] is not None}
        mixed, times = fl.topology.gossip(federation, cohort, to_mix)
        held = tuple(
            mine._replace(copies=replaced(mine.copies, j, mixed.get(g))) for g, mine in enumerate(held)
        )
        size = fl.tree.scalars(fl.tree.one(clients[j].copies[j]))
        up = tuple(none | ({size: times[g]} if g in times else {}) for g, none in enumerate(info.up))
        return held, info._replace(loss=loss, up=up, trained=trained, idle=idle)

    def step(key, state, federation, cohort):
        largest_first = max(runnable(federation.models), key=len)[::-1]
        if cohort.rounds < len(largest_first):
            raise fl.JaxflError(
                f"compfl-mm trains {len(largest_first)} architectures one after another, but the run has "
                f"only {cohort.rounds} rounds; raise --rounds."
            )
        number = cohort.round * len(largest_first) // cohort.rounds
        sizes = {fl.tree.scalars(fl.tree.one(held.copies[g])) for g, held in enumerate(state.clients)}

        def nothing(dtype):
            return fl.per_group(lambda slots: jnp.zeros(slots.mask.shape, dtype), cohort.groups)

        none = nothing(jnp.int32)
        up = fl.per_group(lambda of_group: dict.fromkeys(sorted(sizes), of_group), none)
        # In full on every device, so that no branch has to exchange parts of it.
        held = federation.keep_replicated(fl.gather(state.clients, cohort))
        trained = as_held(held)
        done = held, fl.Info(nothing(federation.mean.dtype), up, none, trained=trained, idle=nothing(bool))
        for place, j in enumerate(largest_first):
            train = functools.partial(turn, j, key, federation, cohort, state.hyper)
            done = fl.cond(number == place, train, lambda before: before, done)
        held, info = done
        return State(state.hyper, fl.scatter(state.clients, cohort, held)), info

    return fl.Algorithm(init, receive, step, receive)


compfl_mm = fl.Method("compfl-mm", build, CompFLMM, needs=needs_links)
