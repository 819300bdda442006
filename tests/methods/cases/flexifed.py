"""FlexiFed (Wang et al. 2023, doi:10.1145/3543507.3583347, section 3), its three strategies."""

import numpy as np
from conftest import assert_same
from reference import nets, own_models
from reference.training import descend, plain_loss

from jaxfl.algorithms.shared_entries.flexifed import STRATEGIES
from jaxfl.mechanisms.shared_entries import layers
from methods import recording
from methods.cases import NORMALISED, THREE_LAYERS, TWO_LAYERS, Case, Comparison, local_statistics
from methods.rounds import ALWAYS, TRAINING, billed, equal, federated, reported, run


def start(clients, initial, options):
    """Start with own models; common layers are those of the first architecture that has them."""
    own = {}
    for i, client in enumerate(clients):
        own[i] = dict(initial[client.group])
        for level, block in enumerate(nets.BLOCKS[client.net]):
            first = partners(clients, initial, i, level, options)[0]
            own[i] |= renamed(initial[clients[first].group], clients[first], level, block, options)
    return {"own": own}


def step(state, clients, cohort, options):
    """w_i <- SGD(w_i); then layer by layer the mean over the present clients of C_il."""
    own, losses, initial = dict(state["own"]), {}, of_architectures(state, clients)
    trained = {}
    for i, draw in cohort.draws.items():
        trained[i], losses[i] = descend(own[i], plain_loss(clients[i]), draw["train"], options)
    for i in trained:
        own[i] = dict(trained[i])
        for level, block in enumerate(nets.BLOCKS[clients[i].net]):
            present = [j for j in partners(clients, initial, i, level, options) if j in trained]
            of_each = [renamed(trained[j], clients[j], level, block, options) for j in present]
            own[i] |= {name: np.mean([leaves[name] for leaves in of_each], axis=0) for name in of_each[0]}
    return {"own": own}, losses


def of_architectures(state, clients):
    """Return weights of each architecture, for their shapes."""
    first = {client.group: i for i, client in reversed(list(enumerate(clients)))}
    return [state["own"][first[group]] for group in sorted(first)]


def partners(clients, weights, i, level, options):
    """Return C_il: the clients with which i shares a layer, at least itself."""

    def kinds(j, levels):
        blocks = list(nets.BLOCKS[clients[j].net])[:levels]
        leaves = weights[clients[j].group].items()
        return [
            {(name.split(block)[1], value.shape) for name, value in leaves if nets.block_of(name) == block}
            for block in blocks
        ]

    everyone = range(len(clients))
    if options.strategy == "max-common":
        return [j for j in everyone if kinds(j, level + 1) == kinds(i, level + 1)]
    if all(kinds(j, level + 1) == kinds(i, level + 1) for j in everyone):
        return list(everyone)
    mine = [j for j in everyone if clients[j].group == clients[i].group]
    return mine if options.strategy == "clustered-common" else [i]


def renamed(weights, client, level, block, options):
    """Return a client's sent leaves of a layer, renamed to another client's block there."""
    theirs = list(nets.BLOCKS[client.net])[level]
    return {
        name.replace(theirs, block): value
        for name, value in weights.items()
        if nets.block_of(name) == theirs and not (options.bn_stats == "local" and nets.is_statistic(name))
    }


# ---- what another method computes, and which layers are common


def with_one_architecture_it_is_fedavg():
    for (flexifed, report), (fedavg, expected) in zip(
        run("flexifed", equal(), ALWAYS, **TRAINING), run("fedavg", equal(), ALWAYS, **TRAINING), strict=True
    ):
        assert_same(recording.at(flexifed.weights, 2)[0], fedavg.shared[0], tolerance=1e-6)
        assert_same(reported(report), reported(expected), tolerance=1e-6)


def layers_that_nobody_else_has_are_not_sent_back():
    """A client of each architecture: with two layers and with three, of which the first are alike."""
    clients = federated((TWO_LAYERS, 2), (THREE_LAYERS, 3))
    _, down, _ = billed("flexifed", clients, (1, 2), **TRAINING)
    alike = sum(np.prod(shape, dtype=int) for layer in layers(TWO_LAYERS)[:2] for _, shape in layer.kind[1:])
    assert [of_group.tolist() for of_group in down] == [[alike, 0], [alike, 0, 0]]


def strategies_name_the_architecture_whose_layer_is_shared():
    models, none = (NORMALISED, TWO_LAYERS, THREE_LAYERS, TWO_LAYERS), None
    owners = {
        name: [
            [strategy(models)(g, level) for level in range(len(layers(model)))]
            for g, model in enumerate(models)
        ]
        for name, strategy in STRATEGIES.items()
    }
    assert owners == {
        "basic-common": [[0, none], [0, none, none], [0, none, none, none], [0, none, none]],
        "clustered-common": [[0, 0], [0, 1, 1], [0, 2, 2, 2], [0, 3, 3]],
        "max-common": [[0, 0], [0, 1, 1], [0, 1, 2, 2], [0, 1, 1]],
    }


flexifed = Case(
    "flexifed",
    start,
    step,
    own_models.scores,
    view=recording.own_models,
    # Clients 0 and 1 share all layers; client 3 is alone with its architecture.
    traffic=lambda model, models, t: (model.size, lambda i: 0 if i == 3 else model.size),
    comparisons={
        "": Comparison(
            {},
            [("strategy", "clustered-common"), ("strategy", "basic-common")],
            ((NORMALISED, 2), (TWO_LAYERS, 2), (THREE_LAYERS, 1)),
        ),
        "basic-common, local statistics": local_statistics(
            ("strategy", "max-common"),
            strategy="basic-common",
            models=((NORMALISED, 3), (TWO_LAYERS, 2)),
        ),
    },
    reductions=(
        with_one_architecture_it_is_fedavg,
        layers_that_nobody_else_has_are_not_sent_back,
        strategies_name_the_architecture_whose_layer_is_shared,
    ),
)
