"""MNFL: clients of any architecture teach each other on public images, by a learned matrix.

Beikmohammadi et al., "Dealing with imbalanced sources in heterogenous client distributions in federated
learning", Algorithm 1; its algorithm is KT-pFL's (Zhang et al. 2021, arXiv:2111.02862). C[n, m] is the weight
of client m in the teacher of client n, 1/N at first, w_n client n's model (of any architecture), D_r the
round's public images, T the temperature. In a round

    w_n  <- LocalSGD(w_n)                                           eq. 5, E epochs, rate eta_1 = lr
    s_n  =  softmax(f(w_n, D_r) / T),   t_n = sum_m C[n, m] s_m
    w_n  <- SGD over KL(t_n || softmax(f(w_n) / T)) on D_r           eq. 6, R passes, rate eta_2
    C    <- C - eta_3 grad_C { lam sum_n |D_n| / |D| KL(t_n || s_n) + rho ||C - 1/N||^2 }        eq. 7

and every row of C is projected onto the simplex, see `jaxfl.mechanisms.learned_matrix`. eta_2 is
`distill_lr`, eta_3 `matrix_lr`; the paper has one value for all three. If only some clients take part,
teachers are mixed among them. A client deploys w_n and receives nothing before it trains.

Where the paper leaves room: rows of C are learners (its equations mix rows and columns). Without the
simplex t_n would not be a distribution. For eq. 7 clients send predictions again, of the distilled models
(``matrix_predictions="before"`` reuses s_n of eq. 6). Algorithm 1 teaches with the last round's C, KT-pFL's
code with the new one. The paper has no temperature, so T = 1, and eq. 6 is a mean over images. KT-pFL's code
has T = 10 and a factor of 1/classes (`temperature`, `kl_weight`), and draws each client's network anew
(`--initial own`).
"""

from typing import Literal

import jax.numpy as jnp

from jaxfl import fl


@fl.options
class MNFL(fl.Exchange, fl.learned_matrix.LearnedMatrix):
    """Options of MNFL."""

    matrix_loss: Literal["kl", "mse"] = "kl"
    """Distance of a client's predictions from its teacher's in eq. 7."""
    matrix_predictions: Literal["after", "before"] = "after"
    """Whether eq. 7 uses predictions after or before distillation."""


def build(config: MNFL) -> fl.Algorithm:
    """Exchange predictions with weights from a matrix that the server learns."""

    def start(federation):
        return fl.learned_matrix.initial(federation.clients, federation.participants.sum())

    def weigh(matrix, i, s, hyper):
        return fl.learned_matrix.teachers(matrix, i)

    def learn(matrix, seen: fl.RoundPredictions, hyper):
        """Take the step of eq. 7."""
        gradient = distance_gradient(seen.c, seen.s)
        return fl.learned_matrix.learn(matrix, seen.i, seen.share_of_all, gradient, hyper, seen.clients)

    def distance_gradient(c, s):
        """Return d_nm of eq. 7: weights c (k, k), predictions s (k, R, outputs) -> (k, k)."""
        t = fl.tree.weighted_sum(c, s)
        if config.matrix_loss == "mse":
            return 2 * fl.mixing.products(t - s, s) / s[0].size
        smallest = jnp.finfo(s.dtype).tiny
        ratio = jnp.log(jnp.maximum(t, smallest)) - jnp.log(jnp.maximum(s, smallest))
        return fl.mixing.products(ratio + 1, s) / s.shape[1]

    def findings(matrix, seen, federation):
        return {"weight": fl.learned_matrix.summary(matrix, federation)}

    resend = config.matrix_predictions == "after"
    return fl.exchanging(config, start=start, weigh=weigh, learn=learn, resend=resend, findings=findings)


def needs(config: MNFL) -> tuple[str, ...]:
    """Return the requirements: the logarithms of eq. 7 are of probabilities."""
    return ("public", "classes") if config.matrix_loss == "kl" else ("public",)


mnfl = fl.Method("mnfl", build, MNFL, needs=needs)
