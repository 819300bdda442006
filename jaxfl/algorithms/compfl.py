"""CompFL in server mode: several expert architectures train each other.

Xu et al. 2024, "Cooperative Multiple Model Training for Personalized Federated Learning over Heterogeneous
Devices" (FedKDD), Algorithm 1. Experts j = 1..M are ordered by size; client i owns expert j_i and may train
any smaller one. theta_j is the shared extractor of expert j, phi_ij client i's head on it. In a round:

1. adapt (eq. 6)     zbar_jc = mean of z_j(x) over the client's rows of class c      prototypes, anchors
                     phi_ij  <- zbar_jc / ||zbar_jc||, bias 0; then one epoch of SGD with head_lr
2. weigh (eq. 7)     s_j = softmax(a_j / tau), a_j the accuracies scaled to [0, 1] over the teachers
3. select (eq. 8)    j^ = j_i with probability 1 - eps, else uniform over 1..j_i
4. update (eq. 4)    (theta_j^, phi_ij^) <- SGD over L = CE + lam L_f + mu L_kd
                     L_f  = mean_k ||z_k - zbar_y_k||^2                              eq. 2
                     L_kd = mean_k KL(t_k || p_k)                                    eq. 3
                     t_k  = y_k / 2 + sum_j s_j p_jk / 2                             teachers: j <= j_i, j != j^
5. aggregate (eq. 10) theta_j <- theta_j + sum_i n_i (theta_ij - theta_j) / sum_i n_i over i with j^ = j

A client deploys the model as trained if it trained its own expert in the last round, otherwise the newest
theta_ji under an adapted head; it receives the latter.

Where the paper leaves room: eq. 3 prints KL(p || t), we take the usual KL(t || p) (``kd_direction``); eq. 2
sums over the feature's dimensions, we average (``anchor_reduction``), as in the first author's other code;
accuracies are those on the training rows unless ``accuracy_on="validation"``; distillation starts after a
warm-up. Greedy selection has no warm-up: before distillation starts a client downloads its own expert and
the one it drew, afterwards all that it can run (only its own if neither ``kd`` nor ``greedy`` is on).
With align, greedy and kd off and ``head_init="keep"`` this is FedPer, scored after local training.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import tree
from jaxfl.algorithms.partial_sharing import predict
from jaxfl.clientmap import gather, map_clients, per_group, scatter
from jaxfl.models.model import Weights
from jaxfl.options import options, within
from jaxfl.training import Training, descend, initial_weights, mean, sweep
from jaxfl.types import Algorithm, Info, Method, PerGroup, Predictor


@options
class CompFL(Training):
    """Options of CompFL."""

    lam: float = within("[0, inf)", 1.0)
    """lambda, weight of the feature anchors."""
    mu: float = within("[0, inf)", 1.0)
    """Weight of the distillation."""
    eps: float = within("[0, 1]", 0.3)
    """epsilon, how often a client draws the expert to train instead of taking its own."""
    tau: float = within("(0, inf)", 0.1)
    """Temperature of the teachers' weights."""
    head_lr: float = within("(0, inf)", 0.1)
    """eta_g, learning rate of the adapted heads."""
    warmup: float = within("[0, 1]", 0.1)
    """Share of the rounds before distillation starts."""
    align: bool = True
    """Use the feature anchors."""
    greedy: bool = True
    """Let clients train experts smaller than their own."""
    kd: bool = True
    """Use the ensemble distillation."""
    head_init: Literal["proto+ft", "proto", "keep+ft", "keep"] = "proto+ft"
    """Heads at the start of a round: prototypes or the last ones, with or without one epoch."""
    anchor_reduction: Literal["mean", "sum"] = "mean"
    """Over the dimensions of a feature."""
    kd_direction: Literal["forward", "reverse"] = "forward"
    """KL(target || prediction), or the reverse as printed."""
    accuracy_on: Literal["train", "validation"] = "train"
    """The rows on which teachers are weighed."""


class State(NamedTuple):
    """What lives between rounds.

    Args:
      hyper: the options.
      experts: per group (= expert j), theta_j: the shared leaves.
      heads: per group, per expert that its clients can run, phi_ij (n_g, ...).
      trained: per group (n_g, ...), the client's own expert after its last round.
      last: per group (n_g,) int32, the round in which the client last trained it; -1 at the start.
    """

    hyper: CompFL
    experts: PerGroup
    heads: PerGroup
    trained: PerGroup
    last: PerGroup


class Adapted(NamedTuple):
    """An expert as one client sees it at the start of a round."""

    weights: Weights  # theta_j and the adapted head
    anchors: jax.Array  # (C, d), zbar_jc; 0 for classes that the client lacks
    accuracy: jax.Array  # (), a_j
    predictions: jax.Array  # (m, C), softmax of the logits on the client's rows


def runnable(models) -> tuple[tuple[int, ...], ...]:
    """Per group, the experts (numbers of groups) that its clients can run, by size, their own last."""
    order = sorted(range(len(models)), key=lambda j: (models[j].size, j))
    return tuple(tuple(order[: order.index(j) + 1]) for j in range(len(models)))


def select(key, eps, experts: int):
    """Eq. 8: which of a client's experts 0..experts-1 it trains; its own is the last. () int32."""
    explore, which = jax.random.split(key)
    drawn = jax.random.randint(which, (), 0, experts, jnp.int32)
    return jnp.where(jax.random.bernoulli(explore, eps), drawn, jnp.int32(experts - 1))


def teacher_weights(accuracies, tau):
    """Eq. 7: (T,) accuracies -> (T,) weights; min-max scaled to [0, 1], all 1 where they are equal."""
    low, high = accuracies.min(), accuracies.max()
    scaled = jnp.where(high > low, (accuracies - low) / jnp.where(high > low, high - low, 1), 1)
    return jax.nn.softmax(scaled / tau)


def build(config: CompFL) -> Algorithm:
    """Build CompFL for the federation's architectures."""
    cooperative = config.kd or config.greedy

    def divide(model, weights):
        """(kept, shared) leaves of one expert."""
        return tree.split(
            weights,
            lambda path: path[1] in model.head.names
            or (path[0] == "stats" and config.bn_stats == "local"),
        )

    def adapt(key, client, federation, weights, hyper) -> Adapted:
        model = client.model

        def features(x):
            return model.body.apply(weights.params, weights.stats, x, train=False)[0]

        def logits(params, z):
            return model.head.apply(params, {}, z, train=False)[0]

        z = sweep(features, client.rows, client.size, federation)
        y = client.relabel[federation.labels[client.rows]]
        real = jnp.arange(len(y), dtype=jnp.int32) < client.size
        member = jax.nn.one_hot(jnp.where(real, y, -1), model.classes, dtype=z.dtype)  # (m, C)
        anchors = (member.T @ z) / jnp.maximum(member.sum(0), 1)[:, None]

        (head,) = model.head.names
        if config.head_init.startswith("proto"):
            length = jnp.linalg.norm(anchors, axis=1, keepdims=True)
            kernel = (anchors / jnp.where(length > 0, length, 1)).T
            prototypes = {"kernel": kernel, "bias": jnp.zeros(model.classes, z.dtype)}
            weights = weights._replace(params=weights.params | {head: prototypes})
        if config.head_init.endswith("ft"):

            def on_features(weights, batch, key):
                scores = logits(weights.params, z[batch.position])
                loss = optax.softmax_cross_entropy_with_integer_labels(scores, batch.y)
                return mean(loss, batch), weights.stats

            slow_head = dataclasses.replace(hyper, lr=hyper.head_lr)
            weights, _ = descend(
                on_features, weights, key, client, federation, slow_head, blocks=(head,), epochs=1
            )

        scores = logits(weights.params, z)
        correct = (scores.argmax(1).astype(y.dtype) == y) & real
        if config.accuracy_on == "validation":
            rows, size = client.validation_rows, client.validation_size
            scored = sweep(lambda x: logits(weights.params, features(x)), rows, size, federation)
            held_out = jnp.arange(len(rows), dtype=jnp.int32) < size
            labels = client.relabel[federation.labels[rows]]
            correct = (scored.argmax(1).astype(y.dtype) == labels) & held_out
        else:
            size = client.size
        accuracy = correct.sum(dtype=z.dtype) / jnp.maximum(size, 1).astype(z.dtype)
        return Adapted(weights, anchors, accuracy, jax.nn.softmax(scores))

    def objective(model, anchors, teachers, hyper, mu):
        """L = CE + lam L_f + mu L_kd; `teachers` (m, C) is their weighted prediction, or None."""

        def loss(weights, batch, key):
            params, stats = weights
            z, new_stats = model.body.apply(
                params, stats, batch.x, train=True, key=key, mask=batch.mask
            )
            scores, _ = model.head.apply(params, stats, z, train=True)
            value = mean(
                optax.softmax_cross_entropy_with_integer_labels(scores, batch.y), batch
            )
            if config.align:
                away = jnp.square(z - anchors[batch.y])
                away = away.mean(1) if config.anchor_reduction == "mean" else away.sum(1)
                value += hyper.lam * mean(away, batch)
            if teachers is not None:
                truth = jax.nn.one_hot(batch.y, model.classes, dtype=z.dtype)
                target = 0.5 * truth + 0.5 * teachers[batch.position]
                predicted = jax.nn.log_softmax(scores)
                if config.kd_direction == "forward":
                    divergence = optax.losses.kl_divergence(predicted, target)
                else:
                    log_target = jnp.log(jnp.maximum(target, jnp.finfo(z.dtype).tiny))
                    divergence = optax.losses.kl_divergence_with_log_targets(log_target, predicted)
                value += mu * mean(divergence, batch)
            return value, stats | new_stats

        return loss

    def init(key, federation, hyper):
        models, groups = federation.models, federation.groups
        weights = initial_weights(key, federation)
        kept, experts = zip(*per_group(divide, models, weights), strict=True)
        return State(
            hyper,
            experts,
            heads=per_group(
                lambda group, js: tuple(tree.stack(kept[j], len(group.id)) for j in js),
                groups,
                runnable(models),
            ),
            trained=per_group(lambda group, w: tree.stack(w, len(group.id)), groups, weights),
            last=per_group(lambda group: jnp.full(len(group.id), -1, jnp.int32), groups),
        )

    def newest(key, client, federation, hyper, theta, heads):
        """A client's own expert: the newest extractor under an adapted head."""
        weights = tree.combine(theta, heads[-1])
        return adapt(key, client, federation, weights, hyper).weights

    def receive(key, state, federation, cohort):
        def client(key, client, theta, heads):
            weights = newest(key, client, federation, state.hyper, theta, heads)
            return divide(client.model, weights)[0]

        own = gather(state.heads, cohort)
        heads = map_clients(client, key, federation, cohort, state.experts, own)
        return per_group(
            lambda theta, head: Predictor(theta, head, predict), state.experts, heads
        )

    def step(key, state, federation, cohort):
        hyper, models = state.hyper, federation.models
        dtype = federation.mean.dtype
        warm = cohort.round.astype(dtype) >= hyper.warmup * cohort.rounds
        cost = tuple(tree.scalars(theta) for theta in state.experts)

        def client(key, client, experts, heads):
            js = experts  # the numbers of the experts that this client can run, its own last
            adapt_key, select_key, train_key = jax.random.split(key, 3)
            chosen = jnp.int32(len(js) - 1)
            if config.greedy:
                chosen = select(select_key, hyper.eps, len(js))

            def of_expert(e):
                student = dataclasses.replace(client, model=models[js[e]])
                weights = tree.combine(state.experts[js[e]], heads[e])
                expert_key = jax.random.fold_in(adapt_key, e)
                return adapt(expert_key, student, federation, weights, hyper)

            own = len(js) - 1
            used = range(len(js)) if cooperative else (own,)
            adapted = {e: of_expert(e) for e in used}

            def train(e):
                """Train expert e if it is the chosen one; otherwise run no batch."""
                others = [k for k in used if k != e]
                teachers = None
                if config.kd and others:
                    s = teacher_weights(
                        jnp.stack([adapted[k].accuracy for k in others]), hyper.tau
                    )
                    teachers = sum(
                        s[n] * adapted[k].predictions for n, k in enumerate(others)
                    )
                mu = jnp.where(warm, hyper.mu, 0)
                model = models[js[e]]
                trainee = dataclasses.replace(
                    client, size=jnp.where(chosen == e, client.size, 0), model=model
                )
                return descend(
                    objective(model, adapted[e].anchors, teachers, hyper, mu),
                    adapted[e].weights,
                    train_key,
                    trainee,
                    federation,
                    hyper,
                    blocks=model.names,
                    epochs=config.epochs,
                )

            trained = {e: train(e) for e in used}
            parts = {e: divide(models[js[e]], weights) for e, (weights, _) in trained.items()}
            present = (client.size > 0).astype(jnp.int32)
            costs = jnp.asarray([cost[j] for j in js], jnp.int32)
            own_and_drawn = costs[own] + jnp.where(chosen == own, 0, costs[chosen])
            download = jnp.where(warm & cooperative, costs.sum(dtype=jnp.int32), own_and_drawn)
            return {
                "heads": tuple(parts[e][0] if e in parts else heads[e] for e in range(len(js))),
                "experts": {js[e]: part[1] for e, part in parts.items()},
                "weight": {
                    js[e]: jnp.where(chosen == e, client.size, 0).astype(dtype) for e in used
                },
                "own": trained[own][0],
                "is_own": chosen == own,
                "loss": sum(loss for _, loss in trained.values()),
                "up": present * costs[chosen],
                "down": present * download,
            }

        own = gather(state.heads, cohort)
        done = map_clients(client, key, federation, cohort, runnable(models), own)

        def of(name):
            return tuple(out[name] for out in done)

        def aggregate(j, theta):
            """Expert j over the clients of all groups that trained it."""
            stacks = [out["experts"][j] for out in done if j in out["experts"]]
            weights = [out["weight"][j] for out in done if j in out["weight"]]
            joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stacks)
            return tree.weighted_mean(joined, jnp.concatenate(weights), theta)

        last = per_group(
            lambda out, before: jnp.where(out["is_own"], cohort.round, before),
            done,
            gather(state.last, cohort),
        )
        return State(
            hyper,
            experts=tuple(aggregate(j, theta) for j, theta in enumerate(state.experts)),
            heads=scatter(state.heads, cohort, of("heads")),
            trained=scatter(state.trained, cohort, of("own")),
            last=scatter(state.last, cohort, last),
        ), Info(loss=of("loss"), up=of("up"), down=of("down"))

    def personal(key, state, federation, cohort):
        def client(key, client, theta, own):
            heads, trained, last = own
            fresh = last == cohort.round
            # A client whose model is fresh needs no adaptation: with size 0 that costs nothing.
            idle = dataclasses.replace(client, size=jnp.where(fresh, 0, client.size))
            adapted = newest(key, idle, federation, state.hyper, theta, heads)
            return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), trained, adapted)

        own = tuple(zip(state.heads, state.trained, state.last, strict=True))
        own = gather(own, cohort)
        weights = map_clients(client, key, federation, cohort, state.experts, own)
        return per_group(lambda w: Predictor(None, w, predict), weights)

    return Algorithm(init, receive, step, personal)


compfl = Method(
    "compfl",
    build,
    CompFL,
    "experts of several sizes train each other: anchors, greedy selection, distillation",
    "Xu et al. 2024, FedKDD",
    """@inproceedings{xu2024cooperative,
  title={Cooperative Multiple Model Training for Personalized Federated Learning over Heterogeneous Devices},
  author={Xu, Jian and Wan, Shuo and Li, Yinchuan and Chen, Zhilin and Shao, Yunfeng and Chen, Zhitang and
          Huang, Shao-Lun},
  booktitle={FedKDD Workshop at KDD}, year={2024}}""",
)
