"""FedRoD (Chen and Chao 2022, arXiv:2107.00778, section 4, linear personal head).

The personal head P is one more part of a client's weights, in addition to the generic head G.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from conftest import assert_same, differ
from reference import nets, sharing
from reference.training import cross_entropy, descend

from methods.cases import Case, Comparison, local_statistics
from methods.rounds import TRAINING, alike, run

PERSONAL = "personal"
personal_head = nets.dense(PERSONAL)


def stays(name):
    """Keep the personal head on its client."""
    return nets.block_of(name) == PERSONAL


def start(clients, initial, options):
    """Start with extractors and generic heads on the server; P is a copy of the initial G."""
    with_personal_heads = [
        weights | {name.replace(nets.HEAD, PERSONAL): leaf for name, leaf in nets.head(weights).items()}
        for weights in initial
    ]
    return sharing.begun(clients, with_personal_heads, stays, options)


def step(state, clients, cohort, options):
    """(f, G, P_i) <- SGD over both losses; f, G <- sum_i n_i (f_i, G_i) / sum_i n_i."""
    trained, losses = {}, {}
    for i, draw in cohort.draws.items():
        loss = two_losses(clients[i], options.gamma)
        trained[i], losses[i] = descend(sharing.model(state, clients, i), loss, draw["train"], options)
    return sharing.averaged(state, clients, trained, stays, options), losses


def two_losses(client, gamma):
    """Return CE(G(z) + gamma log n_c) for f and G, plus CE(G(z) + P(z)) for P alone.

    A class without rows on the client has log 0 = -inf and so no part in the first softmax.
    """

    def loss(weights, rows):
        y = client.y[rows]
        z, through_body = client.net(weights, client.x[rows], True)
        generic, through_generic = nets.classify(weights, z)
        residual, through_personal = personal_head(weights, z)
        with np.errstate(divide="ignore"):
            prior = gamma * np.log(np.bincount(client.y, minlength=generic.shape[1]))
        value_g, dgeneric = cross_entropy(generic + prior, y)
        value_p, dresidual = cross_entropy(generic + residual, y)
        dz, of_generic = through_generic(dgeneric)
        _, of_personal = through_personal(dresidual)  # this gradient stops before z and G
        return value_g + value_p, through_body(dz)[1] | of_generic | of_personal

    return loss


def scores(state, clients, draws, options, x):
    """Score G(z) + P_i(z), with the newest f and G."""
    both = []
    for i, client in enumerate(clients):
        weights = sharing.model(state, clients, i)
        z, _ = client.net(weights, x)
        both.append(nets.classify(weights, z)[0] + personal_head(weights, z)[0])
    return {"received": both, "deployed": both}


# ---- what another method computes


def the_generic_part_is_fedavg_without_the_exponent():
    fedrod, _ = run("fedrod", alike(), gamma=0.0, **TRAINING)[-1]
    fedavg, _ = run("fedavg", alike(), **TRAINING)[-1]
    assert_same(fedrod.shared, fedavg.shared, tolerance=1e-6)


def the_generic_part_is_fedavg_on_balanced_classes():
    fedavg, _ = run("fedavg", alike(), **TRAINING)[-1]
    unbalanced, _ = run("fedrod", alike(), **TRAINING)[-1]
    assert differ(unbalanced.shared, fedavg.shared)

    (group,) = alike().groups
    group = dataclasses.replace(group, class_counts=jnp.full_like(group.class_counts, 4))
    balanced, _ = run("fedrod", dataclasses.replace(alike(), groups=(group,)), **TRAINING)[-1]
    assert_same(balanced.shared, fedavg.shared, tolerance=1e-5)


fedrod = Case(
    "fedrod",
    start,
    step,
    scores,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison({"gamma": 0.8}, mistakes=[("gamma", 0.81)]),
        "local statistics": local_statistics(gamma=0.8),
    },
    reductions=(
        the_generic_part_is_fedavg_without_the_exponent,
        the_generic_part_is_fedavg_on_balanced_classes,
    ),
)
