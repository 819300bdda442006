"""Per-FedAvg (Fallah et al. 2020, arXiv:2002.07948, Algorithm 1): MAML's objective, averaged uniformly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import SIZES, assert_same
from reference import nets, sharing
from reference.training import average, descend, plain_loss

from jaxfl.core.batches import batch_order
from methods.cases import CONVOLVING, Case, Comparison, fedavg, local_statistics
from methods.recording import phases
from methods.rounds import ALWAYS, TRAINING, equal, reported, run

TINY = 1e-6  # a difference of gradients over this distance is the second derivative to ten digits


def step(state, clients, cohort, options):
    """w_i <- SGD over f(w~; b'); w <- mean_i w_i."""
    shared, trained, losses = [], {}, {}
    for i, draw in cohort.draws.items():
        w, loss = sharing.model(state, clients, i), meta_loss(plain_loss(clients[i]), options)
        rows = together(draw["train"], w, options)
        trained[i], losses[i] = descend(w, loss, rows, options)
        shared.append((clients[i].group, 1, sharing.divide(trained[i], fedavg.stays, options)[1]))
    personal = sharing.averaged(state, clients, trained, fedavg.stays, options)["personal"]
    return {"shared": average(state["shared"], shared), "personal": personal}, losses


def together(orders, w, options):
    """Reshape orders (m, epochs, n) to rows (epochs, k, m): an m-th of an epoch's batches, at least one."""
    parts, _, n = orders.shape
    least = nets.least_rows(w)
    whole, rest = divmod(n, options.batch_size)
    batches = whole + (rest >= least)
    steps = max(batches // parts, min(batches, 1))
    return np.moveaxis(orders, 0, -1)[:, : steps * options.batch_size]


def meta_loss(plain, options):
    """Return f(w~; b') and the direction of a variant; the columns of a batch are b, b' and perhaps b''."""

    def loss(w, rows):
        first, second, *third = rows.T
        alpha = rate(options)
        value, g = plain(moved(w, -alpha, plain(w, first)[1]), second)
        if options.variant == "fo":
            return value, g
        delta, b = (TINY, first) if options.variant == "exact" else (options.delta, third[0])
        ahead, behind = (plain(moved(w, way, g), b)[1] for way in (delta, -delta))
        curvature = {name: (ahead[name] - behind[name]) / (2 * delta) for name in g}
        return value, moved(g, -alpha, curvature)

    return loss


def rate(options):
    """Return the rate alpha."""
    return options.lr if options.alpha is None else options.alpha


def moved(w, rate, direction):
    """Return weights + rate * direction, without moving running statistics."""
    return {
        name: value if nets.is_statistic(name) else value + rate * direction[name]
        for name, value in w.items()
    }


def scores(state, clients, draws, options, x):
    """Score the global model as received, a copy after plain steps with rate alpha as deployed."""
    plain_steps = dataclasses.replace(options, momentum=0, weight_decay=0, clip_norm=None)
    newest, adapted = sharing.scores(state, clients, draws, options, x)["received"], []
    for i, client in enumerate(clients):
        w, (order,) = sharing.model(state, clients, i), draws[i]["adapt"]
        rows = order[: options.batch_size] if options.adapt == "step" else order
        w, _ = descend(w, plain_loss(client), [rows], plain_steps, lr=rate(options), optimizer="sgd")
        adapted.append(nets.logits(client.net, w, x))
    return {"received": newest, "deployed": adapted}


def draws(key, client, models, options):
    """Draw an order for each of the independent batches, in each epoch: (m, epochs, n)."""
    key = jax.random.fold_in(key, 0)
    orders = [
        padded_orders(key, jnp.int32(client.size), part, options.epochs)
        for part in range(3 if options.variant == "hf" else 2)
    ]
    return {"train": jnp.stack(orders)[:, :, : client.size]}


@functools.partial(jax.jit, static_argnums=(2, 3))
def padded_orders(key, size, part: int, epochs: int):
    """Return the orders of one of several lists of rows; part 0 has those of ordinary training."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs, dtype=jnp.int32))
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 2**31 - part) if part else keys
    return jax.vmap(lambda epoch: batch_order(epoch, size, max(SIZES)))(keys)


def draws_before_use(key, client, models, options):
    """Draw the order of one epoch."""
    one = dataclasses.replace(options, epochs=1)
    return phases(adapt="epochs")(key, client, models, one)


# ---- what another method computes


def without_an_inner_step_it_is_fedavg_of_equal_clients():
    for variant in ("fo", "hf", "exact"):
        for (maml, report), (plain, expected) in zip(
            run("per-fedavg", equal(), cohorts=ALWAYS, variant=variant, alpha=0.0, **TRAINING),
            run("fedavg", equal(), cohorts=ALWAYS, **TRAINING),
            strict=True,
        ):
            assert_same(maml.shared, plain.shared, tolerance=1e-5)
            assert_same(reported(report), reported(expected), tolerance=1e-5)


per_fedavg = Case(
    "per-fedavg",
    fedavg.start,
    step,
    scores,
    draws=draws,
    draws_before_use=draws_before_use,
    traffic=lambda model, models, t: model.size,
    idle_rates={"delta"},  # only used by a variant that is not the default
    comparisons={
        "": Comparison({"clip_norm": 0.9}, [("lr", 0.051), ("adapt", "epoch"), ("clip_norm", 0.91)]),
        "exact": Comparison(
            {"variant": "exact", "alpha": 0.2, "adapt": "epoch"},
            [("variant", "fo"), ("alpha", 0.201), ("adapt", "step")],
            ((CONVOLVING, 5),),
        ),
        "hf, local statistics": local_statistics(
            ("variant", "exact"), ("delta", 0.11), variant="hf", alpha=0.2, delta=0.1
        ),
    },
    reductions=(without_an_inner_step_it_is_fedavg_of_equal_clients,),
)
