"""FedFomo: clients mix the models of others by what each is worth on their validation rows.

Zhang et al. 2021, "Personalized Federated Learning with First Order Model Optimization", arXiv:2012.08565,
Algorithm 1. w_i is client i's model as last trained, b_i that model before this training, L_i the mean
cross-entropy on its validation rows, M is `downloads`, P the server's affinity matrix, at first the identity.
In a round every client i that takes part

    downloads the models w_j of M others, those with the largest P_ij (equal ones at random)
    q_j   = (L_i(b_i) - L_i(w_j)) / (||w_j - b_i|| + 1e-5)              for those j, and for j = i
    b_i  <- b_i + sum_j max(q_j, 0) (w_j - b_i) / sum_j max(q_j, 0)     no step where all q_j <= 0
    w_i  <- LocalSGD(b_i)
    P_ij <- P_ij + q_j

So a client's last training counts as much as it has lowered its validation loss, and is undone where no model
has a lower one. This base is that of the paper and its code. PFLlib has it too, but undoes nothing. FL-bench
compares with the model just trained (``base="trained"``: b_i is w_i above, so q_i = 0), and FedCMD's tables
are FL-bench's.

Norms are over parameters. BatchNorm's statistics are mixed with their layer; if they are local, a client
tries others' models with its own statistics. A client without validation rows has q = 0, so it trains its own
model further.

Others are the clients of the same architecture that have ever taken part: the server keeps the last upload of
each. The authors' code and FL-bench offer only uploads of the previous round, which leaves little choice when
few clients take part. As in the authors' code, a client does not download its own model.

That code also explores. Here each of the M places is random with probability

    max(0, epsilon - epsilon_decay t)               in round t = 0, 1, ...

The other places get the models with the largest P_ij, the random places any of the rest. By default only the
order of equal models is random. `received` repeats these draws with another key: if epsilon > 0, or more than
M models have equal P_ij, it may score another mixture than the one that the client trains.

A client deploys w_i as trained. It sends its model and its row of P, one number per client of the federation.
It receives M models, or as many as are available.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl

EPS = 1e-5
EXPLORATION = 1  # stream of a client's key; local training uses phase 0


@fl.options
class FedFomo(fl.Training):
    """Options of FedFomo."""

    downloads: int = fl.within("[1, inf)", 5)
    """M, maximum number of models that a client downloads in a round."""
    epsilon: float = fl.within("[0, 1]", 0.0)
    """Probability in the first round that a download is a random model; the authors' code has 0.3."""
    epsilon_decay: float = fl.within("[0, 1]", 0.05)
    """Decrease of epsilon per round."""
    base: Literal["received", "trained"] = "received"
    """What a client compares other models with: its model before or after its last local training."""


class State(NamedTuple):
    """FedFomo's state."""

    hyper: FedFomo
    weights: fl.Weights  # the clients' models w (n, ...)
    base: fl.Weights  # the models b (n, ...) with which they compare others
    uploaded: jax.Array  # (n,) bool, whether a client has ever taken part
    affinity: jax.Array  # P (n, n)


class Pool(NamedTuple):
    """The models that clients of an architecture choose from."""

    models: fl.Weights  # (n, ...)
    id: jax.Array  # (n,) int32
    available: jax.Array  # (n,) bool, whether a client has ever uploaded one


class Arrival(NamedTuple):
    """A client before local training: its mixture, its new row of P (n,), its number of received models."""

    weights: fl.Weights
    affinity: jax.Array
    received: jax.Array


def choose(key, affinity, pool: Pool, oneself, downloads: int, epsilon, clients: int):
    """Choose the models that the client with id `oneself` downloads, by its row of P (n,).

    Random numbers are drawn for all N `clients`, whatever the pool.

    Returns:
      Places in the pool (m,) with m = min(M, n), and a mask (m,) bool of those that are downloads.
    """
    keys = jax.random.split(key, 3)
    ties, others = (jax.random.uniform(k, (clients,))[pool.id] for k in keys[:2])
    candidate = pool.available & (pool.id != oneself)
    places = min(downloads, len(pool.id))
    random = (jax.random.uniform(keys[2], (downloads,))[:places] < epsilon).sum()
    # The first places go by affinity, with random ties; the other places go to any of the rest.
    rank = jnp.argsort(jnp.lexsort((ties, -affinity, ~candidate)))
    exploited = rank < places - random
    chosen = jnp.lexsort((others, ~exploited, ~candidate))[:places]
    return chosen, candidate[chosen]


def build(config: FedFomo) -> fl.Algorithm:
    """Download, weight, mix and train."""

    def init(key, federation, hyper):
        fl.validation.require(federation, "fedfomo weighs models on")
        own, n = fl.own_models.start(key, federation), len(federation.group.id)
        return State(hyper, own, own, jnp.zeros(n, bool), jnp.eye(n, dtype=federation.mean.dtype))

    def arrive(key, client, epsilon, pool, own) -> Arrival:
        """Download models, evaluate one after another, and mix."""
        w, b, affinity = own
        # Without validation rows nothing speaks for the model just trained, nor against it.
        b = jax.tree.map(lambda b, w: jnp.where(client.validation_size > 0, b, w), b, w)
        key = jax.random.fold_in(key, EXPLORATION)
        chosen, downloaded = choose(
            key, affinity, pool, client.id, config.downloads, epsilon, client.federation.clients
        )
        tried = jnp.append(chosen, jnp.argmax(pool.id == client.id).astype(chosen.dtype))
        so_far = fl.validation.loss(client, b)

        def look(carry, trial):
            pull, total = carry
            place, present = trial
            other = jax.tree.map(lambda leaf: leaf[place], pool.models)
            other = fl.own_models.with_own_stats(other, w, config.bn_stats)
            away = optax.tree.sub(other, b)
            better = so_far - fl.validation.loss(fl.only_if(present, client), other)
            q = jnp.where(present, better / (optax.tree.norm(away.params) + EPS), 0)
            gain = jnp.maximum(q, 0)
            pull = jax.tree.map(lambda pull, away: pull + gain * away, pull, away)
            return (pull, total + gain), q

        nothing = jax.tree.map(jnp.zeros_like, b), jnp.zeros_like(so_far)
        (pull, total), q = fl.scan(look, nothing, (tried, jnp.append(downloaded, True)))
        share = 1 / jnp.where(total > 0, total, 1)
        mixture = jax.tree.map(lambda b, pull: b + share * pull, b, pull)
        return Arrival(mixture, affinity.at[tried].add(q), downloaded.sum(dtype=jnp.int32))

    def on_clients(f, key, state, federation, cohort):
        """Return ``f(key, client, Arrival)`` for the clients of a cohort."""
        federation.require_all()
        hyper = state.hyper
        t = cohort.round.astype(hyper.epsilon.dtype)
        epsilon = jnp.maximum(hyper.epsilon - hyper.epsilon_decay * t, 0)

        def client(key, client, pool, own):
            return f(key, client, arrive(key, client, epsilon, pool, own))

        pool = Pool(state.weights, federation.group.id, state.uploaded)
        kept = fl.gather((state.weights, state.base, state.affinity), cohort)
        return fl.map_clients(client, key, federation, cohort, pool, kept)

    def receive(key, state, federation, cohort):
        mixtures = on_clients(lambda key, client, arrival: arrival.weights, key, state, federation, cohort)
        return fl.own_models.predictor(mixtures)

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, arrival):
            loss, rows = fl.task_loss(client.model), fl.own_rows(client, hyper)
            trained = fl.descend(loss, arrival.weights, key, rows, hyper)
            base = trained.weights if config.base == "trained" else arrival.weights
            return trained.weights, base, arrival.affinity, arrival.received, trained.loss, trained.steps == 0

        outputs = on_clients(client, key, state, federation, cohort)
        trained, base, affinity, received, loss, idle = outputs
        size = fl.tree.scalars(fl.own_models.sent(fl.tree.one(trained), config.bn_stats))
        up = fl.sent_up(cohort, size + federation.clients)  # the model, and a row of P
        down = {size: jnp.where(cohort.slots.mask, received, 0)}
        state = State(
            hyper,
            fl.scatter(state.weights, cohort, trained),
            fl.scatter(state.base, cohort, base),
            fl.scatter(state.uploaded, cohort, cohort.slots.mask),
            fl.scatter(state.affinity, cohort, affinity),
        )
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictor(trained), idle=idle)

    def matrices(state):
        return {"affinity": state.affinity}

    return fl.each_architecture(fl.Algorithm(init, receive, step, fl.own_models.personal, matrices=matrices))


fedfomo = fl.Method("fedfomo", build, FedFomo, needs=("validation",))
