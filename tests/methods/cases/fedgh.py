"""FedGH (Yi et al. 2023, arXiv:2303.13137, Algorithm 1): own extractors under one header H."""

import jax
import numpy as np
from conftest import CLASSES, SIZES, assert_same
from reference import nets
from reference.class_means import of_client
from reference.training import cross_entropy, descend, plain_loss

from jaxfl.core.batches import batch_order
from jaxfl.core.streams import SERVER
from methods import recording
from methods.cases import NORMALISED, Case, Comparison, fedproto, local_statistics
from methods.rounds import TRAINING, alike, mlp, run


def start(clients, initial, options):
    """Start with own extractors; the header is the first architecture's classifier."""
    extractors = {i: nets.body(initial[client.group]) for i, client in enumerate(clients)}
    return {"extractors": extractors, "header": nets.head(initial[0])}


def step(state, clients, cohort, options):
    """Train models under H and keep their extractors; then H learns the class means of all."""
    extractors, losses, pairs = dict(state["extractors"]), {}, []
    for i in sorted(cohort.draws):
        w, losses[i] = descend(
            extractors[i] | state["header"], plain_loss(clients[i]), cohort.draws[i]["train"], options
        )
        extractors[i] = nets.body(w)
        pairs += [(z, c) for c, (z, _) in of_client(clients[i], w).items()]
    return {
        "extractors": extractors,
        "header": taught(state["header"], pairs, cohort.server, options),
    }, losses


def taught(header, pairs, orders, options):
    """Train the header by plain SGD on the pairs (mean, class)."""
    for order in orders:
        order = order[order < len(pairs)]
        for first in range(0, len(order), options.batch_size):
            batch = [pairs[row] for row in order[first : first + options.batch_size]]
            scores, back = nets.classify(header, np.stack([z for z, _ in batch]))
            _, dscores = cross_entropy(scores, np.array([c for _, c in batch]))
            gradients = back(dscores)[1]
            header = {name: w - options.server_lr * gradients[name] for name, w in header.items()}
    return header


def scores(state, clients, draws, options, x):
    """Score the own extractor under the newest header, received and deployed."""
    found = [
        nets.logits(client.net, state["extractors"][i] | state["header"], x)
        for i, client in enumerate(clients)
    ]
    return {"received": found, "deployed": found}


# ---- what connects it with jaxfl


def draws_of_server(key, options):
    """Draw in each epoch an order of as many pairs as there can be; missing ones are skipped."""
    key, most = jax.random.fold_in(jax.random.fold_in(key, SERVER), 0), len(SIZES) * CLASSES
    return [
        batch_order(jax.random.fold_in(key, epoch), np.int32(most), most)
        for epoch in range(options.server_epochs)
    ]


def view(state, federation, t):
    """Return the extractors, and the header as a block."""
    extractors = recording.by_client(state.extractors, federation)
    return {"extractors": extractors, "header": {nets.HEAD: state.header}}


def traffic(model, models, t):
    """Count each class's mean and number (up), and the header (down)."""
    (d,) = model.head.shape
    return lambda i: len(fedproto.classes_of(i)) * (d + 1), model.head.size


def with_an_idle_server_every_clients_first_round_is_that_of_local():
    """Every client takes part once; from then on its extractor is that of Local."""
    once = (0, 3), (1, 2), (4,)
    for (fedgh, report), (local, expected) in zip(
        run("fedgh", alike(), once, server_epochs=0, **TRAINING),
        run("local", alike(), once, **TRAINING),
        strict=True,
    ):
        (theta,), (w,) = fedgh.extractors, local.kept
        assert_same(theta.params, {name: w.params[name] for name in theta.params})
        assert_same(report.loss, expected.loss)


fedgh = Case(
    "fedgh",
    start,
    step,
    scores,
    view=view,
    draws_of_server=draws_of_server,
    traffic=traffic,
    returns=False,
    short={"server_epochs": 2},
    comparisons={
        "": Comparison(
            {"server_epochs": 3, "server_lr": 0.3, "clip_norm": 0.5},
            [("server_lr", 0.31)],
            ((mlp(), 3), (NORMALISED, 2)),
        ),
        "local statistics": local_statistics(("batch_size", 4), server_epochs=2, server_lr=0.2),
    },
    reductions=(with_an_idle_server_every_clients_first_round_is_that_of_local,),
)
