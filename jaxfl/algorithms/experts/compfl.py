"""CompFL: experts of several sizes train each other: anchors, greedy selection, distillation.

Xu et al. 2024, "Cooperative Multiple Model Training for Personalized Federated Learning over Heterogeneous
Devices" (FedKDD), Algorithm 1. Experts j = 1..M are ordered by size; client i owns expert j_i and may train
any smaller one. theta_j is the shared extractor of expert j, phi_ij client i's head on it. k counts the rows
of a mini-batch; z_k and p_k are the features and the prediction of the expert in training, p_jk is that of
teacher j. zbar and a_j have tildes in the paper.

**Round.**

1. adapt (eq. 6)     zbar_jc = mean of z_j(x) over the client's rows of class c      prototypes, anchors
                     phi_ij  <- zbar_jc / ||zbar_jc||, bias 0, for j != j_i; the own phi_ij stays
                     phi_ij  <- one epoch with rate head_lr, theta_j frozen
2. weigh (eq. 7)     s_j = softmax(a_j / tau), a_j the accuracies scaled to [0, 1] over the teachers
3. select (eq. 8)    j^ = j_i with probability 1 - eps, else uniform over 1..j_i
4. update (eq. 4)    (theta_j^, phi_ij^) <- SGD over L = CE + lam L_f + mu L_kd      mu = 0 in the warm-up
                     L_f  = mean_k ||z_k - zbar_y_k||^2                              eq. 2
                     L_kd = mean_k KL(t_k || p_k)                                    eq. 3
                     t_k  = y_k / 2 + sum_j s_j p_jk / 2                         teachers j <= j_i, j != j^
5. aggregate (eq. 10) theta_j <- theta_j + sum_i n_i (theta_ij - theta_j) / sum_i n_i over i with j^ = j

A client receives the newest theta_ji with an adapted head. It deploys its own expert as trained, if it
trained that in the last round, and otherwise what it receives. With align, greedy and kd off and
``head_init="keep"`` this is FedPer, scored after local training. With `augment` the student sees changed
images, teachers and prototypes the unchanged ones.

**Differs.** Where the paper leaves room, an option has its readings:

- ``head_init``: Algorithm 1 keeps the head of the expert in training (``keep-chosen+ft``), section 3.2 may
  make it anew (``proto+ft``). We keep it on the own expert only, which gains two to five points over
  making it anew, on one seed each (experiments/compfl).
- ``teachers``: eqs. 3 and 7 sum over all experts, the received copy of j^ among them (``all``). By appendix C
  only experts smaller than the own one teach. We take all but j^ (``others``): the own expert also teaches a
  smaller one that the client assists (section 2.2).
- ``deploy``: the paper's results are of one model. Appendix C names the ensemble of the locally adapted
  experts as well (``ensemble``), but not how it weighs them. We take the mean of the probabilities of all
  j <= j_i, each the newest theta_j under an adapted head.
- ``kd_direction``: eq. 3 prints KL(p || t), we take the usual KL(t || p).
- ``anchor_reduction``: eq. 2 sums over the feature's dimensions, we average, as in FedPAC's code, by the same
  first author.
- ``accuracy_on``: step 2 has validation accuracies, but the paper says nothing of validation rows; we take
  the training rows.

FedPAC scores what a client receives under its old head (acc0), we adapt the head first.

**Traffic.**

    up                        theta_j^
    down in the warm-up       theta_ji, and theta_j^
    down after it             theta_j of all j <= j_i, also with kd off
    down with kd, greedy off  theta_ji in all rounds
"""

import dataclasses
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.experts.compfl_client import (
    Cooperation,
    begin,
    divide,
    local_round,
    needs_validation,
    newest,
    received,
    require_statistics,
    runnable,
    teaching,
)


@fl.options
class Greedy(Cooperation):
    """Options of the modes with greedy selection."""

    eps: float = fl.within("[0, 1]", 0.3)
    """epsilon, how often a client draws the expert to train instead of taking its own."""
    greedy: bool = True
    """Let clients train experts smaller than their own."""
    warmup: float = fl.within("[0, 1]", 0.1)
    """Share of the rounds before distillation starts."""


@fl.options
class CompFL(Greedy):
    """Options of CompFL."""

    deploy: Literal["own", "ensemble"] = "own"
    """What clients deploy: their own expert, or the mean of what all that they can run predict."""


class State(NamedTuple):
    """State carried between rounds."""

    hyper: CompFL
    experts: fl.PerGroup  # per group (= expert j), theta_j: the shared leaves
    heads: fl.PerGroup  # per group, per expert that its clients can run, phi_ij (n_g, ...)
    trained: fl.PerGroup  # per group (n_g, ...), the client's own expert after its last round
    last: fl.PerGroup
    """Per group (n_g,) int32, the round in which the client last trained its own; -1 at the start."""


class Answer(NamedTuple):
    """Results of a client's round, or of all clients per group."""

    heads: Any  # phi_ij after the round, per expert that the client can run
    experts: Any  # {expert j that it can train: theta_ij}
    n: Any  # {the same: () float, its training rows if it has trained that expert, else 0}
    own: Any  # its own expert, as trained or adapted
    last: Any  # () int32, this round if it has trained its own expert, else -1
    loss: Any  # (), of local training
    idle: Any  # () bool, whether it had nothing to train on
    up: Any  # () int32, number of scalars sent
    down: Any  # () int32, number of scalars received
    teachers: Any  # see `LocalRound`


def select(key, eps, experts: int):
    """Draw which of its experts 0..experts-1 a client trains (eq. 8), its own being the last: () int32."""
    explore, which = jax.random.split(key)
    drawn = jax.random.randint(which, (), 0, experts, jnp.int32)
    return jnp.where(jax.random.bernoulli(explore, eps), drawn, jnp.int32(experts - 1))


def distils(cohort, hyper):
    """Return whether the warm-up is over, () bool."""
    # As float32, 0.3 x 50 is more than 15.
    return cohort.round.astype(hyper.warmup.dtype) >= hyper.warmup * cohort.rounds - 1e-3


def build(config: CompFL) -> fl.Algorithm:
    """Build CompFL for the federation's architectures."""

    def init(key, federation, hyper):
        heads, experts = begin(key, federation, config)
        if config.greedy or config.kd or config.deploy == "ensemble":
            require_statistics(config, federation)
        trained = fl.own_models.start(key, federation)
        last = fl.per_group(lambda group: jnp.full(len(group.id), -1, jnp.int32), federation.groups)
        return State(hyper, experts, heads, trained, last)

    def receive(key, state, federation, cohort):
        own = fl.per_group(lambda heads: heads[-1], fl.gather(state.heads, cohort))
        return received(key, federation, cohort, state.experts, own, state.hyper)

    def step(key, state, federation, cohort):
        hyper, models = state.hyper, federation.models
        dtype = federation.mean.dtype
        kd = distils(cohort, hyper)
        mu = jnp.where(kd, hyper.mu, 0)
        sizes = tuple(fl.tree.scalars(theta) for theta in state.experts)

        def client(key, client, js, heads):
            """Run a client's round. `js`: experts that it can run, its own last; `e`: a place in `js`."""
            adapt_key, select_key, train_key = jax.random.split(key, 3)
            own = len(js) - 1
            chosen = select(select_key, hyper.eps, len(js)) if config.greedy else jnp.int32(own)
            of_use = range(len(js)) if config.kd or config.greedy else (own,)
            trainable = range(len(js)) if config.greedy else (own,)
            downloaded = {e: kd | (chosen == e) | (e == own) for e in of_use}
            local = local_round(
                (adapt_key, train_key),
                client,
                experts=[models[j] for j in js],
                thetas={e: state.experts[js[e]] for e in of_use},
                phis=heads,
                trainable=trainable,
                chosen=chosen,
                heard=downloaded,
                hyper=hyper,
                mu=mu,
            )
            cost = jnp.asarray([sizes[j] for j in js], jnp.int32)
            present = (client.size > 0).astype(jnp.int32)
            return Answer(
                heads=local.phis,
                experts={js[e]: theta for e, theta in local.thetas.items()},
                n={js[e]: jnp.where(chosen == e, client.size, 0).astype(dtype) for e in trainable},
                own=local.weights[own],
                last=jnp.where(chosen == own, cohort.round, -1),
                loss=local.loss,
                idle=local.idle,
                up=present * cost[chosen],
                down=present * sum(jnp.where(downloaded[e], cost[e], 0) for e in of_use),
                teachers=local.teachers,
            )

        mine = fl.gather(state.heads, cohort)
        answers = fl.map_clients(client, key, federation, cohort, runnable(models), mine)

        def aggregate(j, theta):
            """Return eq. 10 over the clients of all groups that can train expert j."""
            of_j = [answer for answer in answers if j in answer.experts]
            thetas = jax.tree.map(
                lambda *leaves: jnp.concatenate(leaves), *(answer.experts[j] for answer in of_j)
            )
            n = jnp.concatenate([answer.n[j] for answer in of_j])
            return fl.tree.weighted_mean(thetas, n, theta)

        of_all = Answer(*zip(*answers, strict=True))
        last = fl.per_group(jnp.maximum, of_all.last, fl.gather(state.last, cohort))
        return State(
            hyper,
            experts=tuple(aggregate(j, theta) for j, theta in enumerate(state.experts)),
            heads=fl.scatter(state.heads, cohort, of_all.heads),
            trained=fl.scatter(state.trained, cohort, of_all.own),
            last=fl.scatter(state.last, cohort, last),
        ), fl.Info(
            of_all.loss,
            of_all.up,
            of_all.down,
            trained=fl.own_models.predictors(of_all.own),
            idle=of_all.idle,
            teacher=fl.per_group(partial(teaching, models), runnable(models), of_all.teachers)
            if config.kd
            else None,
        )

    def personal(key, state, federation, cohort):
        def client(key, client, theta, own):
            heads, trained, last = own
            fresh = last == cohort.round
            # A client whose model is fresh needs no adaptation; without rows that costs nothing.
            adapted = newest(key, fl.only_if(~fresh, client), theta, heads[-1], state.hyper)
            return jax.tree.map(lambda a, b: jnp.where(fresh, a, b), trained, adapted)

        own = tuple(zip(state.heads, state.trained, state.last, strict=True))
        own = fl.gather(own, cohort)
        weights = fl.map_clients(client, key, federation, cohort, state.experts, own)
        return fl.own_models.predictors(weights)

    def ensemble(key, state, federation, cohort):
        """Return predictors by all experts that clients can run, under adapted heads (appendix C)."""
        models, experts = federation.models, runnable(federation.models)

        def client(key, client, js, heads):
            def adapted(e, j):
                key_e, client_j = jax.random.fold_in(key, e), dataclasses.replace(client, model=models[j])
                theta, own = state.experts[j], j == js[-1]
                weights = newest(key_e, client_j, theta, heads[e], state.hyper, own=own)
                return divide(models[j], weights, state.hyper)[0]

            return tuple(adapted(e, j) for e, j in enumerate(js))

        def predictor(js, heads):
            mean = partial(mean_prediction, [models[j] for j in js[:-1]])
            return fl.Predictor([state.experts[j] for j in js], heads, mean)

        heads = fl.map_clients(client, key, federation, cohort, experts, fl.gather(state.heads, cohort))
        return fl.per_group(predictor, experts, heads)

    return fl.Algorithm(init, receive, step, personal if config.deploy == "own" else ensemble)


def mean_prediction(smaller: list[fl.Model], model: fl.Model, thetas, phis, x):
    """Return logarithms of the mean probabilities of a client's experts, its own being the last."""
    experts = zip((*smaller, model), thetas, phis, strict=True)
    scores = jnp.stack([jax.nn.log_softmax(fl.predict(*expert, x)) for expert in experts])
    return jax.nn.logsumexp(scores, axis=0) - math.log(len(scores))


compfl = fl.Method("compfl", build, CompFL, needs=needs_validation)
