"""FedAMP: every client is pulled to its own aggregate, in which similar models weigh more.

Huang et al. 2021, "Personalized Cross-Silo Federated Learning on Non-IID Data", arXiv:2007.03797, Algorithm
1. w_i is the model that client i uploaded last, N the number of clients of its architecture. In a round, for
every client i that takes part and all other clients j of its architecture that have ever uploaded a model,

    xi_ij  = alpha_k A'(||w_i - w_j||^2)            A(x) = 1 - exp(-x / sigma),  xi_ii = 1 - sum_j xi_ij
    u_i   <- sum_j xi_ij w_j                        at the server, i itself included
    w_i   <- SGD over CE(w) + lambda / (2 alpha_k) ||w - u_i||^2, E epochs from w_i

lambda is `lam`. Distances compare parameters; BatchNorm's statistics are mixed with their layer.

The paper tunes sigma and alpha_k to its networks. The defaults here are scale-free:

    sigma    the median of ||w_i - w_j||^2 over the pairs of clients that have uploaded a model
    alpha_k  sigma / N, so that no client gives away more than all its weight

As long as no two different models are known, sigma is 0: xi is the identity, and with these defaults nothing
pulls. Later these defaults have a flaw: similar models give a small sigma, hence a strong pull lambda /
alpha_k, which keeps them similar without learning. Therefore the pull of a client that takes S steps of SGD
with rate eta in a round is at most 1 / (eta S). On its own such a pull leads 63 % of the way from w_i to u_i
in many steps, with momentum 0.5 87 %, and further in few: in one step to u_i. (With 1 / eta, S times as much,
clients learn next to nothing.) With these defaults and lambda = 1 the bound is mostly active: then another
lambda changes nothing, unless it is below alpha_k / (eta S).

A client receives u_i, and `received` scores it although local training starts from w_i: u_i is all that the
others have told the client. It deploys w_i. The reported loss contains the pull. PFLlib's code computes the
pull without a gradient, so it trains as Local does.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl import fl

NEVER, NEWCOMER = np.int32(-1), np.int32(-2)


@fl.options
class FedAMP(fl.Training):
    """Options of FedAMP."""

    lam: float = fl.within("[0, inf)", 1.0)
    """lambda, the pull towards the own aggregate: 0 is Local; nothing changes beyond alpha_k / (lr times the
    client's mini-batches in a round)."""
    sigma: float | None = fl.within("(0, inf)", None)
    """The squared distance at which attention falls to 1/e; by default the median of all pairs."""
    alpha: float | None = fl.within("(0, inf)", None)
    """alpha_k, step of the aggregates; above sigma / N a client may give away more than all its weight.
    By default sigma / N."""


class State(NamedTuple):
    """FedAMP's state."""

    hyper: FedAMP
    weights: fl.Weights  # the clients' models (n, ...)
    distances: jax.Array
    """(n, n), squared distances of a client's model from all, as these were when it was uploaded, so that a
    round compares only its cohort with all."""
    last_upload: jax.Array
    """(n,) int32, the round of a client's last upload; `NEVER` before the first, `NEWCOMER` for one that does
    not count as a client yet."""


class Attention(NamedTuple):
    """xi (n, n) among the clients of an architecture, and lambda / alpha_k ()."""

    xi: jax.Array
    pull: jax.Array


def attention(state: State) -> Attention:
    """Return the attention between the clients of an architecture."""
    hyper, distances, last_upload = state.hyper, state.distances, state.last_upload
    clients, uploaded = (last_upload != NEWCOMER).sum(), last_upload >= 0
    later = last_upload[:, None] >= last_upload[None]
    distances = jnp.where(later, distances, distances.T)  # as the later upload of a pair saw it
    others = ~jnp.eye(len(last_upload), dtype=bool)
    sigma = hyper.sigma
    if sigma is None:
        known = others & uploaded[:, None] & uploaded[None]
        median = jnp.nanmedian(jnp.where(known, distances, jnp.nan))
        sigma = jnp.where(known.any(), median, 0)
    alpha = sigma / clients.astype(distances.dtype) if hyper.alpha is None else hyper.alpha
    scale = jnp.where(sigma > 0, sigma, 1)
    heard = others & uploaded[None] & (sigma > 0)
    xi = jnp.where(heard, alpha * jnp.exp(-distances / scale) / scale, 0)
    pull = jnp.where(alpha > 0, hyper.lam / jnp.where(alpha > 0, alpha, 1), 0)
    return Attention(xi + jnp.diag(1 - xi.sum(1)), pull)


def build(config: FedAMP) -> fl.Algorithm:
    """Mix at the server, train towards the mixture, and measure the distances of models."""

    def init(key, federation, hyper):
        newcomer = federation.group.newcomer
        distances = jnp.zeros((len(newcomer), len(newcomer)), federation.mean.dtype)
        last_upload = jnp.where(newcomer, NEWCOMER, NEVER)
        return State(hyper, fl.own_models.start(key, federation), distances, last_upload)

    def aggregates(state, federation, cohort):
        """Return u_i of a cohort's clients (k, ...), and lambda / alpha_k ()."""
        federation.require_all()
        xi, pull = attention(state)
        u = fl.tree.weighted_sum(fl.tree.take(xi, cohort.slots), state.weights)
        return fl.own_models.with_own_stats(u, fl.gather(state.weights, cohort), config.bn_stats), pull

    def receive(key, state, federation, cohort):
        return fl.own_models.predictor(aggregates(state, federation, cohort)[0])

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, pull, own):
            w, u = own
            steps = jnp.maximum(fl.steps_of(client.size, client.model, hyper), 1).astype(pull.dtype)
            towards = fl.proximal(client.model, u, jnp.minimum(pull, 1 / (hyper.lr * steps)))
            trained = fl.descend(towards, w, key, fl.own_rows(client, hyper), hyper)
            return trained.weights, trained.loss

        u, pull = aggregates(state, federation, cohort)
        own = fl.gather(state.weights, cohort), u
        trained, loss = fl.map_clients(client, key, federation, cohort, pull, own)

        weights = fl.scatter(state.weights, cohort, trained)
        distances = fl.mixing.squared_distances(trained.params, weights.params)
        now = jnp.full(cohort.slots.mask.shape, cohort.round)
        state = State(
            hyper,
            weights,
            fl.scatter(state.distances, cohort, distances),
            fl.scatter(state.last_upload, cohort, now),
        )
        model = fl.own_models.sent(fl.tree.one(weights), config.bn_stats)
        up, down = fl.sent_up(cohort, model), fl.sent_down(cohort, model)
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictor(trained))

    def matrices(state):
        return {"attention": attention(state).xi}

    return fl.each_architecture(
        fl.Algorithm(init, receive, step, fl.own_models.personal, matrices=matrices, wire=("rows",))
    )


fedamp = fl.Method("fedamp", build, FedAMP)
