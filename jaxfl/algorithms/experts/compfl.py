"""CompFL in server mode: several expert architectures train each other.

Xu et al. 2024, "Cooperative Multiple Model Training for Personalized Federated Learning over Heterogeneous
Devices" (FedKDD), Algorithm 1. Experts j = 1..M are ordered by size; client i owns expert j_i and may train
any smaller one. theta_j is the shared extractor of expert j, phi_ij client i's head on it. In a round:

1. adapt (eq. 6)     zbar_jc = mean of z_j(x) over the client's rows of class c      prototypes, anchors
                     phi_ij  <- zbar_jc / ||zbar_jc||, bias 0; then one epoch with rate head_lr
2. weigh (eq. 7)     s_j = softmax(a_j / tau), a_j the accuracies scaled to [0, 1] over the teachers
3. select (eq. 8)    j^ = j_i with probability 1 - eps, else uniform over 1..j_i
4. update (eq. 4)    (theta_j^, phi_ij^) <- SGD over L = CE + lam L_f + mu L_kd
                     L_f  = mean_k ||z_k - zbar_y_k||^2                              eq. 2
                     L_kd = mean_k KL(t_k || p_k)                                    eq. 3
                     t_k  = y_k / 2 + sum_j s_j p_jk / 2                         teachers j <= j_i, j != j^
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

from jaxfl.algorithms.experts.compfl_client import adapt, ensemble, objective, select
from jaxfl.authoring import (
    Algorithm,
    Info,
    JaxflError,
    Method,
    PerGroup,
    Predictor,
    Training,
    descend,
    each_client,
    gather,
    initial_weights,
    map_clients,
    options,
    own_rows,
    per_group,
    predict,
    scatter,
    tree,
    within,
)
from jaxfl.mechanisms import own_models
from jaxfl.mechanisms.sharing import head, separate


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


def runnable(models) -> tuple[tuple[int, ...], ...]:
    """Per group, the experts (numbers of groups) that its clients can run, by size, their own last."""
    order = sorted(range(len(models)), key=lambda j: (models[j].size, j))
    return tuple(tuple(order[: order.index(j) + 1]) for j in range(len(models)))


def build(config: CompFL) -> Algorithm:
    """Build CompFL for the federation's architectures."""

    def divide(model, weights):
        """(head and local statistics, theta) of one expert."""
        return separate(weights, head(model), config.bn_stats)

    def init(key, federation, hyper):
        if config.accuracy_on == "validation" and not federation.validates:
            raise JaxflError(
                "compfl weighs teachers on validation rows, but clients have none; add "
                "--validation-fraction 0.2, or take --accuracy-on train."
            )
        models, groups = federation.models, federation.groups
        weights = initial_weights(key, federation)
        heads, experts = zip(*per_group(divide, models, weights), strict=True)

        def of_clients(group, js, own):
            """Heads of the smaller experts, alike for all, and of their own."""
            return *(tree.stack(heads[j], len(group.id)) for j in js[:-1]), own

        return State(
            hyper,
            experts,
            heads=per_group(of_clients, groups, runnable(models), each_client(heads, federation)),
            trained=each_client(weights, federation),
            last=per_group(lambda group: jnp.full(len(group.id), -1, jnp.int32), groups),
        )

    def newest(key, client, federation, hyper, theta, heads):
        """A client's own expert: the newest theta under an adapted head."""
        return adapt(key, client, federation, tree.combine(theta, heads[-1]), hyper).weights

    def receive(key, state, federation, cohort):
        def client(key, client, theta, heads):
            weights = newest(key, client, federation, state.hyper, theta, heads)
            return divide(client.model, weights)[0]

        own = gather(state.heads, cohort)
        heads = map_clients(client, key, federation, cohort, state.experts, own)
        return per_group(lambda theta, head: Predictor(theta, head, predict), state.experts, heads)

    def step(key, state, federation, cohort):
        hyper, models = state.hyper, federation.models
        dtype = federation.mean.dtype
        # Distillation waits for the end of the warm-up; as float32, 0.3 x 50 is more than 15.
        distils = cohort.round.astype(dtype) >= hyper.warmup * cohort.rounds - 1e-3
        mu = jnp.where(distils, hyper.mu, 0)
        sizes = tuple(tree.scalars(theta) for theta in state.experts)

        def client(key, client, js, heads):
            """`js`: the experts that this client can run, its own last; `e` counts through them."""
            adapt_key, select_key, train_key = jax.random.split(key, 3)
            own = len(js) - 1
            chosen = select(select_key, hyper.eps, len(js)) if config.greedy else jnp.int32(own)
            of_use = range(len(js)) if config.kd or config.greedy else (own,)
            trainable = range(len(js)) if config.greedy else (own,)
            downloaded = {e: distils | (chosen == e) | (e == own) for e in of_use}

            def student(e, size):
                return dataclasses.replace(client, model=models[js[e]], size=size)

            def start(e):
                weights = tree.combine(state.experts[js[e]], heads[e])
                expert_key = jax.random.fold_in(adapt_key, e)
                trainee = student(e, jnp.where(downloaded[e], client.size, 0))
                return adapt(expert_key, trainee, federation, weights, hyper)

            adapted = {e: start(e) for e in of_use}

            def train(e):
                """Train expert e if it is the chosen one; a client of size 0 runs no batch."""
                teachers = [adapted[k] for k in of_use if k != e]
                taught = ensemble(teachers, hyper.tau) if config.kd and teachers else None
                trainee = student(e, jnp.where(chosen == e, client.size, 0))
                return descend(
                    objective(trainee.model, adapted[e].anchors, taught, hyper, mu),
                    adapted[e].weights,
                    train_key,
                    own_rows(trainee, federation, hyper),
                    hyper,
                    phase=None,
                )

            trained = {e: train(e) for e in trainable}
            weights = {e: adapted[e].weights for e in adapted}
            weights |= {e: of_expert.weights for e, of_expert in trained.items()}
            parts = {e: divide(models[js[e]], weights[e]) for e in weights}
            cost = jnp.asarray([sizes[j] for j in js], jnp.int32)
            present = (client.size > 0).astype(jnp.int32)
            return {
                "heads": tuple(
                    tree.where(downloaded[e], parts[e][0], heads[e]) if e in parts else heads[e]
                    for e in range(len(js))
                ),
                "experts": {js[e]: parts[e][1] for e in trainable},
                "n": {js[e]: jnp.where(chosen == e, client.size, 0).astype(dtype) for e in trainable},
                "own": weights[own],
                "last": jnp.where(chosen == own, cohort.round, -1),
                "loss": sum(of_expert.loss for of_expert in trained.values()),
                "up": present * cost[chosen],
                "down": present * sum(jnp.where(downloaded[e], cost[e], 0) for e in of_use),
            }

        mine = gather(state.heads, cohort)
        done = map_clients(client, key, federation, cohort, runnable(models), mine)

        def of(name):
            return tuple(out[name] for out in done)

        def aggregate(j, theta):
            """Eq. 10, over the clients of all groups that can train expert j."""
            groups = [out for out in done if j in out["experts"]]
            thetas = jax.tree.map(
                lambda *leaves: jnp.concatenate(leaves), *(out["experts"][j] for out in groups)
            )
            n = jnp.concatenate([out["n"][j] for out in groups])
            return tree.weighted_mean(thetas, n, theta)

        last = per_group(jnp.maximum, of("last"), gather(state.last, cohort))
        return State(
            hyper,
            experts=tuple(aggregate(j, theta) for j, theta in enumerate(state.experts)),
            heads=scatter(state.heads, cohort, of("heads")),
            trained=scatter(state.trained, cohort, of("own")),
            last=scatter(state.last, cohort, last),
        ), Info(of("loss"), of("up"), of("down"), trained=own_models.predictors(of("own")))

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
        return own_models.predictors(weights)

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
    needs=lambda config: {"validation"} if config.accuracy_on == "validation" else (),
)
