"""pFedBayes (Zhang et al. 2022, arXiv:2206.07977, Algorithm 1): normal distributions over weights.

q is {"gaussian/mu/LEAF", "gaussian/rho/LEAF", "point/LEAF", "stats/LEAF"}: BatchNorm's leaves are points.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conftest import SIZES, assert_same
from reference import nets
from reference.own_models import sent
from reference.sharing import weight
from reference.training import OPTIMIZERS, average, clipped, plain_loss, softmax

from jaxfl.algorithms.sharing.pfedbayes import initial_posterior
from jaxfl.core import tree
from jaxfl.core.cohorts import all_clients
from jaxfl.core.job import traced
from jaxfl.registry import METHODS
from methods import recording
from methods.cases import CONVOLVING, Case, Comparison, local_statistics
from methods.rounds import ALWAYS, TRAINING, alike, equal, initial, run

MU, RHO, POINT = "gaussian/mu/", "gaussian/rho/", "point/"


def start(clients, initial, options):
    """Start all distributions around the initial weights."""
    q = [around(weights, options.rho_0) for weights in initial]
    return {
        "shared": {group: sent(of_group, options) for group, of_group in enumerate(q)},
        "personal": {i: q[client.group] for i, client in enumerate(clients)},
    }


def around(weights, rho):
    """Return the distribution whose means are some weights."""
    q = {}
    for name, w in weights.items():
        if nets.is_statistic(name):
            q[name] = w
        elif "/norm/" in name:
            q[POINT + name] = w
        else:
            q |= {MU + name: w, RHO + name: np.full_like(w, rho)}
    return q


def step(state, clients, cohort, options):
    """Train q_i and the client's copy of q in turn; average mu, rho and the points."""
    personal, messages, losses = dict(state["personal"]), [], {}
    for i, draw in cohort.draws.items():
        client, q = clients[i], state["shared"][clients[i].group]
        begun = personal[i] | part(q, POINT)
        personal[i], gaussian, losses[i] = in_turn(client, begun, part(q, MU) | part(q, RHO), draw, options)
        rest = {name: leaf for name, leaf in personal[i].items() if name not in gaussian}
        messages.append((client.group, weight(client, options), sent(gaussian | rest, options)))
    return {"shared": average(state["shared"], messages), "personal": personal}, losses


def part(q, kind):
    """Return the leaves of one kind, under their full names."""
    return {name: leaf for name, leaf in q.items() if name.startswith(kind)}


def in_turn(client, q_i, q, draw, options):
    """Take R steps of q_i and one of q on every batch; return both and the mean negative log-likelihood."""
    least = nets.least_rows(q_i)
    starts = range(0, client.size, options.batch_size)
    starts = [first for first in starts if min(options.batch_size, client.size - first) >= least]
    weight = options.zeta / max(1, options.epochs * len(starts))
    descend_q_i, descend_q, values = descent(options), descent(options), []
    for order, of_epoch in zip(draw["train"], draw["eps"], strict=True):
        for b, first in enumerate(starts):
            rows = order[first : first + options.batch_size]
            for r in range(options.repeats):
                eps = {name: options.eps_scale * of_leaf[b, r] for name, of_leaf in of_epoch.items()}
                value, found = plain_loss(client)(drawn(q_i, eps), rows)
                values.append(value)
                gradients = {name: weight * g for name, g in divergence(q_i, q)[0].items()}
                for name, g in found.items():
                    if nets.is_statistic(name):
                        q_i = q_i | {name: g}
                    elif name in eps:
                        slope = eps[name] * sigmoid(q_i[RHO + name])
                        gradients[MU + name] = gradients[MU + name] + len(rows) * g
                        gradients[RHO + name] = gradients[RHO + name] + len(rows) * g * slope
                    elif POINT + name in q_i:
                        gradients[POINT + name] = len(rows) * g
                q_i = descend_q_i(q_i, gradients)
            q = descend_q(q, {name: weight * g for name, g in divergence(q_i, q)[1].items()})
    return q_i, q, np.mean(values) if values else 0.0


def drawn(q, eps):
    """Return weights mu + softplus(rho) eps, and the points unchanged."""
    w = {name.removeprefix(POINT): leaf for name, leaf in q.items() if not name.startswith("gaussian")}
    return w | {name: q[MU + name] + softplus(q[RHO + name]) * noise for name, noise in eps.items()}


def divergence(q, p):
    """Return the gradients of KL(q || p) with respect to q and to p."""
    of_q, of_p = {}, {}
    for mu in part(p, MU):
        rho = mu.replace(MU, RHO)
        sigma, sigma_p, away = softplus(q[rho]), softplus(p[rho]), q[mu] - p[mu]
        of_q |= {mu: away / sigma_p**2, rho: (sigma / sigma_p**2 - 1 / sigma) * sigmoid(q[rho])}
        slope = 1 / sigma_p - (sigma**2 + away**2) / sigma_p**3
        of_p |= {mu: -away / sigma_p**2, rho: slope * sigmoid(p[rho])}
    return of_q, of_p


def softplus(rho):
    """Return log(1 + e^rho)."""
    return np.log1p(np.exp(rho))


def sigmoid(rho):
    """Return the derivative of softplus."""
    return 1 / (1 + np.exp(-rho))


def descent(options):
    """Return steps of an optimiser with a memory: ``(leaves, gradients of some of them) -> leaves``."""
    update, memory, steps = OPTIMIZERS[options.optimizer](options), {}, []

    def descend(leaves, gradients):
        steps.append(None)
        moved = {}
        for name, gradient in clipped(gradients, options.clip_norm).items():
            before = memory.get(name, (0.0, 0.0))
            change, memory[name] = update(leaves[name], gradient, before, len(steps))
            moved[name] = leaves[name] - options.lr * change
        return leaves | moved

    return descend


def scores(state, clients, draws, options, x):
    """Score q, under bn_stats="local" with q_i's statistics, as received, and q_i as deployed."""
    received, deployed = [], []
    for i, client in enumerate(clients):
        q_i = state["personal"][i]
        for q, found in ((q_i | state["shared"][client.group], received), (q_i, deployed)):
            found.append(prediction(client.net, q, draws[i]["eps"], options, x))
    return {"received": received, "deployed": deployed}


def prediction(net, q, eps, options, x):
    """Return logits of the means, or the logarithm of the mean probability over samples."""
    if options.samples == 0:
        return nets.logits(net, drawn(q, {name: 0.0 for name in eps}), x)
    of_samples = [
        drawn(q, {name: options.eps_scale * of_leaf[s] for name, of_leaf in eps.items()})
        for s in range(options.samples)
    ]
    return np.log(np.mean([softmax(nets.logits(net, w, x)) for w in of_samples], axis=0))


def draws(key, client, models, options):
    """Draw the orders of an epoch's rows, and for each epoch eps (batches, R, ...) by leaves."""
    key, counts = jax.random.fold_in(key, 0), (-(-max(SIZES) // options.batch_size), options.repeats)
    epochs = [jax.random.fold_in(key, e) for e in range(options.epochs)]
    return {
        "train": recording.orders(key, client.size, options.epochs),
        "eps": [normal_numbers(epoch, models[client.group], counts) for epoch in epochs],
    }


def draws_before_use(key, client, models, options):
    """Draw eps (S, ...) by leaves."""
    return {"eps": normal_numbers(key, models[client.group], (options.samples,))}


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal_numbers(key, model, counts):
    """Return {leaf: (n, m, ..., *shape)}, entry (i, j, ...) of the key fold_in(fold_in(key, i), j) ..."""
    mu = initial_posterior(model, model.init(key), 0.0).params.gaussian.mu

    def draw(key, counts):
        if not counts:
            return optax.tree.random_like(key, mu)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(counts[0], dtype=jnp.int32))
        return jax.vmap(lambda key: draw(key, counts[1:]))(keys)

    return {"/".join(tree.names(path)): leaf for path, leaf in jax.tree.leaves_with_path(draw(key, counts))}


def traffic(model, models, t):
    """Count two numbers for each weight."""
    return 2 * model.size


# ---- what another method computes


def without_noise_and_divergence_it_is_local():
    """A sum over rows makes gradients longer than a mean: the rate is divided by their number."""
    plain = TRAINING | {"weight_decay": 0.0}
    alone = {"zeta": 0.0, "eps_scale": 0.0, "repeats": 1, "optimizer": "sgd", "lr": 0.05 / max(SIZES)}
    for (bayes, report), (local, expected) in zip(
        run("pfedbayes", equal(), cohorts=ALWAYS, **alone, **plain),
        run("local", equal(), cohorts=ALWAYS, **plain),
        strict=True,
    ):
        (q_i,), (weights,) = bayes.personal, local.kept
        assert_same(q_i.params.gaussian.mu, weights.params, tolerance=1e-5)
        assert_same(report.loss, expected.loss, tolerance=1e-5)
        assert_same(bayes.shared, initial("pfedbayes", equal(), **plain).shared, tolerance=1e-6)


ADAM = {"optimizer": "adam", "lr": 0.01, "repeats": 2}


def samples_of_certain_models_have_finite_scores():
    """If all samples give a class probability 0 in single precision, their mean has no logarithm."""
    config = METHODS["pfedbayes"].config(samples=3)
    algorithm, federation = METHODS["pfedbayes"].build(config), alike()
    state = algorithm.init(jax.random.key(0), federation, traced(config))
    sure = state._replace(personal=jax.tree.map(lambda leaf: 1e3 * leaf, state.personal))
    cohort = all_clients(federation, 1)
    (predictor,) = algorithm.personal(jax.random.key(1), sure, federation, cohort)
    (model,), own = federation.models, jax.tree.map(lambda leaf: leaf[0], predictor.stacked)
    scores = predictor.predict(model, predictor.shared, own, federation.inputs(np.arange(20)))
    assert np.isfinite(scores).all() and scores.min() < -90


pfedbayes = Case(
    "pfedbayes",
    start,
    step,
    scores,
    draws=draws,
    draws_before_use=draws_before_use,
    view=recording.global_and_personal,
    traffic=traffic,
    idle_rates={"momentum", "rho_0"},  # of an optimiser that is not the default; read only at the start
    comparisons={
        "": Comparison(ADAM, [("zeta", 10.1), ("rho_0", -2.99), ("eps_scale", 1.01)], ((CONVOLVING, 5),)),
        "sgd, samples": Comparison(
            {"optimizer": "sgd", "lr": 1e-3, "samples": 3, "repeats": 2, "zeta": 2.0, "clip_norm": 5.0}
            | {"weighting": "uniform"},
            [("samples", 2), ("repeats", 1), ("momentum", 0.51), ("weighting", "rows")],
        ),
        "local statistics": local_statistics(("eps_scale", 0.51), eps_scale=0.5, **ADAM),
    },
    reductions=(without_noise_and_divergence_it_is_local, samples_of_certain_models_have_finite_scores),
)
