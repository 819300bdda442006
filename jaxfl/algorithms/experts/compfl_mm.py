"""CompFL model by model: without a server, one expert architecture after another.

Xu et al. 2024 (see `compfl`), appendix E, M/M. Experts are trained from the largest to the smallest, each
for T / M of the T rounds. Every client holds a copy theta_ij of the expert j whose turn it is; in a round,
for the clients that take part:

1. adapt, weigh      as `compfl`; teachers are the copies of larger experts that the client has saved
2. update (eq. 4)    (theta_ij, phi_ij) <- SGD over L = CE + lam L_f + mu L_kd     where j <= j_i
3. gossip            theta_ij <- sum_k W_ik theta_kj         W of Metropolis, see `jaxfl.mechanisms.topology`

What a client holds of j behind the last of these rounds is what it has saved. Clients that cannot run j train
nothing and relay: they average all the same, so that the graph stays connected (``relay``).

There is no greedy selection, for all clients that can run an expert train it in its turn. Distillation comes
from larger experts only, where appendix C of the paper has smaller ones; appendix E says so. It needs no
warm-up, for teachers are trained before. A client deploys its own expert as its last training left it, before
gossip; it receives its own copy under an adapted head.

A message to a neighbour counts once, for who sends it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.algorithms.experts.compfl_client import (
    Cooperation,
    check_validation,
    divide,
    local_round,
    newest,
    own_heads,
    runnable,
)
from jaxfl.authoring import (
    Algorithm,
    Info,
    JaxflError,
    Method,
    PerGroup,
    cond,
    each_client,
    gather,
    initial_weights,
    map_clients,
    options,
    own_models,
    per_group,
    scatter,
    topology,
    tree,
)


@options
class CompFLMM(Cooperation):
    """Options of CompFL model by model."""

    relay: bool = True
    """Let clients average experts that they cannot run; else these are not in an expert's graph."""


class State(NamedTuple):
    """What lives between rounds.

    Args:
      hyper: the options.
      copies: per group and expert j, theta_ij (n_g, ...); None where clients of a group have none.
      heads: per group, per expert that its clients can run, phi_ij (n_g, ...).
      saved: per group (n_g, experts that it can run) bool, which ones a client has taken part in.
      trained: per group (n_g, ...), the client's own expert after its last training.
    """

    hyper: CompFLMM
    copies: PerGroup
    heads: PerGroup
    saved: PerGroup
    trained: PerGroup


def build(config: CompFLMM) -> Algorithm:
    """Build CompFL model by model for the federation's architectures."""

    def init(key, federation, hyper):
        check_validation(config, federation)
        topology.require_links(federation)
        groups, experts = federation.groups, runnable(federation.models)
        weights = initial_weights(key, federation)
        parts = per_group(lambda model, w: divide(model, w, config), federation.models, weights)
        heads, thetas = zip(*parts, strict=True)

        def copies(group, js, own):
            of_all = (
                own if j == js[-1] else tree.stack(theta, len(group.id)) for j, theta in enumerate(thetas)
            )
            return tuple(copy if config.relay or j in js else None for j, copy in enumerate(of_all))

        return State(
            hyper,
            copies=per_group(copies, groups, experts, each_client(thetas, federation)),
            heads=own_heads(federation, heads),
            saved=per_group(lambda group, js: jnp.zeros((len(group.id), len(js)), bool), groups, experts),
            trained=each_client(weights, federation),
        )

    def receive(key, state, federation, cohort):
        def client(key, client, shared, own):
            theta, phi = own
            return newest(key, client, federation, theta, phi, state.hyper)

        own = tuple((state.copies[g][g], heads[-1]) for g, heads in enumerate(state.heads))
        weights = map_clients(client, key, federation, cohort, own=gather(own, cohort))
        return own_models.predictors(weights)

    def personal(key, state, federation, cohort):
        return own_models.of_cohort(state.trained, cohort)

    def turn(j, key, federation, cohort, carry):
        """A round of expert j."""
        state, *_ = carry
        hyper, models = state.hyper, federation.models

        def client(key, client, js, own):
            copies, heads, saved, trained = own
            if j not in js:
                return copies[j], heads, saved, trained, jnp.zeros((), federation.mean.dtype)
            e = js.index(j)
            larger = range(e + 1, len(js)) if config.kd else ()
            local = local_round(
                jax.random.split(key),
                client,
                federation,
                [models[k] for k in js],
                {k: copies[js[k]] for k in (e, *larger)},
                heads,
                jnp.int32(e),
                (e,),
                {k: saved[k] for k in (e, *larger)},
                hyper,
                hyper.mu,
            )
            own_expert = local.weights[e] if e == len(js) - 1 else trained
            return local.thetas[e], local.phis, saved.at[e].set(True), own_expert, local.loss

        mine = gather(tuple(zip(*state[1:], strict=True)), cohort)
        done = map_clients(client, key, federation, cohort, runnable(models), mine)
        thetas, heads, saved, trained, loss = zip(*done, strict=True)

        held = {g: theta for g, theta in enumerate(thetas) if theta is not None}
        mixed, times = topology.exchange(federation, cohort, held)
        averaged = tuple(
            tuple(mixed.get(g) if k == j else theta for k, theta in enumerate(copies))
            for g, (copies, *_) in enumerate(mine)
        )
        size = tree.scalars(tree.one(state.copies[j][j]))
        nothing = per_group(lambda slots: jnp.zeros(slots.mask.shape, jnp.int32), cohort.groups)
        return (
            State(
                hyper,
                *(
                    scatter(old, cohort, new)
                    for old, new in zip(state[1:], (averaged, heads, saved, trained), strict=True)
                ),
            ),
            loss,
            per_group(lambda js, none: jnp.full(none.shape, j not in js), runnable(models), nothing),
            tuple(
                topology.sent(federation, times[g], size) if g in times else none
                for g, none in enumerate(nothing)
            ),
        )

    def step(key, state, federation, cohort):
        largest_first = max(runnable(federation.models), key=len)[::-1]
        if cohort.rounds < len(largest_first):
            raise JaxflError(
                f"compfl-mm trains {len(largest_first)} architectures one after another, in {cohort.rounds} "
                "rounds of all; raise --rounds."
            )
        number = cohort.round * len(largest_first) // cohort.rounds
        carry = (
            state,
            per_group(lambda slots: jnp.zeros(slots.mask.shape, federation.mean.dtype), cohort.groups),
            per_group(lambda slots: jnp.zeros(slots.mask.shape, bool), cohort.groups),
            per_group(lambda slots: jnp.zeros(slots.mask.shape, jnp.int32), cohort.groups),
        )
        for place, j in enumerate(largest_first):
            train = functools.partial(turn, j, key, federation, cohort)
            carry = cond(number == place, train, lambda carry: carry, carry)
        state, loss, idle, up = carry
        trained = own_models.of_cohort(state.trained, cohort)
        return state, Info(loss, up, per_group(jnp.zeros_like, up), idle=idle, trained=trained)

    return Algorithm(init, receive, step, personal)


compfl_mm = Method(
    "compfl-mm",
    build,
    CompFLMM,
    "no server: experts trained one after another, the largest first, with gossip",
    "Xu et al. 2024, FedKDD, appendix E",
    needs=lambda config: ("links", "validation") if config.accuracy_on == "validation" else ("links",),
)
