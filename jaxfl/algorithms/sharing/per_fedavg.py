"""Per-FedAvg: a global model that one step on a client's own data turns into a good one (MAML).

Fallah et al. 2020, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", arXiv:2002.07948, Algorithm 1. The federation minimises the mean over clients of
f_i(w - alpha grad f_i(w)). In every local step client i draws independent batches b, b' (and b''):

    w~ <- w - alpha grad f(w; b)
    g  <- grad f(w~; b')
    w  <- w - beta g                                                                      fo
    w  <- w - beta [g - alpha (grad f(w + delta g; b'') - grad f(w - delta g; b'')) / (2 delta)]     hf
    w  <- w - beta [g - alpha Hessian f(w; b) g]                                          exact
    w  <- mean_i w_i

As in the paper, fo drops second derivatives and hf replaces them by differences of gradients. The paper's
(I - alpha Hessian(b'')) g with a third batch is not offered: exact differentiates through the inner step, so
the Hessian is that of b. A client deploys w~, its w after one step of adaptation (with ``adapt="epoch"``, as
in FL-bench, after a whole epoch of such steps).

beta is `lr`. The optimiser, momentum, weight decay and clipping of local training act on the outer step;
inner step and adaptation are plain gradient steps. Each batch is drawn from its own order of all rows. An
epoch has half as many steps as FedAvg's (a third under hf), rounded down but at least one, so it sees about
as many rows; ``--steps`` counts outer steps. The server's mean is uniform, per architecture. BatchNorm
normalises by the batch in all passes; its running statistics come from the pass on b', the one of the adapted
model. The reported loss is f(w~; b').
"""

import dataclasses
from typing import Literal

import jax
import optax

from jaxfl import fl


@fl.options
class PerFedAvg(fl.Training):
    """Options of Per-FedAvg."""

    variant: Literal["fo", "hf", "exact"] = "fo"
    """Second derivatives: dropped, from differences of gradients, or exact."""
    alpha: float | None = fl.within("[0, inf)", None)
    """Learning rate of the inner step and of the adaptation before use; by default lr, which in rounds may
    be on a schedule."""
    delta: float = fl.within("(0, inf)", 1e-3)
    """Step size of the differences under variant="hf"."""
    adapt: Literal["step", "epoch"] = "step"
    """Adaptation of a copy before use: one step on one batch, or one epoch of steps."""


def inner_rate(hyper: PerFedAvg):
    """Return the learning rate alpha."""
    return hyper.lr if hyper.alpha is None else hyper.alpha


def meta_loss(participant: fl.Participant, variant: str):
    """Return the loss f(w~; b') of w on batches (b, b'[, b'']), with the gradient of the variant."""
    model, hyper = participant.model, participant.hyper
    if variant == "hf":  # in a difference of losses few digits are left
        model = dataclasses.replace(model, precision="full")
    plain = fl.task_loss(model)
    alpha, stop = inner_rate(hyper), jax.lax.stop_gradient

    def loss(w, batches, key):
        def f(params, part):
            return plain(fl.Weights(params, w.stats), batches[part], jax.random.fold_in(key, part))

        start = w.params if variant == "exact" else stop(w.params)
        inner, _ = jax.grad(f, has_aux=True)(start, 0)
        adapted = optax.tree.add_scale(w.params, -alpha, inner)
        if variant != "hf":
            return f(adapted, 1)
        (value, stats), g = jax.value_and_grad(f, has_aux=True)(stop(adapted), 1)
        ahead, behind = (
            f(optax.tree.add_scale(w.params, way, g), 2)[0] for way in (hyper.delta, -hyper.delta)
        )
        # The surrogate adds only its gradient, the variant's; its value is subtracted again.
        surrogate = optax.tree.vdot(g, w.params) - alpha * (ahead - behind) / (2 * hyper.delta)
        return value + (surrogate - stop(surrogate)), stats

    return loss


def build(config: PerFedAvg) -> fl.Algorithm:
    """Build FedAvg with another loss on independent batches, and an adaptation before use."""
    batches = 3 if config.variant == "hf" else 2

    def train(key, participant):
        rows = fl.own_rows(participant.client, participant.hyper)
        loss = meta_loss(participant, config.variant)
        return fl.descend(loss, participant.received, key, (rows,) * batches, participant.hyper)

    def adapt(key, participant):
        hyper = dataclasses.replace(participant.hyper, clip_norm=None)
        return fl.descend(
            fl.task_loss(participant.model),
            participant.received,
            key,
            fl.own_rows(participant.client, hyper),
            hyper,
            epochs=fl.Steps(1) if config.adapt == "step" else 1,
            optimizer=optax.sgd(inner_rate(hyper)),
        )

    algorithm = fl.sharing(config, train=train, tune=adapt, memory=fl.Memory(by_rows=False))
    # No "rows": a gradient is of rows of several batches together.
    return algorithm._replace(wire=("messages", "mean", "memory"))


per_fedavg = fl.Method("per-fedavg", build, PerFedAvg)
