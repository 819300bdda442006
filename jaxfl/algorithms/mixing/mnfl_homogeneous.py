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
    """The clients' models (n, ...), and the matrix C (n, n)."""

    hyper: MNFLHomogeneous
    weights: fl.Weights
    matrix: jax.Array


def build(config: MNFLHomogeneous) -> fl.Algorithm:
    """Mix, train, and learn the matrix."""

    def init(key, federation, hyper):
        matrix = fl.learned_matrix.initial(len(federation.group.id), federation.participants[0])
        return State(hyper, fl.own_models.start(key, federation), matrix)

    def transferred(state, federation, cohort):
        """Return the models that a cohort's clients start from (k, ...)."""
        federation.require_all()
        pool = fl.mixing.among(federation, cohort)
        own, others = fl.gather(state.weights, cohort), fl.gather(state.weights, pool)
        i, j = fl.mixing.places(cohort.slots), fl.mixing.places(pool.slots)
        c = fl.mixing.row_stochastic(fl.mixing.pairs(state.matrix, i, j), i, j)
        teacher = fl.tree.weighted_sum(c, others)
        if config.transfer == "prox":
            left = (1 - 2 * state.hyper.transfer_lr) ** config.transfer_steps
            teacher = jax.tree.map(lambda w, wbar: wbar + left * (w - wbar), own, teacher)
        return fl.own_models.with_own_stats(teacher, own, config.bn_stats)

    def receive(key, state, federation, cohort):
        return fl.own_models.predictor(transferred(state, federation, cohort))

    def step(key, state, federation, cohort):
        hyper = state.hyper
        start = transferred(state, federation, cohort)
        trained, loss = fl.own_models.train(key, federation, cohort, start, hyper)

        i, n = fl.mixing.places(cohort.slots), fl.cohort_rows(federation, cohort)
        c, w = fl.learned_matrix.teachers(state.matrix, i), fl.own_models.sent(trained, config.bn_stats)
        share = n / jnp.maximum(federation.training_rows[0], 1)
        clients = jnp.maximum(federation.participants[0], 1)
        gradient = distance_gradient(c, w, n > 0)
        matrix = fl.learned_matrix.learn(state.matrix, i, share, gradient, hyper, clients)
        state = State(hyper, fl.scatter(state.weights, cohort, trained), matrix)
        findings = {"weight": fl.learned_matrix.summary(matrix, federation)}
        up, down = fl.sent_up(cohort, fl.tree.one(w)), fl.sent_down(cohort, fl.tree.one(w))
        return state, fl.Info(loss, up, down, findings, fl.own_models.predictor(trained))

    def distance_gradient(c, w, present):
        """Return d_nm (k, k): weights c (k, k), models w (k, ...) relative to the mean of those present."""
        centre = fl.tree.weighted_mean(w, present.astype(c.dtype), jax.tree.map(lambda leaf: leaf[0], w))
        centred = jax.tree.map(lambda leaf, middle: leaf - middle[None], w, centre)
        away = jax.tree.map(jnp.subtract, fl.tree.weighted_sum(c, centred), centred)
        return 2 * fl.mixing.products(away, centred) / fl.tree.scalars(centre)

    matrices = fl.learned_matrix.matrices
    return fl.each_architecture(
        fl.Algorithm(init, receive, step, fl.own_models.personal, matrices=matrices, wire=("rows",))
    )


mnfl_homogeneous = fl.Method("mnfl-homogeneous", build, MNFLHomogeneous)
