"""CompFL on one client: adaptation, teachers and loss.

The equations are those of Xu et al. 2024. The other files here move the experts: `compfl` over a server,
`compfl_dd` by walks from client to client, `compfl_mm` by gossip.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class Cooperation(fl.Training):
    """Options of clients in all modes of CompFL."""

    lam: float = fl.within("[0, inf)", 1.0)
    """lambda, weight of the feature anchors."""
    mu: float = fl.within("[0, inf)", 1.0)
    """Weight of the distillation."""
    tau: float = fl.within("(0, inf)", 0.1)
    """Temperature of the teachers' weights."""
    head_lr: float = fl.client_rate("(0, inf)", 0.1)
    """eta_g, learning rate of the adapted heads."""
    align: bool = True
    """Use the feature anchors."""
    kd: bool = True
    """Use the ensemble distillation."""
    teachers: Literal["others", "all"] = "others"
    """Experts that teach: those that the client has except the one in training, or that one as well."""
    head_init: Literal["keep+ft", "keep-chosen+ft", "proto+ft", "proto", "keep"] = "keep+ft"
    """The own expert's head at the start of a round: kept (keep-chosen: so is another expert's that it
    trains), or prototypes; with or without one epoch."""
    anchor_reduction: Literal["mean", "sum"] = "mean"
    """Reduction over the dimensions of a feature, in the anchors' loss."""
    kd_direction: Literal["forward", "reverse"] = "forward"
    """KL(target || prediction), or the reverse, as the paper prints it."""
    accuracy_on: Literal["train", "validation"] = "train"
    """Rows on which the teachers' accuracies are measured."""


def runnable(models: Sequence[fl.Model]) -> tuple[tuple[int, ...], ...]:
    """Return, per group, the experts (group numbers) that its clients can run, by size, their own last."""
    order = sorted(range(len(models)), key=lambda j: (models[j].size, j))
    return tuple(tuple(order[: order.index(j) + 1]) for j in range(len(models)))


def divide(model: fl.Model, weights: fl.Weights, hyper: Cooperation) -> tuple[fl.Weights, fl.Weights]:
    """Split an expert into (phi: the head and statistics that stay on the client; theta: the rest)."""
    return fl.separate(weights, fl.head(model), hyper.bn_stats)


def replaced(entries: Sequence, place: int, new) -> tuple:
    """Return the entries with `new` in one place."""
    return tuple(new if i == place else entry for i, entry in enumerate(entries))


def needs_links(config: Cooperation) -> tuple[str, ...]:
    """Return the requirements of the modes without a server."""
    return ("links", *needs_validation(config))


def needs_validation(config: Cooperation) -> tuple[str, ...]:
    """Return the requirements of class means and of weighting teachers."""
    return ("classes", "validation") if config.accuracy_on == "validation" else ("classes",)


def begin(key, federation: fl.Federation, config: Cooperation) -> tuple[fl.PerGroup, fl.PerGroup]:
    """Return, per group, the heads (n_g, ...) on all experts that its clients can run, and theta_j."""
    check(config, federation)
    weights = fl.initial_weights(key, federation)
    parts = fl.per_group(lambda model, w: divide(model, w, config), federation.models, weights)
    heads, thetas = zip(*parts, strict=True)
    own = fl.each_client(key, heads, federation)

    def of_group(g, js):
        return *(federation.of_each(heads[j], g) for j in js[:-1]), own[g]

    return tuple(of_group(g, js) for g, js in enumerate(runnable(federation.models))), thetas


def check(config: Cooperation, federation: fl.Federation) -> None:
    """Refuse weights by validation accuracy where no row validates, and heads unlike class means."""
    made = len(federation.models) > 1 or config.head_init.startswith("proto")
    for model in federation.models:
        fl.require_plain_head(model)
        fl.class_means.require_vectors(model)
        if made and not fl.class_means.linear(model):
            raise fl.JaxflError(
                "CompFL makes heads from class means, with kernel (d, C) and bias (C,), but the last block "
                f"of {model.name} has other leaves; end it with a linear layer (jaxfl.models.blocks.Linear, "
                "or Flax's), or run it alone with --head-init keep+ft."
            )
    if config.accuracy_on == "validation":
        fl.validation.require(federation, "CompFL weighs teachers on", ", or take --accuracy-on train")


def require_statistics(config: Cooperation, federation: fl.Federation) -> None:
    """Refuse experts smaller than another whose BatchNorm statistics never travel.

    Clients run these, but may not have trained them.
    """
    *smaller, _ = sorted(federation.models, key=lambda model: model.size)
    found = [model.name for model in smaller if model.normalised]
    if config.bn_stats == "local" and found:
        raise fl.JaxflError(
            f"Clients with larger networks would run {found[0]} of others without BatchNorm statistics of "
            "their own, and bn_stats=local never sends any; leave it out, or give only the largest network "
            "BatchNorm."
        )


class Adapted(NamedTuple):
    """An expert as one client sees it at the start of a round."""

    weights: fl.Weights  # theta_j and the adapted head phi_ij
    anchors: jax.Array  # (C, d), zbar_jc; 0 for classes that the client lacks
    accuracy: jax.Array  # (), before it is scaled
    predictions: jax.Array  # (m, C), softmax of the logits on the client's rows


def adapt(key, client: fl.Client, weights: fl.Weights, hyper, *, own=True, chosen=False) -> Adapted:
    """Fit a client's head to the frozen extractor of an expert, `client.model` (eq. 6).

    `weights` are theta_j, and the client's last head on it. The head of an expert that is not the client's
    `own` is made anew and fitted. `chosen` () is whether the client trains the expert.
    """
    model, federation = client.model, client.federation
    (head,) = model.head.names

    def logits(weights, z):
        return model.head.apply(weights.params, {}, z, train=False)[0]

    # The extractor is frozen, so its features are computed once and the head is fitted to them.
    z = fl.class_means.features(model, weights, client.rows, client.size, federation)  # (m, d)
    y = federation.outputs(client, client.rows)
    anchors, _ = fl.class_means.class_means(z, y, client.size, model.classes)

    adapted, head_init = weights, hyper.head_init if own else "proto+ft"
    if head_init.startswith("proto"):
        made = fl.Weights(weights.params | {head: fl.class_means.prototype_head(anchors)}, weights.stats)
        kept = (client.size == 0) | (hyper.head_init == "keep-chosen+ft" and chosen)
        adapted = fl.tree.where(kept, weights, made)
    if head_init.endswith("ft"):

        def on_features(weights, batch, key):
            loss = optax.softmax_cross_entropy_with_integer_labels(logits(weights, batch.x), batch.y)
            return fl.mean(loss, batch), weights.stats

        adapted = fl.descend(
            on_features,
            adapted,
            key,
            fl.arrays(z, y, client.size),
            hyper,
            blocks=(head,),
            epochs=1,
            phase=None,
            optimizer=fl.sgd(hyper, hyper.head_lr),  # whichever optimiser trains the model
        ).weights

    scores, rows, size = logits(adapted, z), client.rows, client.size
    predictions = jax.nn.softmax(scores)
    if hyper.accuracy_on == "validation":
        rows, size = client.validation_rows, client.validation_size
        scores = logits(adapted, fl.class_means.features(model, weights, rows, size, federation))
    right = fl.count_correct(scores, federation.outputs(client, rows), size)
    accuracy = right.astype(z.dtype) / jnp.maximum(size, 1).astype(z.dtype)
    return Adapted(adapted, anchors, accuracy, predictions)


def newest(key, client: fl.Client, theta, phi, hyper, own=True) -> fl.Weights:
    """Return an expert of a client, by default its own, with this extractor and its adapted head."""
    return adapt(key, client, fl.tree.combine(theta, phi), hyper, own=own).weights


def received(
    key, federation: fl.Federation, cohort: fl.Cohort, thetas: fl.PerGroup, phis: fl.PerGroup, hyper
) -> fl.PerGroup:
    """Return predictors of clients that received their own expert's extractor, with adapted heads.

    `thetas` are the extractors per group, `phis` the clients' heads on their own expert (k_g, ...).
    """

    def client(key, client, theta, phi):
        return divide(client.model, newest(key, client, theta, phi, hyper), hyper)[0]

    adapted = fl.map_clients(client, key, federation, cohort, thetas, phis)
    return fl.per_group(lambda theta, phi: fl.Predictor(theta, phi, fl.predict), thetas, adapted)


class LocalRound(NamedTuple):
    """Results of a client's round, by the experts' places among those that it can run."""

    weights: dict[int, fl.Weights]  # weights of every expert in use, adapted or trained
    thetas: dict[int, fl.Weights]  # extractors of those that may have been trained
    phis: tuple[fl.Weights, ...]  # the client's heads on all experts
    loss: jax.Array  # (), mean over the steps of the training
    idle: jax.Array  # () bool, whether the training had no step
    teachers: tuple[list[fl.Weights], jax.Array]
    """Weights of every expert in use, adapted, and s (T,), 0 of those that do not teach."""


def local_round(
    keys,
    client: fl.Client,
    *,
    experts: Sequence[fl.Model],
    thetas: Mapping[int, fl.Weights],
    phis: Sequence[fl.Weights],
    trainable: Sequence[int],
    chosen=None,
    heard: Mapping[int, jax.Array],
    hyper: Cooperation,
    mu,
) -> LocalRound:
    """Run steps 1, 2 and 4 of a round on one client: adapt, weigh, update.

    Args:
      keys: (2,), keys of the adaptations and of the training.
      client: the owner of the rows.
      experts: the experts that the client can run, by size, its own last.
      thetas: extractors by their experts' places; experts left out neither teach nor learn in this mode.
      phis: the client's heads on all experts.
      trainable: the places of the experts that it may train.
      chosen: () int32, the place of the expert that it trains; by default the only one of `trainable`.
      heard: by the places of `thetas`, () bool: whether the client has the expert, downloaded now or seen
        before. These may teach; these and the chosen one are adapted.
      hyper: the options.
      mu: (), weight of the distillation in this round.
    """
    adapt_key, train_key = keys
    own = len(experts) - 1
    if chosen is None:
        (chosen,) = trainable

    def student(e, runs):
        """Return the client with expert e; without rows unless it runs, and then that costs nothing."""
        return dataclasses.replace(fl.only_if(runs, client), model=experts[e])

    of_use = {e: heard[e] | (chosen == e) for e in thetas}

    def start(e):
        key, weights = jax.random.fold_in(adapt_key, e), fl.tree.combine(thetas[e], phis[e])
        runs = student(e, of_use[e])
        return adapt(key, runs, weights, hyper, own=e == own, chosen=chosen == e)

    adapted = {e: start(e) for e in thetas}

    def train(e):
        teachers = [k for k in thetas if hyper.teachers == "all" or k != e]
        targets, weight = None, mu
        if hyper.kd and teachers:
            known = jnp.stack([of_use[k] for k in teachers])
            targets = ensemble([adapted[k] for k in teachers], known, hyper.tau)
            weight = jnp.where(known.any(), mu, 0)
        trainee = student(e, chosen == e)
        return fl.descend(
            objective(trainee.model, adapted[e].anchors, targets, hyper, weight),
            adapted[e].weights,
            train_key,
            fl.own_rows(trainee, hyper),
            hyper,
            phase=None,
        )

    trained = {e: train(e) for e in trainable}
    teach = jnp.stack([of_use[e] & (hyper.teachers == "all" or chosen != e) & (mu > 0) for e in thetas])
    accuracies = jnp.stack([of_expert.accuracy for of_expert in adapted.values()])
    weights = {e: of_expert.weights for e, of_expert in (adapted | trained).items()}
    parts = {e: divide(experts[e], of_expert, hyper) for e, of_expert in weights.items()}
    return LocalRound(
        weights,
        {e: parts[e][1] for e in trainable},
        tuple(
            fl.tree.where(of_use[e], parts[e][0], phi) if e in parts else phi for e, phi in enumerate(phis)
        ),
        fl.tree.total([of_expert.loss for of_expert in trained.values()]),
        fl.tree.total([of_expert.steps for of_expert in trained.values()]) == 0,
        (
            [of_expert.weights for of_expert in adapted.values()],
            teacher_weights(accuracies, teach, hyper.tau),
        ),
    )


def ensemble(teachers: list[Adapted], known, tau):
    """Return the teachers' predictions (m, C), weighted by their accuracies (eq. 7, the sum of eq. 3)."""
    s = teacher_weights(jnp.stack([teacher.accuracy for teacher in teachers]), known, tau)
    return fl.tree.weighted_sum(s, jnp.stack([teacher.predictions for teacher in teachers]))


def teacher_weights(accuracies, known, tau):
    """Return eq. 7: (T,) accuracies, (T,) bool -> (T,) weights of the known, scaled to [0, 1] first.

    The scaled accuracies are all 1 if equal; the weights are all 0 if no teacher is known.
    """
    low = jnp.min(accuracies, initial=1, where=known)
    high = jnp.max(accuracies, initial=0, where=known)
    scaled = jnp.where(high > low, (accuracies - low) / jnp.where(high > low, high - low, 1), 1)
    return jax.nn.softmax(scaled / tau, where=known)


def teaching(models: Sequence[fl.Model], js: Sequence[int], teachers) -> fl.Predictor:
    """Return what teaches the clients that can run experts js, for `Info.teacher`: sum_j s_j p_j of eq. 3.

    `teachers` are weights and s, (k, ...), see `LocalRound`; s is 0 of a client without teachers.
    """

    def predict(model, nothing, own, x):
        weights, s = own
        logits = [
            models[j].apply(w.params, w.stats, x, train=False)[0] for j, w in zip(js, weights, strict=True)
        ]
        return jnp.where(s.any(), fl.tree.weighted_sum(s, jax.nn.softmax(jnp.stack(logits))), jnp.nan)

    return fl.Predictor(None, teachers, predict)


def objective(model: fl.Model, anchors, taught, hyper, mu) -> Callable:
    """Return the loss L = CE + lam L_f + mu L_kd (eq. 4), with anchors (C, d) as in `Adapted`.

    `taught` (m, C) are the teachers' weighted predictions on the client's rows; None without teachers.
    """

    def loss(weights, batch, key):
        params, stats = weights
        z, new_stats = model.body.apply(params, stats, batch.x, train=True, key=key, mask=batch.mask)
        scores, _ = model.head.apply(params, stats, z, train=True, key=key)
        value = fl.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch.y), batch)
        if hyper.align:  # eq. 2
            away = jnp.square(z - anchors[batch.y])
            away = away.mean(1) if hyper.anchor_reduction == "mean" else away.sum(1)
            value += hyper.lam * fl.mean(away, batch)
        if taught is not None:  # eq. 3
            truth = jax.nn.one_hot(batch.y, model.classes, dtype=z.dtype)
            target = 0.5 * truth + 0.5 * taught[batch.position]
            predicted = jax.nn.log_softmax(scores)
            if hyper.kd_direction == "forward":
                divergence = optax.losses.kl_divergence(predicted, target)
            else:
                log_target = jnp.log(jnp.maximum(target, jnp.finfo(z.dtype).tiny))
                divergence = optax.losses.kl_divergence_with_log_targets(log_target, predicted)
            value += mu * fl.mean(divergence, batch)
        return value, stats | new_stats

    return loss
