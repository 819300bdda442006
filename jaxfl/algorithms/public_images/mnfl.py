"""MNFL: a learned matrix says who teaches whom, through predictions on public images.

Beikmohammadi et al., "Dealing with imbalanced sources in heterogenous client distributions in federated
learning", Algorithm 1; its algorithm is KT-pFL's (Zhang et al. 2021, arXiv:2111.02862). C[n, m] is the weight
of client m in the teacher of client n, w_n client n's model (of any architecture), D_r the round's public
images, T the temperature. In a round

    w_n  <- LocalSGD(w_n)                                           eq. 5, E epochs, rate eta_1 = lr
    s_n  =  softmax(f(w_n, D_r) / T),   t_n = sum_m C[n, m] s_m
    w_n  <- SGD over KL(t_n || softmax(f(w_n) / T)) on D_r           eq. 6, R passes, rate eta_2
    C    <- C - eta_3 grad_C { lam sum_n (n_n / n) KL(t_n || s_n) + rho ||C - 1/N||^2 }        eq. 7

and every row of C is projected on the simplex, see `jaxfl.mechanisms.learned_matrix`. If only some clients
take part, teachers are mixed among them. A client deploys w_n, and receives nothing before it trains.

What the paper leaves open: rows of C are learners (its equations mix rows and columns); without the simplex
t_n would be no distribution; for eq. 7 clients send predictions once more, of the distilled models
(``matrix_predictions="before"`` uses s_n of eq. 6 again); eq. 6 is a mean over images without a factor of T^2
(`kl_weight`; the authors' code has 1/classes).
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.authoring import (
    Algorithm,
    Info,
    Method,
    PerGroup,
    cross_entropy,
    descend,
    gather,
    map_clients,
    options,
    own_rows,
    public_rows,
    rows_uploaded,
    scatter,
    sent_down,
    sent_up,
    within,
)
from jaxfl.core.training import OPTIMIZERS
from jaxfl.mechanisms import learned_matrix, own_models, public_images
from jaxfl.mechanisms.learned_matrix import LearnedMatrix
from jaxfl.mechanisms.losses import distillation
from jaxfl.mechanisms.mixing import concatenate, ids, mix, products, split


@options
class MNFL(LearnedMatrix):
    """Options of MNFL."""

    public_size: int = within("[1, inf)", 3000)
    """|D_r|, public images of a round; all where there are fewer."""
    public_batch: int = within("[1, inf)", 256)
    """Public images of a mini-batch."""
    distill_epochs: int = within("[0, inf)", 1)
    """R, passes over the round's public images."""
    distill_lr: float = within("[0, inf)", 0.01)
    """eta_2, learning rate of distillation; 0 is Local."""
    temperature: float = within("(0, inf)", 10.0)
    """T of all predictions that are exchanged."""
    kl_weight: float = within("[0, inf)", 1.0)
    """Factor on the distillation loss; T^2 is usual elsewhere."""
    matrix_loss: Literal["kl", "mse"] = "kl"
    """Distance of a client's predictions from its teacher's in eq. 7."""
    matrix_predictions: Literal["after", "before"] = "after"
    """Whether eq. 7 looks at predictions after or before distillation."""


class State(NamedTuple):
    """MNFL's state: the clients' models per group (n_g, ...), and the matrix C (N, N)."""

    hyper: MNFL
    weights: PerGroup
    matrix: jax.Array


def build(config: MNFL) -> Algorithm:
    """Train, say, mix, distil, learn the matrix."""
    fresh = config.matrix_predictions == "after"

    def init(key, federation, hyper):
        everybody = jnp.arange(federation.clients, dtype=jnp.int32)
        return State(hyper, own_models.start(key, federation), learned_matrix.initial([everybody]))

    def personal(key, state, federation, cohort):
        return own_models.of_cohort(state.weights, cohort)

    def step(key, state, federation, cohort):
        hyper = state.hyper
        rows = public_images.subset(key, federation, config.public_size)
        i = concatenate(ids(federation, cohort))
        taught = OPTIMIZERS[config.optimizer](dataclasses.replace(hyper, lr=hyper.distill_lr))

        def say(w, client):
            return public_images.soft_predictions(w, client, federation, rows, hyper.temperature)

        def learn_alone(key, client, nothing, w):
            own = own_rows(client, federation, hyper)
            trained = descend(cross_entropy(client.model), w, key, own, hyper)
            return trained.weights, trained.loss, say(trained.weights, client)

        def learn_from_teacher(key, client, nothing, own):
            w, t = own
            w = descend(
                distillation(client.model, t, hyper.temperature, hyper.kl_weight),
                w,
                key,
                public_rows(rows, federation, client),
                hyper,
                epochs=config.distill_epochs,
                batch_size=config.public_batch,
                phase=1,
                optimizer=taught,
            ).weights
            return w, say(w, client) if fresh else None

        own = gather(state.weights, cohort)
        weights, loss, s = zip(*map_clients(learn_alone, key, federation, cohort, own=own), strict=True)
        s = concatenate(s)
        c = learned_matrix.teachers(state.matrix, i)
        t = split(mix(c, s), cohort)
        own = tuple(zip(weights, t, strict=True))
        distilled = map_clients(learn_from_teacher, key, federation, cohort, own=own)
        weights, said = zip(*distilled, strict=True)
        s = concatenate(said) if fresh else s

        slopes = towards_teachers(c, s)
        n = concatenate(rows_uploaded(federation, cohort))
        matrix = learned_matrix.learn(state.matrix, i, n, slopes, hyper, 1 / federation.clients)
        prediction = len(rows) * s.shape[-1]

        def every(scalars):
            return (scalars,) * len(federation.groups)

        return State(hyper, scatter(state.weights, cohort, weights), matrix), Info(
            loss,
            up=sent_up(cohort, every(prediction * (2 if fresh else 1))),
            down=sent_down(cohort, every(prediction + len(rows))),  # the teacher's, and which images
            findings={"weight": learned_matrix.summary(matrix)},
            trained=own_models.predictors(weights),
        )

    def towards_teachers(c, s):
        """d_nm of eq. 7: weights c (k, k), predictions s (k, R, outputs) -> (k, k)."""
        t = mix(c, s)
        if config.matrix_loss == "mse":
            return 2 * products(t - s, s) / s[0].size
        smallest = jnp.finfo(s.dtype).tiny
        ratio = jnp.log(jnp.maximum(t, smallest)) - jnp.log(jnp.maximum(s, smallest))
        return products(ratio + 1, s) / s.shape[1]

    return Algorithm(init, personal, step, personal, matrices=learned_matrix.matrices)


BIBTEX = """@article{beikmohammadi2024dealing,
  title={Dealing with Imbalanced Sources in Heterogenous Client Distributions in Federated Learning},
  author={Beikmohammadi, Arman and Darzidehkalani, Erfan and Raziei, Mohammad and Rezaei, Amir}}

@inproceedings{zhang2021parameterized,
  title={Parameterized Knowledge Transfer for Personalized Federated Learning},
  author={Zhang, Jie and Guo, Song and Ma, Xiaosong and Wang, Haozhao and Xu, Wenchao and Wu, Feijie},
  booktitle={NeurIPS}, year={2021}}"""

mnfl = Method(
    "mnfl",
    build,
    MNFL,
    "clients of any architecture teach each other on public images, by a learned matrix",
    "Beikmohammadi et al.; KT-pFL, Zhang et al. 2021, arXiv:2111.02862",
    BIBTEX,
    needs=lambda config: {"public"},
)
