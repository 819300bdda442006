"""CompFL-DD: no server: every expert walks over a graph of clients, and is trained where it is accepted.

Xu et al. 2024 (see `compfl`), appendix E, D/D. Each architecture j has one theta_j, a walker, which is at
some client; at first walkers are at different clients, none of them newcomers. On a visit of walker j at
client i:

    accept        with probability 1 where j = j_i, eps where j < j_i (what greedy selection is there), else 0
    if accepted   (theta_j, phi_ij) <- adapt, weigh and update as in `compfl`; teachers are the experts that i
                  has last seen of the others that it can run
    hand on       theta_j goes to a neighbour of i, each as likely as the others

Nothing is averaged. In a round of N clients every walker trains N / M times, rounded down but at least once,
so that all of them together train about as often as `compfl` does. The walkers take turns. If only some
clients take part, N counts these, and walkers go only to them. A walker rests if no client that it can reach
would accept it. One that is not accepted within ``max_hops`` hops rests until its next turn.

Options are those of `compfl`. With ``teachers="all"`` theta_j teaches too, as it came. There is no ensemble,
because a client need not have seen all experts.

A client keeps the newest copy of every expert that it can run and that has passed by, trained there or not.
After its training a walker goes to a neighbour, whose copy of it is renewed at the walker's next turn.
With ``deploy="walker"`` a client deploys the current walker of its architecture under its own adapted head.
With ``"visit"`` it deploys its own expert as the last visit left it, under its head, which training of
smaller experts has adapted since. With either it receives the current walker under its adapted head.

A hop counts once, for the sender. Simulated seconds assume that clients work in parallel, which walkers do
not.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.experts.compfl import Greedy, distils
from jaxfl.algorithms.experts.compfl_client import (
    begin,
    local_round,
    needs_links,
    received,
    replaced,
    require_statistics,
    runnable,
)


@fl.options
class CompFLDD(Greedy):
    """Options of CompFL device by device."""

    deploy: Literal["walker", "visit"] = "walker"
    """The expert that clients deploy: the newest one, or the one that they trained last."""
    max_hops: int = fl.within("[1, inf)", 1000)
    """Number of hops after which a walker that nobody accepts rests."""


class Known(NamedTuple):
    """The experts that a group's clients know, (n_g, ...)."""

    copies: fl.PerGroup  # per expert that they can run, theta_j as last seen
    heads: fl.PerGroup  # per expert that they can run, phi_ij
    heard: jax.Array  # (n_g, experts that they can run) bool, whether they have seen it


class State(NamedTuple):
    """State carried between rounds."""

    hyper: CompFLDD
    walkers: fl.PerGroup  # per expert j, theta_j
    at: jax.Array  # (M,) int32, the ids of the clients where walkers are
    known: fl.PerGroup  # per group `Known`


class Round(NamedTuple):
    """State within a round."""

    walkers: fl.PerGroup  # these three are as in `State`
    at: jax.Array
    known: fl.PerGroup
    loss: fl.PerGroup  # per group (n_g,), loss of a client's last training in this round
    idle: fl.PerGroup  # per group (n_g,) bool, whether a client has not trained in this round
    sent: fl.PerGroup  # per expert (N,) int32, number of times that each client has sent it


def build(config: CompFLDD) -> fl.Algorithm:
    """Build CompFL device by device for the federation's architectures."""

    def init(key, federation, hyper):
        heads, walkers = begin(key, federation, config)
        if config.greedy or config.kd:
            require_statistics(config, federation)
        fl.topology.require_links(federation)
        groups = federation.groups
        start_key = jax.random.fold_in(key, len(groups))
        order = jax.random.permutation(start_key, federation.clients)
        apart = jnp.concatenate(federation.newcomers)[order]
        places = jnp.arange(len(groups)) % jnp.maximum((~apart).sum(), 1)
        starts = order[jnp.argsort(apart, stable=True)[places]]

        def known(g, js, heads, own):
            copies = *(federation.of_each(walkers[j], g) for j in js[:-1]), own
            return Known(copies, heads, jnp.zeros((len(groups[g].id), len(js)), bool))

        own, js = fl.each_client(key, walkers, federation), runnable(federation.models)
        of_groups = fl.per_group(known, range(len(groups)), js, heads, own)
        return State(hyper, walkers, starts.astype(jnp.int32), of_groups)

    def receive(key, state, federation, cohort):
        own = fl.per_group(lambda known: known.heads[-1], fl.gather(state.known, cohort))
        return received(key, federation, cohort, state.walkers, own, state.hyper)

    def last_visit(key, state, federation, cohort):
        """Return each client's own expert as the last visit left it, which clients accept, under its head."""
        known = fl.gather(state.known, cohort)
        return fl.own_models.predictors(
            fl.per_group(lambda own: fl.tree.combine(own.copies[-1], own.heads[-1]), known)
        )

    def chances(j, federation, hyper):
        """Return the probability that each client accepts expert j, (N,)."""
        chance = jnp.zeros(federation.clients, federation.mean.dtype)
        for g, (group, js) in enumerate(zip(federation.groups, runnable(federation.models), strict=True)):
            if g == j:
                chance = chance.at[group.id].set(1)
            elif j in js and config.greedy:
                chance = chance.at[group.id].set(hyper.eps)
        return chance

    def visit(j, key, federation, here, hyper, mu, state: Round) -> Round:
        """Move walker j until it is accepted, train it, and move it to a neighbour."""
        models, experts = federation.models, runnable(federation.models)
        walk_key, train_key, leave_key = jax.random.split(key, 3)
        chance = chances(j, federation, hyper)
        way = fl.topology.walk(walk_key, federation, here, state.at[j], chance, config.max_hops)
        who = jnp.where(way.accepted, way.at, -1)
        theta, known, loss, idle = state.walkers[j], list(state.known), list(state.loss), list(state.idle)

        def train(js, e, key, client, theta, own):
            known, _, _ = own
            of_use = range(len(js)) if config.kd else (e,)
            local = local_round(
                jax.random.split(key),
                client,
                experts=[models[k] for k in js],
                thetas={k: theta if k == e else known.copies[k] for k in of_use},
                phis=known.heads,
                trainable=(e,),
                heard={k: known.heard[k] for k in of_use},
                hyper=hyper,
                mu=mu,
            )
            theta = local.thetas[e]
            known = known._replace(copies=replaced(known.copies, e, theta), heads=local.phis)
            return theta, (known, local.loss, local.idle)

        for g, (group, js) in enumerate(zip(federation.groups, experts, strict=True)):
            if j not in js:
                continue
            e, passed = js.index(j), way.passed.at[group.id].get(mode="fill", fill_value=False)
            seen = fl.tree.where_each(passed, state.walkers[j], known[g].copies[e])
            known[g] = known[g]._replace(
                copies=replaced(known[g].copies, e, seen),
                heard=known[g].heard.at[:, e].set(known[g].heard[:, e] | passed),
            )
            f, own = functools.partial(train, js, e), (known[g], loss[g], idle[g])
            theta, (known[g], loss[g], idle[g]) = fl.visit_client(
                f, theta, train_key, federation, g, who, own
            )

        left = fl.topology.hop(leave_key, federation, here, way)
        way = fl.tree.where(way.accepted, left, way)
        return Round(
            replaced(state.walkers, j, theta),
            state.at.at[j].set(way.at),
            tuple(known),
            tuple(loss),
            tuple(idle),
            replaced(state.sent, j, state.sent[j] + way.sent),
        )

    def step(key, state, federation, cohort):
        hyper, groups = state.hyper, federation.groups
        mu = jnp.where(distils(cohort, hyper), hyper.mu, 0)
        here = fl.topology.present(federation, cohort)
        visits = jnp.maximum(here.sum(dtype=jnp.int32) // len(groups), 1)

        def tick(v, of_round):
            for j in range(len(groups)):
                of_visit = jax.random.fold_in(jax.random.fold_in(key, v), j)
                of_round = visit(j, of_visit, federation, here, hyper, mu, of_round)
            return of_round

        begun = Round(
            state.walkers,
            state.at,
            state.known,
            loss=fl.per_group(lambda group: jnp.zeros(len(group.id), federation.mean.dtype), groups),
            idle=fl.per_group(lambda group: jnp.ones(len(group.id), bool), groups),
            sent=fl.per_group(lambda group: jnp.zeros(federation.clients, jnp.int32), groups),
        )
        done = fl.fori_loop(0, visits, tick, begun)
        messages = {}
        for times, theta in zip(done.sent, done.walkers, strict=True):
            size = fl.tree.scalars(theta)
            messages[size] = messages.get(size, 0) + times
        hops = {model.name: times.sum() for model, times in zip(federation.models, done.sent, strict=True)}
        state = State(hyper, done.walkers, done.at, done.known)
        loss = fl.gather(done.loss, cohort)
        return state, fl.Info(
            fl.per_group(lambda slots, of_group: jnp.where(slots.mask, of_group, 0), cohort.groups, loss),
            fl.topology.of_cohort(messages, federation, cohort),
            fl.sent_down(cohort, (0,) * len(cohort.groups)),
            findings={"hops in a round": hops},
            idle=fl.gather(done.idle, cohort),
            trained=last_visit(key, state, federation, cohort),
        )

    return fl.Algorithm(init, receive, step, receive if config.deploy == "walker" else last_visit)


compfl_dd = fl.Method("compfl-dd", build, CompFLDD, needs=needs_links)
