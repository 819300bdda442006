"""Exchange of predictions on public images: clients of any architecture teach each other.

In a round of the cohort S_t, with w_n client n's model, D_r some public images and T the temperature,

    w_n <- LocalSGD(w_n)                                            E epochs
    s_n  =  softmax(f(w_n, D_r) / T), or the logits f(w_n, D_r)
    t_n  =  sum_m C[n, m] s_m, or what a method makes of these      m in S_t
    w_n <- SGD over the distance of f(w_n, D_r) from t_n            R passes, rate distill_lr

A method sets the weights C and how the server learns them. A client deploys w_n, and receives nothing before
it trains. Traffic: predictions up; teachers, and the indices of their images, down.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.config.options import client_rate, options, within
from jaxfl.core import tree
from jaxfl.core.client_map import cohort_rows, gather, map_clients, per_group, scatter
from jaxfl.core.examples import own_rows, public_rows
from jaxfl.core.protocol import Algorithm, Info, Step
from jaxfl.core.traffic import sent_down
from jaxfl.core.training import OPTIMIZERS, Training, descend, task_loss
from jaxfl.data.federation import NOBODY, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms import ensembles, own_models, public_images, wire
from jaxfl.mechanisms.losses import absolute_error, distillation
from jaxfl.mechanisms.mixing import ids, put_pairs, split


@options
class Exchange(Training):
    """Options of methods whose clients exchange predictions."""

    public_size: int = within("[1, inf)", 3000)
    """|D_r|, public images per round; all if there are fewer."""
    public_batch: int = within("[1, inf)", 256)
    """Public images per mini-batch."""
    distill_epochs: int = within("[0, inf)", 1)
    """R, passes over the round's public images."""
    distill_lr: float | None = client_rate("[0, inf)", None)
    """eta_2, learning rate of distillation, which uses the optimiser of training; by default also its rate. 0
    is Local, except that public images move BatchNorm's running statistics."""
    temperature: float = within("(0, inf)", 1.0)
    """T of all exchanged predictions. KT-pFL's code has 10 for the learned matrix, beside images that are not
    normalised; on normalised ones that leaves a hundredth of the pull, which shrinks as 1/T^2."""
    kl_weight: float = within("[0, inf)", 1.0)
    """Factor on the distillation loss; the usual one is T^2."""


class Signal(NamedTuple):
    """The message that clients exchange, and the loss of learning from it.

    Args:
      encode: ``(task, logits (R, outputs), hyper) -> s_n (R, outputs)``; of tokens (R, T, outputs).
      loss: ``(model, t_n, hyper) -> loss`` of learning from a teacher, see `jaxfl.core.training.descend`.
    """

    encode: Callable
    loss: Callable


SOFT_PREDICTIONS = Signal(
    lambda task, logits, hyper: task.soft(logits, hyper.temperature),
    lambda model, t, hyper: distillation(model, t, hyper.temperature, hyper.kl_weight),
)


LOGITS = Signal(
    lambda task, logits, hyper: logits,
    lambda model, t, hyper: absolute_error(model, t),
)


class State(NamedTuple):
    """The clients' models per group (n_g, ...), and the matrix C (N, N) by their ids."""

    hyper: Any
    weights: PerGroup
    matrix: jax.Array


class RoundPredictions(NamedTuple):
    """The server's knowledge at the end of a round, after distillation.

    Args:
      i: (k,) ids of the cohort; NOBODY in an empty place, and for who joins without training rows.
      share_of_all: (k,) float, a client's share of all clients' training rows; 0 in an empty place.
      clients: () float, number of clients that are not newcomers.
      c: (k, k), the teachers' weights.
      t: (k, R, outputs), the teachers.
      s: (k, R, outputs), predictions; those of the distilled models if the method asks for them.
    """

    i: jax.Array
    share_of_all: jax.Array
    clients: jax.Array
    c: jax.Array
    t: jax.Array
    s: jax.Array


def exchanging(
    config: Exchange,
    *,
    weigh: Callable,
    teach: Callable = lambda c, s, hyper: tree.weighted_sum(c, s),
    start: Callable = lambda federation: jnp.zeros((federation.clients, federation.clients)),
    learn: Callable = lambda matrix, seen, hyper: put_pairs(matrix, seen.i, seen.i, seen.c),
    resend: bool = False,
    signal: Signal = SOFT_PREDICTIONS,
    findings: Callable = lambda matrix, seen, federation: {},
    prepare: Step | None = None,
) -> Algorithm:
    """Build a method whose clients exchange predictions.

    Args:
      config: the method's options.
      weigh: ``(matrix, i, s, hyper) -> C`` (k, k) for the clients of the round; its rows sum to 1.
      teach: ``(c (..., k), s (k, R, outputs), hyper) -> t (..., R, outputs)``, what clients learn whose
        teachers weigh c; by default the weighted mean.
      start: ``federation -> matrix`` (N, N) before the first round; by default nobody has taught yet.
      learn: ``(matrix, RoundPredictions, hyper) -> matrix``, the server's step; by default the matrix says
        how clients taught each other when they last met.
      resend: whether `learn` needs predictions of the distilled models, which clients then send, too.
      signal: the message that clients exchange, and its loss.
      findings: ``(matrix, RoundPredictions, federation) -> findings`` of the round, see `Info.findings`.
      prepare: see `Algorithm`.
    """

    def init(key, federation, hyper):
        if resend and federation.wire and federation.wire.privacy:
            raise JaxflError(
                "--privacy gaussian covers one message a round, but the method's clients send predictions "
                "twice; take mnfl,matrix_predictions=before, or leave out --privacy."
            )
        return State(hyper, own_models.start(key, federation), start(federation))

    def step(key, state, federation, cohort):
        hyper = state.hyper
        rows = public_images.subset(key, federation, config.public_size)
        i, n = map(jnp.concatenate, (ids(federation, cohort), cohort_rows(federation, cohort)))
        i = jnp.where(n > 0, i, NOBODY)  # who joins without rows has learnt nothing to tell
        share = n / jnp.maximum(federation.training_rows.sum(), 1)
        rate = hyper.lr if hyper.distill_lr is None else hyper.distill_lr
        taught = OPTIMIZERS[config.optimizer](dataclasses.replace(hyper, lr=rate))

        def encoded(w, client):
            return signal.encode(client.model.task, public_images.logits(w, client, rows), hyper)

        def learn_alone(key, client, nothing, w):
            trained = descend(task_loss(client.model), w, key, own_rows(client, hyper), hyper)
            message = wire.sent(key, client, encoded(trained.weights, client))
            return trained.weights, trained.loss, trained.steps == 0, message

        def learn_from_teacher(key, client, nothing, own):
            w, t = own
            w = descend(
                signal.loss(client.model, t, hyper),
                w,
                key,
                public_rows(rows, client),
                hyper,
                epochs=config.distill_epochs,
                batch_size=config.public_batch,
                phase=1,
                optimizer=taught,
            ).weights
            again = jax.random.fold_in(key, 1)
            return w, wire.sent(again, client, encoded(w, client)) if resend else None

        own = gather(state.weights, cohort)
        outputs = map_clients(learn_alone, key, federation, cohort, own=own)
        learnt, loss, idle, s = zip(*outputs, strict=True)
        s = jnp.concatenate(s)
        c = weigh(state.matrix, i, s, hyper)
        t = teach(c, s, hyper)
        own = tuple(zip(learnt, split(t, cohort), strict=True))
        distilled = map_clients(learn_from_teacher, key, federation, cohort, own=own)
        weights, after = zip(*distilled, strict=True)
        teacher = ensembles.teachers(federation.models, learnt, mixed, (hyper,), split(c, cohort))
        clients = federation.participants.sum()
        seen = RoundPredictions(i, share, clients, c, t, jnp.concatenate(after) if resend else s)
        matrix = learn(state.matrix, seen, hyper)

        def every(message):
            return (message,) * len(federation.groups)

        up = wire.up(federation, cohort, every(jax.ShapeDtypeStruct(s.shape[1:], s.dtype)))
        return State(hyper, scatter(state.weights, cohort, weights), matrix), Info(
            loss,
            up=per_group(lambda units: {2: units}, up) if resend else up,
            down=sent_down(cohort, every(s[0].size + len(rows))),
            findings=findings(matrix, seen, federation),
            trained=own_models.predictors(learnt),
            teacher=teacher,
            idle=idle,
        )

    def mixed(task, logits, hyper, c):
        return teach(c, signal.encode(task, logits, hyper), hyper)

    return Algorithm(
        init,
        own_models.personal,
        step,
        own_models.personal,
        matrices=lambda state: {"teachers": state.matrix},
        prepare=prepare,
        wire=("messages", "rows"),
    )
