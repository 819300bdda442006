"""pFedSim: FedAvg first, then extractors mixed among clients with similar classifiers.

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

from jaxfl.authoring import (
    Algorithm,
    Cohort,
    Info,
    Method,
    PerGroup,
    Training,
    cohort_rows,
    gather,
    head,
    initial_weights,
    options,
    own_models,
    per_group,
    scatter,
    sent_down,
    sent_up,
    tree,
    within,
)
from jaxfl.mechanisms.class_means import require_classes_last
from jaxfl.mechanisms.mixing import cosine_of_units, ids, pairs, put_pairs, row_stochastic
from jaxfl.mechanisms.sharing import separate

SELF = 0.9999  # Phi_ii, and the upper bound of all entries


@options
class PFedSim(Training):
    """Options of pFedSim."""

    generalization: float = within("[0, 1]", 0.5)
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
    shared: PerGroup
    weights: PerGroup
    has_own: PerGroup
    phi: jax.Array


def generalises(cohort: Cohort, rho):
    """Return whether a round is FedAvg's, () bool: round t is if t + 1 <= rho T."""
    done = (cohort.round + 1).astype(rho.dtype)
    rounding = 1 + 2 * float(jnp.finfo(rho.dtype).eps)  # 0.29 of 100 rounds are 29
    return done <= rho * cohort.rounds * rounding


def attention(phi, i, j):
    """Return a_ij (k, m), rows that sum to 1, from Phi (k, m) of the ids i (k,) and j (m,)."""
    oneself = i[:, None] == j[None]
    return row_stochastic(-jnp.log1p(-jnp.where(oneself, SELF, jnp.minimum(phi, SELF))), i, j)


def build(config: PFedSim) -> Algorithm:
    """Mix extractors, train, and average or compare."""

    def divide(model, w):
        """Split weights into (leaves that are personal in the second phase, theta)."""
        return separate(w, head(model), config.bn_stats)

    def init(key, federation, hyper):
        for model in federation.models:
            require_classes_last(model, "pFedSim")
        own = own_models.start(key, federation)
        has_own = per_group(lambda group: jnp.zeros(len(group.id), bool), federation.groups)
        phi = jnp.zeros((federation.clients, federation.clients), federation.mean.dtype)
        return State(hyper, initial_weights(key, federation), own, has_own, phi)

    def deployed(state, cohort):
        """Return the models of a cohort's clients, per group (k_g, ...): the global one or their own."""

        def of_group(shared, own, has_own):
            w = tree.where_each(has_own, own, shared)
            return own_models.with_own_stats(w, own, config.bn_stats)

        return per_group(of_group, state.shared, gather(state.weights, cohort), gather(state.has_own, cohort))

    def received(state, federation, cohort):
        """Return the models that a cohort's clients start from, per group (k_g, ...)."""

        def of_group(group, stored, w, has_own, i):
            kept, _ = divide(group.model, w)
            _, theta = divide(group.model, stored)

            a = attention(pairs(state.phi, i, group.id), i, group.id)
            return tree.where_each(has_own, tree.combine(kept, tree.weighted_sum(a, theta)), w)

        federation.require_all()
        return per_group(
            of_group,
            federation.groups,
            state.weights,
            deployed(state, cohort),
            gather(state.has_own, cohort),
            ids(federation, cohort),
        )

    def receive(key, state, federation, cohort):
        return own_models.predictors(received(state, federation, cohort))

    def personal(key, state, federation, cohort):
        return own_models.predictors(deployed(state, cohort))

    def step(key, state, federation, cohort):
        hyper = state.hyper

        start = received(state, federation, cohort)
        trained, loss = own_models.train(key, federation, cohort, start, hyper)

        generalising = generalises(cohort, hyper.generalization)
        mean = per_group(tree.weighted_mean, trained, cohort_rows(federation, cohort), state.shared)
        new = State(
            hyper,
            tree.where(generalising, mean, state.shared),
            scatter(state.weights, cohort, trained),
            scatter(
                state.has_own, cohort, per_group(lambda slots: slots.mask & ~generalising, cohort.groups)
            ),
            jnp.where(generalising, state.phi, compared(state.phi, federation, cohort, trained)),
        )
        up, down = traffic(state, federation, cohort)
        return new, Info(loss, up, down, trained=own_models.predictors(trained))

    def compared(phi, federation, cohort, trained):
        """Return Phi (N, N) with new entries for the pairs of a cohort whose models are `trained`."""
        for model, w, i in zip(federation.models, trained, ids(federation, cohort), strict=True):
            classifier = [w.params[name] for name in model.head.names]
            phi = put_pairs(phi, i, i, jnp.maximum(cosine_of_units(classifier, classifier), 0))
        return phi

    def traffic(state, federation, cohort):
        """Count the model up; down the model, or only theta for clients with their own model."""
        whole = own_models.message(state.weights, config.bn_stats)
        theta = per_group(lambda model, w: divide(model, w)[1], federation.models, whole)
        down = per_group(
            jnp.where, gather(state.has_own, cohort), sent_down(cohort, theta), sent_down(cohort, whole)
        )
        return sent_up(cohort, whole), down

    def matrices(state):
        """Return the weights a_ij (N, N) of extractors."""
        everyone = jnp.arange(len(state.phi), dtype=jnp.int32)
        return {"weights": attention(state.phi, everyone, everyone)}

    return Algorithm(init, receive, step, personal, matrices=matrices)


pfedsim = Method(
    "pfedsim",
    build,
    PFedSim,
    "FedAvg, then extractors mixed by the similarity of the clients' classifiers",
    "Tan et al. 2023, arXiv:2305.15706",
    """@article{tan2023pfedsim,
  title={{pFedSim}: Similarity-Aware Model Aggregation Towards Personalized Federated Learning},
  author={Tan, Jiahao and Zhou, Yipeng and Liu, Gang and Wang, Jessie Hui and Yu, Shui},
  journal={arXiv preprint arXiv:2305.15706}, year={2023}}""",
)
