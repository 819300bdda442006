"""HeteroFL (Diao et al. 2021, arXiv:2010.01264, Algorithm 1), a network in two widths; group 1 is wider."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SHAPE, assert_same, initial, tiny_cnn
from reference import nets
from reference.training import cross_entropy, descend

from jaxfl.algorithms.shared_entries import static_norm
from jaxfl.algorithms.shared_entries.static_norm import gathered, rows_of_all
from jaxfl.models import zoo
from methods.cases import CONVOLVING, NORMALISED, Case, Comparison, local_statistics, on_batch_norm
from methods.rounds import ALWAYS, TRAINING, alike, billed, equal, federated, mlp, normalised, reported, run

NARROW = {"conv1": 2, "fc1": 3}  # channels and features
NARROW_CNN = on_batch_norm(tiny_cnn("cnn", (NARROW["conv1"], 2), norm=True, features=NARROW["fc1"]))
NARROW_MLP = on_batch_norm(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=NARROW["fc1"], norm="batch"))


def start(clients, initial, options):
    """Start with the wider network on the server; static statistics are not stored."""
    whole, kept = initial[1], {}
    if options.static_bn or options.bn_stats == "local":
        whole = {name: value for name, value in whole.items() if not nets.is_statistic(name)}
    for i, client in enumerate(clients):
        own = {name: value for name, value in initial[1].items() if name not in whole}
        kept[i] = {} if options.static_bn else taken(own, client, "conv1/conv/kernel" in whole)
    return {"shared": {1: whole}, "personal": kept}


def step(state, clients, cohort, options):
    """W_i <- SGD(W[r_i]); every entry is the mean of the clients that hold it."""
    whole, kept, losses = state["shared"][1], dict(state["personal"]), {}
    sums, counts = ({name: np.zeros(w.size) for name, w in whole.items()} for _ in range(2))
    for i, draw in cohort.draws.items():
        w = received(state, clients, i)
        loss = functools.partial(masked_loss, clients[i], options, state)
        trained, losses[i] = descend(begun(w, options), loss, draw["train"], options)
        kept[i] = {name: trained[name] for name in kept[i]}
        for name, grid in positions(whole, clients[i]).items():
            held = np.ones(grid.shape)
            if nets.in_head(name):
                held[..., [c for c in range(CLASSES) if c not in clients[i].y]] = 0
            np.add.at(sums[name], grid, held * trained[name])
            np.add.at(counts[name], grid, held)
    new = {
        name: np.where(counts[name] > 0, sums[name] / np.maximum(counts[name], 1), old.ravel())
        for name, old in whole.items()
    }
    shared = {1: {name: value.reshape(whole[name].shape) for name, value in new.items()}}
    return {"shared": shared, "personal": kept}, losses


def taken(weights, client, convolving):
    """Take a client's first channels from leaves of the wider network."""
    if client.group == 1:
        return weights

    def of_leaf(name, leaf):
        block = nets.block_of(name)
        if nets.in_head(name):
            return leaf if leaf.ndim == 1 else leaf[: NARROW["fc1"]]
        if name == "fc1/linear/kernel" and convolving:
            of_pixels = leaf.reshape(16, -1, leaf.shape[1])
            return of_pixels[:, : NARROW["conv1"], : NARROW["fc1"]].reshape(-1, NARROW["fc1"])
        return leaf[..., : NARROW[block]]

    return {name: of_leaf(name, leaf) for name, leaf in weights.items()}


def positions(whole, client):
    """Return the positions of a client's entries in the wider network's flattened leaves."""
    grids = {name: np.arange(w.size).reshape(w.shape) for name, w in whole.items()}
    return taken(grids, client, "conv1/conv/kernel" in whole)


def received(state, clients, i):
    """Return the client's slice and what it keeps."""
    whole = state["shared"][1]
    return {name: whole[name].ravel()[grid] for name, grid in positions(whole, clients[i]).items()} | (
        state["personal"][i]
    )


def begun(w, options):
    """Return the same with statistics of 0 where static BatchNorm stores none."""
    if not options.static_bn:
        return w
    norms = [name.removesuffix("/scale") for name in w if name.endswith("norm/scale")]
    zero = {norm: 0 * w[f"{norm}/bias"] for norm in norms}
    return w | {f"stats/{norm}/{leaf}": zero[norm] for norm in norms for leaf in ("mean", "var")}


def scaler(state, w, options):
    """Return the share r of each leaf that is divided."""
    whole = state["shared"][1]
    layers = ["conv1/conv/kernel", "conv1/conv/bias", "fc1/linear/kernel", "fc1/linear/bias"]
    hidden = [name for name in layers if name in w]
    return {name: w[name].shape[-1] / whole[name].shape[-1] for name in hidden if options.scaler}


def masked_loss(client, options, state, w, rows):
    """Return cross-entropy of the scaled network, with logits of absent classes 0."""
    r, absent = scaler(state, w, options), lacking(client, options)
    divided = w | {name: w[name] / r[name] for name in r}
    z, through_body = client.net(divided, client.x[rows], True)
    logits, through_head = nets.classify(divided, z)
    logits[:, absent] = 0
    value, dlogits = cross_entropy(logits, client.y[rows])
    dlogits[:, absent] = 0
    dz, of_head = through_head(dlogits)
    gradients = through_body(dz)[1] | of_head
    return value, gradients | {name: gradients[name] / r[name] for name in r}


def lacking(client, options):
    """Return the classes whose logits are 0."""
    return [c for c in range(CLASSES) if options.masked and c not in client.y]


def scores(state, clients, draws, options, x):
    """Score the client's slice, scaled and masked; statistics are of all clients of its width, or its own."""

    def of_client(i, client):
        w = begun(received(state, clients, i), options)
        r = scaler(state, w, options)
        w = w | {name: w[name] / r[name] for name in r}
        if options.static_bn:
            like = [other for other in clients if other.group == client.group]
            seen = [client.x] if options.bn_stats == "local" else [other.x for other in like]
            z, through_body = client.net(w, np.concatenate(seen), True)
            found = through_body(0 * z)[1]  # a tenth of the batch's, as they were 0
            w = w | {name: 10 * found[name] for name in w if nets.is_statistic(name)}
        logits = nets.logits(client.net, w, x)
        logits[:, lacking(client, options)] = 0
        return logits

    found = [of_client(i, client) for i, client in enumerate(clients)]
    return {"received": found, "deployed": found}


# ---- what another method computes


def with_one_width_it_is_fedavg():
    for (heterofl, report), (fedavg, expected) in zip(
        run("heterofl", equal(), ALWAYS, clip_norm=None, **TRAINING),
        run("fedavg", equal(), ALWAYS, **TRAINING),
        strict=True,
    ):
        assert_same(heterofl.shared[0].params, fedavg.shared[0].params, tolerance=1e-6)
        assert_same(reported(report), reported(expected), tolerance=1e-6)


def narrow_clients_do_not_move_entries_of_wider_networks():
    narrow, wide = mlp(hidden=2), mlp(hidden=4)
    (state, _), (later, _) = run(
        "heterofl", federated((wide, 2), (narrow, 3)), (range(5), (2, 4)), **TRAINING
    )
    before, after = (np.asarray(of.shared[0].params["fc1"]["linear"]["kernel"]) for of in (state, later))
    assert_same(after[:, 2:], before[:, 2:])
    assert (after[:, :2] != before[:, :2]).any()


def gathering_statistics_adds_no_operations():
    *_, gathering = billed("heterofl", normalised(), **TRAINING)
    *_, without = billed("heterofl", normalised(), static_bn=False, **TRAINING)
    assert_same(gathering, without)


def batches_of_statistics_count_by_their_rows():
    """Five rows come in batches of three and two."""
    model, federation = mlp(norm="batch"), alike()
    params, rows = initial(model).params, jnp.arange(5, dtype=jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_norm, "BATCH", 3)
        found = jax.jit(lambda: gathered(model, params, rows, jnp.int32(5), federation, jax.random.key(0)))()
    kernel, bias = (np.asarray(params["fc1"]["linear"][name]) for name in ("kernel", "bias"))
    seen = np.asarray(federation.inputs(rows)).reshape(5, -1) @ kernel + bias
    np.testing.assert_allclose(found["fc1"]["norm"]["mean"], seen.mean(0), rtol=1e-4, atol=1e-5)


def large_statistics_are_right_in_single_precision():
    """A variance is 1e10, and running statistics move by a tenth of it."""
    model, federation = mlp(norm="batch"), alike()
    params, rows = initial(model).params, jnp.arange(5, dtype=jnp.int32)

    def variance(scale):
        linear = jax.tree.map(lambda leaf: leaf * scale, params["fc1"]["linear"])
        scaled = params | {"fc1": params["fc1"] | {"linear": linear}}
        return gathered(model, scaled, rows, jnp.int32(5), federation, jax.random.key(0))["fc1"]["norm"][
            "var"
        ]

    small, large = (np.asarray(jax.jit(variance)(jnp.float32(scale))) for scale in (1, 1e5))
    np.testing.assert_allclose(large, 1e10 * small, rtol=1e-4)


def statistics_exclude_newcomers():
    """Client 0 is the newcomer."""
    (group,) = equal().groups
    first = dataclasses.replace(group, newcomer=group.id == 0)
    rows, size = rows_of_all(first)
    assert rows[:size].tolist() == sorted(np.asarray(group.rows)[1:].ravel().tolist())


heterofl = Case(
    "heterofl",
    start,
    step,
    scores,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison(
            {"clip_norm": 0.9},
            [("clip_norm", 0.91), ("scaler", False), ("masked", False), ("bn_stats", "local")],
            ((NARROW_CNN, 3), (CONVOLVING, 2)),
        ),
        "averaged statistics": Comparison(
            {"static_bn": False}, [("momentum", 0.51)], ((NARROW_MLP, 3), (NORMALISED, 2))
        ),
        "running statistics": local_statistics(
            ("scaler", True),
            ("masked", True),
            scaler=False,
            masked=False,
            static_bn=False,
            models=((NARROW_MLP, 3), (NORMALISED, 2)),
        ),
    },
    reductions=(
        with_one_width_it_is_fedavg,
        narrow_clients_do_not_move_entries_of_wider_networks,
        gathering_statistics_adds_no_operations,
        batches_of_statistics_count_by_their_rows,
        large_statistics_are_right_in_single_precision,
        statistics_exclude_newcomers,
    ),
)
