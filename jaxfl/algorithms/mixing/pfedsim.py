"""pFedSim: FedAvg, then extractors mixed by the similarity of the clients' classifiers.

Tan et al. 2023, "pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning",
arXiv:2305.15706, Algorithm 1. theta_i is client i's extractor, phi_i its classifier, phi_ic the weights of
class c, rho = `generalization`, T the rounds of the run.

The first floor(rho T) rounds are FedAvg. Then every client starts from the global model, and classifiers are
personal. In a round a client i that takes part

    receives        sum_j a_ij theta_j              a_ij = -log(1 - Phi_ij) / sum_k -log(1 - Phi_ik)
    trains          (theta_i, phi_i), all blocks jointly, and the server keeps both

over all clients j of its architecture. After the round, for those i and j that both took part in it,

    Phi_ij <- max(0, mean_c cos(phi_ic, phi_jc))

Clients should number their classes alike: under ``--labels independent`` or ``permuted`` Phi compares weights
of different classes. Pairs that have not met have Phi_ij = 0 and so no weight. Phi_ii is 0.9999 and no other
entry is larger, so the logarithm stays finite. A client that has met nobody continues from its own model.

A client deploys its own model as trained, or the global one until it takes part in the second phase.
BatchNorm's statistics are mixed with their layer. A client sends the whole model. It receives the whole model
in FedAvg's rounds, then only theta. When a client first takes part in the second phase, it still gets the
whole global model, because it has no other way to know the classifier that it starts from.

The phase of a round is a traced value: one compiled program has both, and another rho compiles nothing anew.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl

SELF = 0.9999  # Phi_ii, and the upper bound of all entries


@fl.options
class PFedSim(fl.Training):
    """Options of pFedSim."""

    generalization: float = fl.within("[0, 1]", 0.5)
    """rho, share of FedAvg rounds, rounded down to whole rounds; 1 is FedAvg."""


class State(NamedTuple):
    """pFedSim's state."""

    hyper: PFedSim
    shared: fl.Weights  # the global model, which the second phase does not change
    weights: fl.Weights  # the clients' models as last trained (n, ...)
    has_own: jax.Array
    """(n,) bool, whether a client has trained in the second phase: it deploys its own model."""
    phi: jax.Array  # (n, n), Phi of the pairs that have met; 0 elsewhere


def generalises(cohort: fl.Cohort, rho):
    """Return whether a round is FedAvg's, () bool: round t is if t + 1 <= rho T."""
    done = (cohort.round + 1).astype(rho.dtype)
    rounding = 1 + 2 * float(jnp.finfo(rho.dtype).eps)  # 0.29 of 100 rounds are 29
    return done <= rho * cohort.rounds * rounding


def attention(phi, i, j):
    """Return a_ij (k, m), rows that sum to 1, from Phi (k, m) of the ids i (k,) and j (m,)."""
    oneself = i[:, None] == j[None]
    return fl.mixing.row_stochastic(-jnp.log1p(-jnp.where(oneself, SELF, jnp.minimum(phi, SELF))), i, j)


def build(config: PFedSim) -> fl.Algorithm:
    """Mix extractors, train, and average or compare."""

    def divide(model, w):
        """Split weights into (leaves that are personal in the second phase, theta)."""
        return fl.separate(w, fl.head(model), config.bn_stats)

    def init(key, federation, hyper):
        model, n = federation.group.model, len(federation.group.id)
        fl.class_means.require_classes_last(model, "pFedSim")
        own = fl.own_models.start(key, federation)
        phi = jnp.zeros((n, n), federation.mean.dtype)
        return State(hyper, fl.initial_weights(key, federation), own, jnp.zeros(n, bool), phi)

    def deployed(state, cohort):
        """Return the models of a cohort's clients (k, ...): the global one or their own."""
        own, has_own = fl.gather((state.weights, state.has_own), cohort)
        w = fl.tree.where_each(has_own, own, state.shared)
        return fl.own_models.with_own_stats(w, own, config.bn_stats)

    def received(state, federation, cohort):
        """Return the models that a cohort's clients start from (k, ...)."""
        federation.require_all()
        model, w = federation.group.model, deployed(state, cohort)
        kept, _ = divide(model, w)
        _, theta = divide(model, state.weights)
        i, j = fl.mixing.places(cohort.slots), jnp.arange(len(state.phi), dtype=jnp.int32)
        a = attention(fl.mixing.pairs(state.phi, i, j), i, j)
        mixed = fl.tree.combine(kept, fl.tree.weighted_sum(a, theta))
        return fl.tree.where_each(fl.gather(state.has_own, cohort), mixed, w)

    def receive(key, state, federation, cohort):
        return fl.own_models.predictor(received(state, federation, cohort))

    def personal(key, state, federation, cohort):
        return fl.own_models.predictor(deployed(state, cohort))

    def step(key, state, federation, cohort):
        hyper, model = state.hyper, federation.group.model
        start = received(state, federation, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, start, hyper)

        generalising = generalises(cohort, hyper.generalization)
        mean = fl.tree.weighted_mean(trained, fl.cohort_rows(federation, cohort), state.shared)
        new = State(
            hyper,
            fl.tree.where(generalising, mean, state.shared),
            fl.scatter(state.weights, cohort, trained),
            fl.scatter(state.has_own, cohort, cohort.slots.mask & ~generalising),
            jnp.where(generalising, state.phi, compared(state.phi, model, cohort, trained)),
        )
        whole = fl.own_models.sent(fl.tree.one(trained), config.bn_stats)
        _, theta = divide(model, whole)  # all that a client with its own model receives
        has_own = fl.gather(state.has_own, cohort)
        down = jnp.where(has_own, fl.sent_down(cohort, theta), fl.sent_down(cohort, whole))
        trained = fl.own_models.predictor(trained)
        return new, fl.Info(loss, fl.sent_up(cohort, whole), down, trained=trained)

    def compared(phi, model, cohort, trained):
        """Return Phi (n, n) with new entries for the pairs of a cohort whose models are `trained`."""
        i, classifier = fl.mixing.places(cohort.slots), [trained.params[name] for name in model.head.names]
        cosines = fl.mixing.cosine_of_units(classifier, classifier)
        return fl.mixing.put_pairs(phi, i, i, jnp.maximum(cosines, 0))

    def matrices(state):
        """Return the weights a_ij (n, n) of extractors."""
        everyone = jnp.arange(len(state.phi), dtype=jnp.int32)
        return {"weights": attention(state.phi, everyone, everyone)}

    return fl.each_architecture(
        fl.Algorithm(init, receive, step, personal, matrices=matrices, wire=("rows",))
    )


pfedsim = fl.Method("pfedsim", build, PFedSim)
