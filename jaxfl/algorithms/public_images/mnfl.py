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
import optax

from jaxfl.config.options import options, within
from jaxfl.core.client_map import gather, map_clients, per_group, scatter, sizes
from jaxfl.core.protocol import Algorithm, Info, Method, Predictor
from jaxfl.core.training import cross_entropy, descend, initial_weights, mean
from jaxfl.core.tree import stack
from jaxfl.data.federation import PerGroup
from jaxfl.mechanisms import learned_matrix as teaching
from jaxfl.mechanisms import public_images as public
from jaxfl.mechanisms.learned_matrix import Teaching
from jaxfl.mechanisms.mixing import concatenate, ids, mix, products, split
from jaxfl.mechanisms.sharing import predict


@options
class MNFL(Teaching):
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

    def init(key, federation, hyper):
        weights = initial_weights(key, federation)
        weights = per_group(lambda w, group: stack(w, len(group.id)), weights, federation.groups)
        return State(hyper, weights, teaching.initial([jnp.arange(federation.clients, dtype=jnp.int32)]))

    def personal(key, state, federation, cohort):
        return per_group(lambda w: Predictor(None, w, predict), gather(state.weights, cohort))

    def step(key, state, federation, cohort):
        hyper, nothing = state.hyper, (None,) * len(federation.groups)
        rows = public.subset(key, federation, config.public_size)
        i = concatenate(ids(federation, cohort))

        def soft_predictions(client, w):
            return jax.nn.softmax(public.logits(w, client, federation, rows) / hyper.temperature)

        def learn_alone(key, client, nothing, w):
            model, key = client.model, jax.random.fold_in(key, 0)
            loss = cross_entropy(model, model.names)
            w, value = descend(
                loss, w, key, client, federation, hyper, blocks=model.names, epochs=config.epochs
            )
            return w, value, soft_predictions(client, w)

        def learn_from_teacher(key, client, nothing, own):
            w, t = own
            model, key = client.model, jax.random.fold_in(key, 1)
            rates = dataclasses.replace(hyper, lr=hyper.distill_lr, batch_size=config.public_batch)
            w, _ = descend(
                distillation(model, t, hyper),
                w,
                key,
                public.visiting(client, rows),
                federation,
                rates,
                blocks=model.names,
                epochs=config.distill_epochs,
            )
            return w, soft_predictions(client, w) if config.matrix_predictions == "after" else None

        trained = map_clients(learn_alone, key, federation, cohort, nothing, gather(state.weights, cohort))
        weights, loss, s = zip(*trained, strict=True)
        s = concatenate(s)
        t = split(mix(teaching.teachers(state.matrix, i), s), cohort)
        own = tuple(zip(weights, t, strict=True))
        weights, fresh = zip(
            *map_clients(learn_from_teacher, key, federation, cohort, nothing, own), strict=True
        )
        s = concatenate(fresh) if config.matrix_predictions == "after" else s

        slopes = towards_teachers(teaching.teachers(state.matrix, i), s)
        rows_of = concatenate(sizes(federation, cohort))
        matrix = teaching.learn(state.matrix, i, rows_of, slopes, hyper, 1 / federation.clients)
        up, down = traffic(cohort, len(rows), s.shape[-1])
        findings = {"weight": teaching.summary(matrix)}
        return State(hyper, scatter(state.weights, cohort, weights), matrix), Info(loss, up, down, findings)

    def distillation(model, t, hyper):
        """KL(t || softmax(f / T)), the mean over a mini-batch of public images; t (R, outputs)."""

        def loss(weights, batch, key):
            logits, stats = model.apply(
                weights.params, weights.stats, batch.x, train=model.names, key=key, mask=batch.mask
            )
            kl = optax.kl_divergence(jax.nn.log_softmax(logits / hyper.temperature), t[batch.position])
            return hyper.kl_weight * mean(kl, batch), stats

        return loss

    def towards_teachers(c, s):
        """d_nm of eq. 7: weights c (k, k), predictions s (k, R, outputs) -> (k, k)."""
        t = mix(c, s)
        if config.matrix_loss == "mse":
            return 2 * products(t - s, s) / s[0].size
        smallest = jnp.finfo(s.dtype).tiny
        ratio = jnp.log(jnp.maximum(t, smallest)) - jnp.log(jnp.maximum(s, smallest))
        return products(ratio + 1, s) / s.shape[1]

    def traffic(cohort, images, outputs):
        """Up: predictions, twice if fresh ones are sent; down: the teacher's, and the images' numbers."""
        said = images * outputs
        times = 2 if config.matrix_predictions == "after" else 1
        present = per_group(lambda slots: slots.mask.astype(jnp.int32), cohort.groups)
        up = per_group(lambda mask: mask * times * said, present)
        return up, per_group(lambda mask: mask * (said + images), present)

    return Algorithm(init, personal, step, personal, matrices=matrices)


def matrices(state):
    """Who teaches whom."""
    return {"teachers": state.matrix}


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
