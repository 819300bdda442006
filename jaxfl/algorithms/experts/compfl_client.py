"""CompFL on one client: which expert it trains, what it adapts, whom it learns from, what it minimises.

The equations are those of Xu et al. 2024; `compfl` beside it has the whole round and the options.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.authoring import Client, Federation, Model, Weights, arrays, count_correct, descend, mean, sgd
from jaxfl.mechanisms.class_means import class_means, features, outputs, prototype_head


class Adapted(NamedTuple):
    """An expert as one client sees it at the start of a round."""

    weights: Weights  # theta_j and the adapted head phi_ij
    anchors: jax.Array  # (C, d), zbar_jc; 0 for classes that the client lacks
    accuracy: jax.Array  # (), a_j
    predictions: jax.Array  # (m, C), softmax of the logits on the client's rows


def select(key, eps, experts: int):
    """Eq. 8: which of a client's experts 0..experts-1 it trains; its own is the last. () int32."""
    explore, which = jax.random.split(key)
    drawn = jax.random.randint(which, (), 0, experts, jnp.int32)
    return jnp.where(jax.random.bernoulli(explore, eps), drawn, jnp.int32(experts - 1))


def adapt(key, client: Client, federation: Federation, weights: Weights, hyper) -> Adapted:
    """Eq. 6: fit a client's head to an extractor that stays as it is.

    Args:
      key: of this client and expert.
      client: whose rows; its `model` is the expert.
      federation: the images.
      weights: theta_j, and the client's last head on it.
      hyper: the options of CompFL.
    """
    model = client.model
    (head,) = model.head.names

    def logits(weights, z):
        return model.head.apply(weights.params, {}, z, train=False)[0]

    # The extractor is frozen, so its features are computed once and the head is fitted to them.
    z = features(model, weights, client.rows, client.size, federation)  # (m, d)
    y = outputs(client, federation)
    anchors, _ = class_means(z, y, client.size, model.classes)

    adapted = weights
    if hyper.head_init.startswith("proto"):
        adapted = Weights(weights.params | {head: prototype_head(anchors)}, weights.stats)
    if hyper.head_init.endswith("ft"):

        def on_features(weights, batch, key):
            loss = optax.softmax_cross_entropy_with_integer_labels(logits(weights, batch.x), batch.y)
            return mean(loss, batch), weights.stats

        adapted = descend(
            on_features,
            adapted,
            key,
            arrays(z, y, client.size),
            hyper,
            blocks=(head,),
            epochs=1,
            phase=None,
            optimizer=sgd(hyper, hyper.head_lr),  # whatever trains the model
        ).weights

    scores, rows, size = logits(adapted, z), client.rows, client.size
    predictions = jax.nn.softmax(scores)
    if hyper.accuracy_on == "validation":
        rows, size = client.validation_rows, client.validation_size
        scores = logits(adapted, features(model, weights, rows, size, federation))
    right = count_correct(scores, client.relabel[federation.labels[rows]], size)
    accuracy = right.astype(z.dtype) / jnp.maximum(size, 1).astype(z.dtype)
    return Adapted(adapted, anchors, accuracy, predictions)


def ensemble(teachers: list[Adapted], tau):
    """Eq. 7 and the sum of eq. 3: the teachers' predictions (m, C), weighted by their accuracies."""
    s = teacher_weights(jnp.stack([teacher.accuracy for teacher in teachers]), tau)
    return jnp.tensordot(s, jnp.stack([teacher.predictions for teacher in teachers]), 1)


def teacher_weights(accuracies, tau):
    """Eq. 7: (T,) accuracies -> (T,) weights; min-max scaled to [0, 1], all 1 where they are equal."""
    low, high = accuracies.min(), accuracies.max()
    scaled = jnp.where(high > low, (accuracies - low) / jnp.where(high > low, high - low, 1), 1)
    return jax.nn.softmax(scaled / tau)


def objective(model: Model, anchors, taught, hyper, mu) -> Callable:
    """Eq. 4: L = CE + lam L_f + mu L_kd.

    Args:
      model: the expert that is trained.
      anchors: (C, d), see `Adapted`.
      taught: (m, C), the teachers' weighted prediction on the client's rows; None without teachers.
      hyper: the options of CompFL.
      mu: weight of the distillation in this round.
    """

    def loss(weights, batch, key):
        params, stats = weights
        z, new_stats = model.body.apply(params, stats, batch.x, train=True, key=key, mask=batch.mask)
        scores, _ = model.head.apply(params, stats, z, train=True)
        value = mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch.y), batch)
        if hyper.align:  # eq. 2
            away = jnp.square(z - anchors[batch.y])
            away = away.mean(1) if hyper.anchor_reduction == "mean" else away.sum(1)
            value += hyper.lam * mean(away, batch)
        if taught is not None:  # eq. 3
            truth = jax.nn.one_hot(batch.y, model.classes, dtype=z.dtype)
            target = 0.5 * truth + 0.5 * taught[batch.position]
            predicted = jax.nn.log_softmax(scores)
            if hyper.kd_direction == "forward":
                divergence = optax.losses.kl_divergence(predicted, target)
            else:
                log_target = jnp.log(jnp.maximum(target, jnp.finfo(z.dtype).tiny))
                divergence = optax.losses.kl_divergence_with_log_targets(log_target, predicted)
            value += mu * mean(divergence, batch)
        return value, stats | new_stats

    return loss
