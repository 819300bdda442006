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
    """pFedSim's state, per group except for `hyper` and `phi`.

    Args:
      hyper: the options.
      shared: the global model, which the second phase does not change.
      weights: the clients' models as last trained (n_g, ...).
      has_own: (n_g,) bool, whether a client has trained in the second phase and so deploys its own model.
      phi: (N, N), Phi of the pairs that have met; 0 elsewhere.
    """

    hyper: PFedSim
    shared: fl.PerGroup
    weights: fl.PerGroup
    has_own: fl.PerGroup
    phi: jax.Array


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
        for model in federation.models:
            fl.class_means.require_classes_last(model, "pFedSim")
        own = fl.own_models.start(key, federation)
        has_own = fl.per_group(lambda group: jnp.zeros(len(group.id), bool), federation.groups)
        phi = jnp.zeros((federation.clients, federation.clients), federation.mean.dtype)
        return State(hyper, fl.initial_weights(key, federation), own, has_own, phi)

    def deployed(state, cohort):
        """Return the models of a cohort's clients, per group (k_g, ...): the global one or their own."""

        def of_group(shared, own, has_own):
            w = fl.tree.where_each(has_own, own, shared)
            return fl.own_models.with_own_stats(w, own, config.bn_stats)

        return fl.per_group(
            of_group, state.shared, fl.gather(state.weights, cohort), fl.gather(state.has_own, cohort)
        )

    def received(state, federation, cohort):
        """Return the models that a cohort's clients start from, per group (k_g, ...)."""

        def of_group(group, stored, w, has_own, i):
            kept, _ = divide(group.model, w)
            _, theta = divide(group.model, stored)

            a = attention(fl.mixing.pairs(state.phi, i, group.id), i, group.id)
            return fl.tree.where_each(has_own, fl.tree.combine(kept, fl.tree.weighted_sum(a, theta)), w)

        federation.require_all()
        return fl.per_group(
            of_group,
            federation.groups,
            state.weights,
            deployed(state, cohort),
            fl.gather(state.has_own, cohort),
            fl.mixing.ids(federation, cohort),
        )

    def receive(key, state, federation, cohort):
        return fl.own_models.predictors(received(state, federation, cohort))

    def personal(key, state, federation, cohort):
        return fl.own_models.predictors(deployed(state, cohort))

    def step(key, state, federation, cohort):
        hyper = state.hyper

        start = received(state, federation, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, start, hyper)

        generalising = generalises(cohort, hyper.generalization)
        mean = fl.per_group(fl.tree.weighted_mean, trained, fl.cohort_rows(federation, cohort), state.shared)
        new = State(
            hyper,
            fl.tree.where(generalising, mean, state.shared),
            fl.scatter(state.weights, cohort, trained),
            fl.scatter(
                state.has_own, cohort, fl.per_group(lambda slots: slots.mask & ~generalising, cohort.groups)
            ),
            jnp.where(generalising, state.phi, compared(state.phi, federation, cohort, trained)),
        )
        up, down = traffic(state, federation, cohort)
        return new, fl.Info(loss, up, down, trained=fl.own_models.predictors(trained))

    def compared(phi, federation, cohort, trained):
        """Return Phi (N, N) with new entries for the pairs of a cohort whose models are `trained`."""
        for model, w, i in zip(federation.models, trained, fl.mixing.ids(federation, cohort), strict=True):
            classifier = [w.params[name] for name in model.head.names]
            phi = fl.mixing.put_pairs(
                phi, i, i, jnp.maximum(fl.mixing.cosine_of_units(classifier, classifier), 0)
            )
        return phi

    def traffic(state, federation, cohort):
        """Count the model up; down the model, or only theta for clients with their own model."""
        whole = fl.own_models.message(state.weights, config.bn_stats)
        theta = fl.per_group(lambda model, w: divide(model, w)[1], federation.models, whole)
        down = fl.per_group(
            jnp.where,
            fl.gather(state.has_own, cohort),
            fl.sent_down(cohort, theta),
            fl.sent_down(cohort, whole),
        )
        return fl.sent_up(cohort, whole), down

    def matrices(state):
        """Return the weights a_ij (N, N) of extractors."""
        everyone = jnp.arange(len(state.phi), dtype=jnp.int32)
        return {"weights": attention(state.phi, everyone, everyone)}

    return fl.Algorithm(init, receive, step, personal, matrices=matrices)


pfedsim = fl.Method("pfedsim", build, PFedSim)
