"""pFedHN: a hypernetwork on the server generates every client's model from an embedding.

Shamsian et al. 2021, "Personalized Federated Learning using Hypernetworks", arXiv:2103.04628, Algorithm 1.
h is the hypernetwork of an architecture, psi its parameters, v_i the embedding of client i,
n_i the number of its training rows and n that of the cohort's:

    w_i  <- h(v_i; psi)
    w~_i <- LocalSGD(w_i),    dw_i <- w_i - w~_i
    (psi, v) <- (psi, v) - server_lr sum_i n_i/n (dh(v_i; psi)/d(psi, v))^T dw_i

The paper's server steps after every client. Here it steps once a round, along the mean over the cohort (with
momentum, weight decay and gradient clipping, as in the authors' code). A client deploys h(v_i) and keeps no
model. Embeddings of absent clients do not move, not even by momentum and weight decay as in the authors'
code. BatchNorm's scales and biases are generated too. Its running statistics are averaged, as in all methods
here, because a client that has never trained has none of its own; with ``bn_stats="local"`` they stay with
their clients. Clients train as in all methods here, not by the paper's 50 steps of rate 0.005 with momentum
0.9. Traffic is FedAvg's: w_i down, dw_i up.
"""

from typing import Any, NamedTuple

import jax
import optax

from jaxfl import fl


@fl.options
class PFedHN(fl.Training):
    """Options of pFedHN."""

    embedding: int | None = fl.within("[1, inf)", None)
    """d, size of an embedding; by default 1 + N/4, rounded down, for N clients."""
    hidden: int = fl.within("[1, inf)", 100)
    """Units of the hypernetwork's hidden layers."""
    depth: int = fl.within("[0, inf)", 3)
    """Number of the hypernetwork's hidden layers after the first."""
    server_lr: float = fl.within("(0, inf)", 0.01)
    """Learning rate of hypernetwork and embeddings."""
    server_momentum: float = fl.within("[0, 1)", 0.9)
    """Momentum of hypernetwork and embeddings."""
    server_weight_decay: float = fl.within("[0, inf)", 1e-3)
    """Weight decay of hypernetwork and embeddings."""
    server_clip_norm: float = fl.within("(0, inf)", 50.0)
    """Largest norm of their gradient; larger ones are scaled down to it."""


class Server(NamedTuple):
    """The generator of the models of one architecture."""

    psi: Any  # the hypernetwork's parameters
    v: jax.Array  # the clients' embeddings (n, d)
    opt_state: tuple[Any, Any]  # optimiser states of psi and of v


class State(NamedTuple):
    """State carried between rounds."""

    hyper: PFedHN
    server: Server  # the generator
    stats: Any  # the BatchNorm statistics that all clients share
    own_stats: Any  # the BatchNorm statistics that stay on their clients (n, ...)


def build(config: PFedHN) -> fl.Algorithm:
    """Generate, train, and pull the differences back through the hypernetwork."""

    def hypernetwork(model):
        return fl.hypernetwork.Hypernetwork(model, config.hidden, config.depth)

    def optimizer(hyper):
        return optax.chain(
            optax.add_decayed_weights(hyper.server_weight_decay),
            optax.sgd(hyper.server_lr, hyper.server_momentum),
        )

    def divide(w):
        """Split a model's statistics into (its own, the shared ones)."""
        return fl.separate(w._replace(params={}), lambda path: False, config.bn_stats)

    def init(key, federation, hyper):
        group, (number,) = federation.group, federation.numbers
        d = config.embedding or 1 + federation.clients // 4
        key_psi, key_v = jax.random.split(jax.random.fold_in(key, number))
        v = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key_v, i), (d,)))(group.id)
        psi: Any = hypernetwork(group.model).init(key_psi, v[0])["params"]
        if federation.initial:
            psi = fl.hypernetwork.generating(psi, federation.initial[0].shared.params)
        start = optimizer(hyper).init
        own, shared = divide(fl.initial_weights(key, federation))
        server = Server(psi, v, (start(psi), start(v)))
        return State(hyper, server, shared, fl.each_client(key, own, federation))

    def generated(model, shared, own) -> fl.Weights:
        """Return a client's model before training, with parameters h(v; psi)."""
        (psi, stats), (v, own_stats) = shared, own
        return fl.tree.combine(stats, own_stats)._replace(
            params=hypernetwork(model).apply({"params": psi}, v)
        )

    def origins(state, cohort):
        """Return the inputs of generation: those that all clients share, and the cohort's own (k, ...)."""
        return (state.server.psi, state.stats), fl.gather((state.server.v, state.own_stats), cohort)

    def receive(key, state, federation, cohort):
        def predict_generated(model, shared, own, x):
            return fl.predict(model, None, generated(model, shared, own), x)

        return fl.Predictor(*origins(state, cohort), predict_generated)

    def serve(model, server, slots, dw, hyper):
        """Take the server's step along the sum of the weighted dw (k_g, ...), with its gradient clipped."""

        def models(psi, v):
            return jax.vmap(lambda v: hypernetwork(model).apply({"params": psi}, v))(v)

        def pulled_back(psi, v, dw):
            return jax.vjp(models, psi, v)[1](dw)

        inputs = server.psi, fl.tree.take(server.v, slots)
        # The models were generated once before training, and are again for the gradient.
        of_slots = fl.flops.of(models, *inputs) + fl.flops.of(pulled_back, *inputs, dw)
        fl.flops.add(of_slots / slots.mask.size * slots.mask.sum().astype(float))
        gradient: Any = pulled_back(*inputs, dw)
        gradient, _ = optax.clip_by_global_norm(hyper.server_clip_norm).update(gradient, optax.EmptyState())
        psi, state_psi = stepped(server.psi, gradient[0], server.opt_state[0], hyper)
        v, state_v = fl.tree.take((server.v, server.opt_state[1]), slots)  # absent clients' v stays
        stepped_v = stepped(v, gradient[1], state_v, hyper)
        v, state_v = fl.tree.put((server.v, server.opt_state[1]), slots, stepped_v)
        return Server(psi, v, (state_psi, state_v))

    def stepped(at, gradient, opt_state, hyper):
        change, opt_state = optimizer(hyper).update(gradient, opt_state, at)
        return optax.apply_updates(at, change), opt_state

    def step(key, state, federation, cohort):
        hyper = state.hyper

        def client(key, client, shared, own):
            w = generated(client.model, shared, own)
            rows = fl.own_rows(client, hyper)
            trained = fl.descend(fl.task_loss(client.model), w, key, rows, hyper)
            own_stats, stats = divide(trained.weights)
            message = optax.tree.sub(w.params, trained.weights.params), stats
            message = fl.wire.sent(key, client, message, (None, shared[1]))
            return message, own_stats, trained.weights, trained.loss

        outputs = fl.map_clients(client, key, federation, cohort, *origins(state, cohort))
        (dw, shared), own, trained, loss = outputs
        n = fl.cohort_rows(federation, cohort)
        share = fl.tree.shares(n)
        sent = fl.tree.one(dw), state.stats
        dw = jax.tree.map(lambda d: d * share.reshape(-1, *[1] * (d.ndim - 1)), dw)
        before = state.server, state.stats
        after = (
            serve(federation.group.model, state.server, cohort.slots, dw, hyper),
            fl.tree.weighted_mean(shared, n, state.stats),
        )
        server, stats = fl.tree.where((n > 0).any(), after, before)
        up, down = fl.wire.up(federation, cohort, sent), fl.sent_down(cohort, sent)
        state = State(hyper, server, stats, fl.scatter(state.own_stats, cohort, own))
        return state, fl.Info(loss, up, down, trained=fl.own_models.predictor(trained))

    def embeddings(state):
        return state.server.v

    return fl.each_architecture(
        fl.Algorithm(init, receive, step, personal=receive, embeddings=embeddings, wire=("messages", "rows"))
    )


pfedhn = fl.Method("pfedhn", build, PFedHN)
