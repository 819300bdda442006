"""Homogeneous MNFL: clients of one architecture get mixtures of each other's models, by a learned matrix.

Beikmohammadi et al., the homogeneous variant. w_n is client n's flattened model, C the matrix of
`jaxfl.mechanisms.learned_matrix`. In a round, among the clients of each architecture that take part,

    wbar_n <- sum_m C[n, m] w_m
    w_n    <- LocalSGD(wbar_n)                                       transfer="replace"
    C      <- C - eta_3 grad_C { lam sum_n (n_n / n) ||sum_m C[n, m] w_m - w_n||^2 / dim + rho ||C - 1/N||^2 }

where the models of the last line are the trained ones (eq. 7), and rows are projected onto the simplex. For
the transfer the paper refers to an appendix that it lacks. "replace" is its "client side global model at the
server side"; "prox" is the literal counterpart of its eq. 6, R steps w_n <- w_n - 2 eta_2 (w_n - wbar_n),
which with the paper's rates move a model by 1 % a round. In grad_C the models are taken relative to their
mean, because distances of parameters have no natural scale. N and n count the clients of the architecture and
their training rows. Divided by dim and weighted by n_n / n, the distance is so small that with the paper's
lam of 1 the matrix stays equal to four digits and more, and the method is FedAvg with uniform weights, scored
after local training; a lam of the order of dim lets it move. When clients outside the round are scored,
teachers are mixed among all clients, including models that have never been trained.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl


@fl.options
class MNFLHomogeneous(fl.learned_matrix.LearnedMatrix):
    """Options of MNFL among clients of one architecture."""

    transfer: Literal["replace", "prox"] = "replace"
    """Local training starts from the teacher, or from the own model after steps towards the teacher."""
    transfer_steps: int = fl.within("[0, inf)", 1)
    """R, steps towards the teacher under transfer="prox"."""
    transfer_lr: float = fl.within("[0, inf)", 0.005)
    """eta_2, learning rate of these steps."""


class State(NamedTuple):
    """The clients' models per group (n_g, ...), and the matrix C (N, N), 0 between architectures."""

    hyper: MNFLHomogeneous
    weights: fl.PerGroup
    matrix: jax.Array


def build(config: MNFLHomogeneous) -> fl.Algorithm:
    """Mix, train, and learn the matrix."""

    def init(key, federation, hyper):
        matrix = fl.learned_matrix.initial([group.id for group in federation.groups], federation.participants)
        return State(hyper, fl.own_models.start(key, federation), matrix)

    def transferred(state, federation, cohort):
        """Return the models that a cohort's clients start from, per group (k_g, ...)."""
        federation.require_all()
        pool = fl.mixing.among(federation, cohort)

        def of_group(own, others, i, j):
            teacher = fl.tree.weighted_sum(
                fl.mixing.row_stochastic(fl.mixing.pairs(state.matrix, i, j), i, j), others
            )
            if config.transfer == "prox":
                left = (1 - 2 * state.hyper.transfer_lr) ** config.transfer_steps
                teacher = jax.tree.map(lambda w, wbar: wbar + left * (w - wbar), own, teacher)
            return fl.own_models.with_own_stats(teacher, own, config.bn_stats)

        return fl.per_group(
            of_group,
            fl.gather(state.weights, cohort),
            fl.gather(state.weights, pool),
            fl.mixing.ids(federation, cohort),
            fl.mixing.ids(federation, pool),
        )

    def receive(key, state, federation, cohort):
        return fl.own_models.predictors(transferred(state, federation, cohort))

    def step(key, state, federation, cohort):
        hyper = state.hyper

        start = transferred(state, federation, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, start, hyper)
        matrix = state.matrix
        i_of, n_of = fl.mixing.ids(federation, cohort), fl.cohort_rows(federation, cohort)
        all_rows, clients = (jnp.maximum(n, 1) for n in (federation.training_rows, federation.participants))
        for w, i, n, of_all, number in zip(trained, i_of, n_of, all_rows, clients, strict=True):
            gradient = distance_gradient(
                fl.learned_matrix.teachers(matrix, i), fl.own_models.sent(w, config.bn_stats), n > 0
            )
            matrix = fl.learned_matrix.learn(matrix, i, n / of_all, gradient, hyper, number)
        models = fl.own_models.message(state.weights, config.bn_stats)
        findings = {"weight": fl.learned_matrix.summary(matrix, federation)}
        state = State(hyper, fl.scatter(state.weights, cohort, trained), matrix)
        up, down = fl.sent_up(cohort, models), fl.sent_down(cohort, models)
        return state, fl.Info(loss, up, down, findings, fl.own_models.predictors(trained))

    def distance_gradient(c, w, present):
        """Return d_nm (k, k): weights c (k, k), models w (k, ...) relative to the mean of those present."""
        centre = fl.tree.weighted_mean(w, present.astype(c.dtype), jax.tree.map(lambda leaf: leaf[0], w))
        centred = jax.tree.map(lambda leaf, middle: leaf - middle[None], w, centre)
        away = jax.tree.map(jnp.subtract, fl.tree.weighted_sum(c, centred), centred)
        return 2 * fl.mixing.products(away, centred) / fl.tree.scalars(centre)

    return fl.Algorithm(init, receive, step, fl.own_models.personal, matrices=fl.learned_matrix.matrices)


mnfl_homogeneous = fl.Method("mnfl-homogeneous", build, MNFLHomogeneous)
