"""pFedMe: personal models inside Moreau envelopes around a global one.

Dinh et al. 2020, "Personalized Federated Learning with Moreau Envelopes", arXiv:2006.08848, Algorithm 1. w is
the global model, v_i client i's copy of it, theta_i its personal model, n_i the number of its training rows.
In a round both start from w, and for every mini-batch b

    theta_i <- theta_i - lr (grad CE(theta_i; b) + lam (theta_i - v_i))     K times
    v_i     <- v_i - eta lam (v_i - theta_i)
    w       <- (1 - beta) w + beta sum_i n_i v_i / sum_i n_i                after the round

lam is the paper's lambda, lr its learning rate of the inner problem. A client receives w. It deploys theta_i
of the last round in which it took part, or the initial w before the first. The paper leaves open where
theta_i starts in a round; in the authors' code it starts from w. The reported loss is the mean of
CE + lam/2 ||theta_i - v_i||^2 over all inner steps. theta_i is fitted to one mini-batch at a time, so what is
deployed knows of the others only through v_i, which moves by eta: with the small eta of the paper and few
rounds deployed models can be far below received ones.

The inner steps use the optimiser of local training, made once per client and round, with its learning rate,
momentum, weight decay and clipping; the defaults are those of all methods here. The authors' optimiser has no
momentum and a decay (their mu) of 1e-3. The step of v_i is plain. The authors run R mini-batches; here a
client runs E epochs over all of them. Their code weights clients by n_i as we do, the paper uniformly
(``weighting=uniform``). What it scores as personal is v_i, which has overwritten theta_i in memory; here it
is theta_i.

Only theta_i sees data, so BatchNorm's running statistics are its own and stay with it. The same statistics
are sent with v_i and averaged into those of w; under ``bn_stats="local"`` w has none.
"""

from typing import NamedTuple

import jax
import optax

from jaxfl import fl


@fl.options
class PFedMe(fl.Averaging):
    """Options of pFedMe."""

    lam: float = fl.within("[0, inf)", 15.0)
    """lambda, pull between personal and global model. Plain inner steps diverge if lr * lam >= 2."""
    inner_steps: int = fl.within("[0, inf)", 5)
    """K, steps of the personal model on every mini-batch."""
    eta: float = fl.client_rate("[0, inf)", 0.005)
    """Learning rate of the client's copy of the global model. The copy moves by about eta times a gradient on
    every mini-batch, so short runs need a larger eta. It diverges if eta * lam >= 2."""
    beta: float = fl.within("[0, inf)", 1.0)
    """Server step from the old global model towards the mean of the new ones; above 1 it goes beyond."""


class State(NamedTuple):
    """The global model w and the personal models theta (n, ...)."""

    hyper: PFedMe
    shared: fl.Weights
    personal: fl.Weights


def build(config: PFedMe) -> fl.Algorithm:
    """Keep personal models, and average copies of the global one."""

    def divide(model, weights):
        """Split into (statistics that stay with theta, leaves of w)."""
        return fl.separate(weights, fl.no_leaf(model), config.bn_stats)

    def init(key, federation, hyper):
        _, shared = divide(federation.group.model, fl.initial_weights(key, federation))
        return State(hyper, shared, fl.own_models.start(key, federation))

    def receive(key, state, federation, cohort):
        statistics, _ = divide(federation.group.model, fl.gather(state.personal, cohort))
        return fl.Predictor(state.shared, statistics, fl.predict)

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, w, theta):
            optimizer = fl.local_optimizer(hyper)

            def update(carry, batch, key):
                theta, v, opt_state = carry
                envelope = fl.proximal(client.model, fl.Weights(v, {}), hyper.lam)
                theta, opt_state, loss = fl.inner_steps(
                    envelope, theta, opt_state, batch, key, steps=config.inner_steps, optimizer=optimizer
                )
                v = jax.tree.map(lambda v, th: v - hyper.eta * hyper.lam * (v - th), v, theta.params)
                return (theta, v, opt_state), loss

            theta = theta._replace(params=w.params)
            (theta, v, _), loss, _ = fl.fit(
                update,
                (theta, w.params, optimizer.init(w.params)),
                key,
                fl.own_rows(client, hyper),
                epochs=config.length,
                batch_size=config.batch_size,
            )
            sent = divide(client.model, fl.Weights(v, theta.stats))[1]
            return (theta, loss), optax.tree.sub(sent, w)

        def serve(w, change):
            """Step by the mean change, so that w stays exactly where it is if nobody has moved."""
            params = jax.tree.map(lambda w, away: w + hyper.beta * away, w.params, change.params)
            return fl.Weights(params, optax.tree.add(w.stats, change.stats))

        own = fl.gather(state.personal, cohort)
        weights = config.weights(fl.cohort_rows(federation, cohort))
        made = fl.wire.averaged(client, key, federation, cohort, weights, state.shared, own)
        (theta, loss), change = made.outputs, made.mean
        up, down = fl.wire.up(federation, cohort, state.shared), fl.sent_down(cohort, state.shared)
        state = State(hyper, serve(state.shared, change), fl.scatter(state.personal, made.heard, theta))
        return state, made.told(fl.Info(loss, up, down, trained=fl.own_models.predictor(theta)))

    def personal(key, state, federation, cohort):
        return fl.own_models.of_cohort(state.personal, cohort)

    return fl.each_architecture(fl.Algorithm(init, receive, step, personal, wire=("messages", "mean")))


pfedme = fl.Method("pfedme", build, PFedMe)
