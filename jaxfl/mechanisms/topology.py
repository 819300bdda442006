"""Training without a server: linked clients average with their neighbours, or pass a model on.

Links are a graph (N, N) over client ids (`Federation.links`), the same in all rounds. A client that is
absent in a round is absent from its graph: nobody averages with it or passes it a model.

    gossip   w_n <- sum_m W_nm w_m      W_nm = 1 / (1 + max(deg_n, deg_m)) of neighbours, W_nn = 1 - sum W_nm
    walk     i <- a neighbour of i, each as likely as the others, until one accepts

W are the weights of Metropolis and Hastings (Xiao and Boyd 2004, "Fast linear iterations for distributed
averaging"): they are symmetric and their rows sum to 1, so gossip keeps the mean over the clients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.core import tree
from jaxfl.core.client_map import clients_in, per_group
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import wire
from jaxfl.mechanisms.mixing import ids, ids_of, pairs


def require_links(federation: Federation) -> None:
    """Raise `JaxflError` if nobody is linked."""
    if not federation.links.size:
        raise JaxflError("The method has no server and needs links between clients; add --topology complete.")


def metropolis(links) -> jax.Array:
    """Return W (k, k) of some links (k, k); a client without neighbours keeps what it has."""
    degree = degrees(links)
    most = jnp.maximum(degree[:, None], degree[None])
    weights = jnp.where(links, 1 / (1 + most).astype(float), 0)
    return weights + jnp.diag(1 - weights.sum(1))


def degrees(links) -> jax.Array:
    """Return each client's number of neighbours, (k,) int32."""
    return links.sum(1, dtype=jnp.int32)


def gossip(federation: Federation, cohort: Cohort, held: dict[int, Any], key=None) -> tuple[dict, dict]:
    """Average once among the clients of some groups, who hold trees of one structure.

    Args:
      federation: holds the links.
      cohort: the clients that take part.
      held: by group number, trees of leaves (k_g, ...).
      key: the round's, if a single group's messages pass over the wire.

    Returns:
      The same with sum_m W_nm leaf_m in place of every leaf_n; and by group number (k_g,) int32, to how
      many neighbours each client sent its leaves.
    """
    of_groups = per_group(ids_of, federation.groups, cohort.groups)
    clients = jnp.concatenate([of_groups[g] for g in held])
    trained = jnp.concatenate([clients_in(federation.groups[g], cohort.groups[g]).size > 0 for g in held])
    links = pairs(federation.links, clients, clients) & trained[None]  # who joins without rows only listens
    ends = np.cumsum([len(of_groups[g]) for g in held])[:-1].tolist()
    weights, joined = metropolis(links), jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *held.values())
    heard = joined if key is None else wire.heard(key, federation, cohort, joined)
    mixed = tree.weighted_sum(weights, heard)
    if heard is not joined:  # all hear their own as it is
        lost = jax.tree.map(jnp.subtract, joined, heard)
        mixed = jax.tree.map(jnp.add, mixed, jax.vmap(optax.tree.scale)(jnp.diagonal(weights), lost))
    mixed = jax.tree.map(lambda leaf: jnp.split(leaf, ends), mixed)
    parts = jax.tree.transpose(jax.tree.structure(joined), jax.tree.structure([0] * len(held)), mixed)
    return dict(zip(held, parts, strict=True)), dict(
        zip(held, jnp.split(degrees(links.T), ends), strict=True)
    )


def present(federation: Federation, cohort: Cohort) -> jax.Array:
    """Return which clients take part in the round: (N,) bool by id."""
    by_id = jnp.zeros(federation.clients, bool)
    for of_group in ids(federation, cohort):
        by_id = by_id.at[of_group].set(True, mode="drop")
    return by_id


def of_cohort(by_id, federation: Federation, cohort: Cohort) -> PerGroup:
    """Return a cohort's entries of arrays (N, ...) by id: per group (k_g, ...), 0 in empty places."""

    def of_group(i):
        return jax.tree.map(lambda leaf: leaf.at[i].get(mode="fill", fill_value=0), by_id)

    return per_group(of_group, ids(federation, cohort))


class Walk(NamedTuple):
    """A model on its way from client to client."""

    at: jax.Array  # () int32, id of the client that has it
    accepted: jax.Array  # () bool, whether that client accepts it
    passed: jax.Array  # (N,) bool, the present clients that have had it on this walk
    sent: jax.Array  # (N,) int32, how often each client has passed it on


def walk(key, federation: Federation, here, at, chance, most: int) -> Walk:
    """Pass a model on until a client accepts it; it stays if no client in reach would.

    Args:
      key: key of this walk; hop h uses ``fold_in(key, h)``.
      federation: holds the links.
      here: (N,) bool, the clients that are present: only they get it.
      at: () int32, the client that has it. If it is absent, the first one that gets the model pays.
      chance: (N,), the probability that each client accepts.
      most: largest number of hops, after which it stays where it is.
    """
    anybody = (reachable(federation, here, at) & (chance > 0)).any()

    def arrived(key, at, passed, sent):
        accepted = jax.random.bernoulli(key, jnp.where(here[at], chance[at], 0))
        return Walk(at, accepted, passed.at[at].set(here[at]), sent)

    def on_the_way(state):
        hops, walk = state
        return anybody & ~walk.accepted & (hops <= most)

    def go_on(state):
        hops, walk = state
        to, accept = jax.random.split(jax.random.fold_in(key, hops))
        moved = hop(to, federation, here, walk)
        return hops + 1, arrived(accept, moved.at, moved.passed, moved.sent)

    nobody = jnp.zeros(federation.clients, bool)
    first = arrived(jax.random.fold_in(key, 0), at, nobody, nobody.astype(jnp.int32))
    return jax.lax.while_loop(on_the_way, go_on, (jnp.int32(1), first))[1]


def reachable(federation: Federation, here, at) -> jax.Array:
    """Return the present clients that a model at client `at` can reach, (N,) bool; `at` if it is present."""
    links = federation.links & here[None]

    def grows(state):
        before, reached = state
        return (before != reached).any()

    def further(state):
        _, reached = state
        return reached, reached | (links & reached[:, None]).any(0)

    nobody = jnp.zeros(federation.clients, bool)
    return here & jax.lax.while_loop(grows, further, (nobody, nobody.at[at].set(True)))[1]


def hop(key, federation: Federation, here, walk: Walk) -> Walk:
    """Pass a model on to a neighbour that is present, each equally likely."""
    neighbours = federation.links[walk.at] & here
    some = neighbours.any()
    share = neighbours.astype(float) / jnp.maximum(neighbours.sum(), 1).astype(float)
    to = jax.random.choice(key, federation.clients, p=share).astype(jnp.int32)
    to = jnp.where(some, to, walk.at)
    pays = jnp.where(here[walk.at], walk.at, to)
    return walk._replace(at=to, sent=walk.sent.at[pays].add(some.astype(jnp.int32)))
