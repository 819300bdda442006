"""pFedBayes: every client has a distribution over weights, near a global one by their divergence.

Zhang et al. 2022, "Personalized Federated Learning via Variational Bayesian Inference", arXiv:2206.07977,
Algorithm 1. All weights are independent and normal, N(mu, softplus(rho)^2); q_i is the distribution of client
i, q the global one. In a round a client receives q, and for every mini-batch b, with eps drawn anew per step,

    q_i <- step over -sum_b log p(y | x, mu_i + softplus(rho_i) eps) + zeta/E_n KL(q_i || q)     R times
    q   <- step over zeta/E_n KL(q_i || q)

and sends q, whose mu and rho the server averages by rows. E_n is the number of the client's mini-batches in
the round. q_i starts from the initial q, is kept from round to round and moves only when client i takes part.
A client receives q and deploys q_i. Both predict with their mean weights, or with the mean probability over
`samples` draws. The reported loss is -log p, the mean over rows and all R steps.

Both steps use the optimiser of local training, made anew in each round; the default is Adam, as in the
authors' code. The loss is a sum over rows, so gradients are B times as large as elsewhere and sgd needs a
smaller `lr`. The authors use 20 mini-batches of 100 rows per round; here a client trains for E epochs on all
rows. Their server keeps a part of the old q and weights clients uniformly (``weighting=uniform``). Their eps
has the standard deviation 0.001 (``eps_scale``) and their mu starts from N(0, 0.1^2). Here eps is standard
normal, as in the paper, and mu starts from the initial weights of all methods.

All kernels and biases have a distribution. BatchNorm's scale and bias have none: a client starts a round from
the received values, trains them with q_i, sends them to be averaged, and deploys them as trained. Only q_i
sees data, so BatchNorm's running statistics are those of its passes. They stay with q_i, and the same values
are sent with q and averaged; under ``bn_stats="local"`` they are not sent.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl import fl


@fl.options
class PFedBayes(fl.Averaging):
    """Options of pFedBayes."""

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    """Optimiser of personal and global distribution, made anew for each client in each round."""
    lr: float = fl.client_rate("(0, inf)", 1e-3)
    """Learning rate of both distributions."""
    weight_decay: float = fl.within("[0, inf)", 0.0)
    """Weight decay of mu, rho and BatchNorm's leaves; the divergence takes its place."""
    zeta: float = fl.within("[0, inf)", 10.0)
    """Weight of the divergence, divided by E_n; clients with few mini-batches, or large networks, need less.
    At 0 every client learns on its own."""
    repeats: int = fl.within("[1, inf)", 5)
    """R, steps of the personal distribution on every mini-batch."""
    rho_0: float = fl.within("[-60, 60]", -3.0)
    """Initial rho; standard deviations start at softplus(rho_0)."""
    eps_scale: float = fl.within("[0, inf)", 1.0)
    """Standard deviation of eps; the authors' code has 0.001, which is hardly any noise."""
    samples: int = fl.within("[0, inf)", 0)
    """Models drawn per prediction, whose probabilities are averaged; 0 predicts with the mean weights."""


class Gaussian(NamedTuple):
    """Independent normal distributions N(mu, softplus(rho)^2), as two trees of the same structure."""

    mu: Any
    rho: Any


class Posterior(NamedTuple):
    """A replacement for a model's parameters; each part has None at the leaves of the other."""

    gaussian: Gaussian  # distributions of kernels and biases
    point: Any  # values of the leaves of normalisation layers


class State(NamedTuple):
    """`Weights` of a `Posterior`: the global ones, and the clients' (n, ...)."""

    hyper: PFedBayes
    shared: fl.Weights
    personal: fl.Weights


def initial_posterior(model, weights: fl.Weights, rho_0) -> fl.Weights:
    """Return the posterior before the first round."""
    point, mean = fl.tree.split(weights, fl.norms(model))
    rho = jax.tree.map(lambda mu: jnp.full_like(mu, rho_0), mean.params)
    params: Any = Posterior(Gaussian(mean.params, rho), point.params)
    return fl.Weights(params, weights.stats)


def sampled(posterior: Posterior, key, scale) -> dict:
    """Draw a model's parameters mu + softplus(rho) eps, with eps of standard deviation `scale`."""
    mu, rho = posterior.gaussian
    eps = optax.tree.random_like(key, mu)
    w = jax.tree.map(lambda mu, rho, eps: mu + jax.nn.softplus(rho) * (scale * eps), mu, rho, eps)
    return fl.tree.combine(w, posterior.point)


def divergence(q: Gaussian, p: Gaussian):
    """Return KL(q || p), summed over all weights."""

    def of_leaf(mu, rho, mu_p, rho_p):
        sigma, sigma_p = jax.nn.softplus(rho), jax.nn.softplus(rho_p)
        wider = 2 * (jnp.log(sigma) - jnp.log(sigma_p))
        # In this form gradients are exactly 0 at q = p; Adam would turn rounding errors into full steps.
        return (jnp.expm1(wider) - wider + ((mu - mu_p) / sigma_p) ** 2).sum() / 2

    return fl.tree.total(jax.tree.leaves(jax.tree.map(of_leaf, *q, *p)))


def free_energy(model, q: Gaussian, weight, scale):
    """Return the loss of q_i, which also gives the mean of -log p."""
    plain = fl.task_loss(model)

    def loss(q_i, batch, key):
        value, stats = plain(fl.Weights(sampled(q_i.params, key, scale), q_i.stats), batch, key)
        rows = batch.mask.sum().astype(value.dtype)
        return rows * value + weight * divergence(q_i.params.gaussian, q), stats, value

    return loss


def build(config: PFedBayes) -> fl.Algorithm:
    """Keep personal distributions, and average copies of the global one."""

    def divide(model, weights):
        """Split into (statistics that stay on a client, leaves that are sent)."""
        return fl.separate(weights, fl.no_leaf(model), config.bn_stats)

    def init(key, federation, hyper):
        model, weights = federation.group.model, fl.initial_weights(key, federation)
        _, sent = divide(model, initial_posterior(model, weights, hyper.rho_0))
        own = initial_posterior(model, fl.each_client(key, weights, federation), hyper.rho_0)
        return State(hyper, sent, own)

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, received, own):
            optimizer = fl.local_optimizer(hyper)
            E_n = fl.steps_of(client.size, client.model, hyper)
            weight = hyper.zeta / jnp.maximum(E_n, 1).astype(hyper.zeta.dtype)

            def update(carry, batch, key):
                q_i, q, opt_state_i, opt_state = carry
                energy = free_energy(client.model, q, weight, hyper.eps_scale)
                q_i, opt_state_i, loss = fl.inner_steps(
                    energy, q_i, opt_state_i, batch, key, steps=config.repeats, optimizer=optimizer
                )
                q, opt_state, _, _ = fl.improve(
                    lambda q: (weight * divergence(q_i.params.gaussian, q), None), q, opt_state, optimizer
                )
                return (q_i, q, opt_state_i, opt_state), loss

            q = received.params.gaussian
            q_i = own._replace(params=Posterior(own.params.gaussian, received.params.point))
            (q_i, q, _, _), loss, _ = fl.fit(
                update,
                (q_i, q, optimizer.init(q_i.params), optimizer.init(q)),
                key,
                fl.own_rows(client, hyper),
                epochs=config.length,
                batch_size=config.batch_size,
            )
            sent = q_i._replace(params=Posterior(q, q_i.params.point))
            return (q_i, loss), optax.tree.sub(divide(client.model, sent)[1], received)

        own = fl.gather(state.personal, cohort)
        weights = config.weights(fl.cohort_rows(federation, cohort))
        made = fl.wire.averaged(client, key, federation, cohort, weights, state.shared, own)
        (q_i, loss), change = made.outputs, made.mean
        shared = optax.tree.add(state.shared, change)
        up, down = fl.wire.up(federation, cohort, shared), fl.sent_down(cohort, shared)
        trained = predictor(key, hyper, federation, cohort, None, q_i)
        state = State(hyper, shared, fl.scatter(state.personal, made.heard, q_i))
        return state, made.told(fl.Info(loss, up, down, trained=trained))

    def receive(key, state, federation, cohort):
        statistics, _ = divide(federation.group.model, fl.gather(state.personal, cohort))
        return predictor(key, state.hyper, federation, cohort, state.shared, statistics)

    def personal(key, state, federation, cohort):
        own = fl.gather(state.personal, cohort)
        return predictor(key, state.hyper, federation, cohort, None, own)

    def predictor(key, hyper, federation, cohort, shared, own):
        """Return a predictor of posteriors; every client draws its own samples."""
        of_clients = jax.vmap(jax.random.fold_in, (None, 0))(key, fl.mixing.ids(federation, cohort))
        stream = jax.random.key_data(of_clients) if config.samples else None
        return fl.Predictor((shared, hyper.eps_scale), (own, stream), predict)

    def predict(model, shared, own, x):
        """Return logits of the mean weights, or logarithms of the samples' mean probabilities."""
        (common, scale), (mine, stream) = shared, own
        posterior, stats = fl.tree.combine(common, mine)

        def logits(params):
            return model.apply(params, stats, x, train=False)[0]

        def sample(number):
            key = jax.random.fold_in(jax.random.wrap_key_data(stream), number)
            return jax.nn.log_softmax(logits(sampled(posterior, key, scale)))

        if config.samples == 0:
            return logits(fl.tree.combine(posterior.gaussian.mu, posterior.point))
        scores = jax.lax.map(sample, jnp.arange(config.samples, dtype=jnp.int32))
        return jax.nn.logsumexp(scores, axis=0) - math.log(config.samples)

    return fl.each_architecture(fl.Algorithm(init, receive, step, personal, wire=("messages", "mean")))


pfedbayes = fl.Method(
    "pfedbayes", build, PFedBayes, needs=lambda config: ("classes",) if config.samples else ()
)
