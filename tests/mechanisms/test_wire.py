"""What happens to messages between clients and server, by value and as a whole."""

import dataclasses
import functools
import math

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SIZES, assert_same, cohort, differ, long, tiny_cnn, tiny_models
from dp_accounting import rdp
from methods.cases import CASES, keeps_apart
from methods.cases.dfedavg import neighbours
from methods.rounds import ALWAYS, EVERYONE, alike, equal, federated, initial, mlp, program, run

from jaxfl.config.setup import Setup
from jaxfl.core import tree
from jaxfl.core.cohorts import draw_poisson
from jaxfl.core.examples import as_trained, own_rows
from jaxfl.core.job import traced
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import choose
from jaxfl.mechanisms.wire import messages
from jaxfl.mechanisms.wire.accounting import Accounting, least_noise
from jaxfl.mechanisms.wire.aggregation import (
    GeometricMedian,
    Krum,
    Median,
    TrimmedMean,
    clipped,
    of_finite,
)
from jaxfl.mechanisms.wire.attacks import Noise, Scale, SignFlip, draw_attackers
from jaxfl.mechanisms.wire.compression import COMPRESSIONS, LowRank, Quantize, Sign, TopK
from jaxfl.mechanisms.wire.privacy import Gaussian, Rows
from jaxfl.mechanisms.wire.setup import Own, Wire, _second, wire_of
from jaxfl.registry import METHODS
from jaxfl.runs.engine_job import _require_on_the_wire

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
CHANGE = {
    "bias": RNG.normal(size=7).astype(np.float32),
    "kernel": RNG.normal(size=(3, 5, 7)).astype(np.float32),
    "scale": np.zeros((2,), np.float32),
}
MESSAGES = {
    "a": RNG.normal(size=(9, 4)).astype(np.float32),
    "b": RNG.normal(size=(9, 2, 3)).astype(np.float32),
}
WEIGHTS = np.array([3, 0, 1, 2, 2, 0, 5, 1, 1], np.float32)  # two are absent
THERE = WEIGHTS > 0


def flat(tree_):
    """Return the entries of a message, or (k, all) of messages, in the order of leaves."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree_)])


def rows_of(messages):
    """Return messages (k, ...) as a matrix (k, entries)."""
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in jax.tree.leaves(messages)], axis=1)


# ---- compression: NumPy references, each with a mistake that they must catch


def quantized(change, bits, mistake=False):
    keys = jax.random.split(KEY, len(change))
    found = []
    for key, leaf in zip(keys, jax.tree.leaves(change), strict=True):
        u = np.asarray(jax.random.uniform(key, leaf.shape))
        levels = 2 ** (bits - 1) - 1
        step = np.abs(leaf).max() / levels or 1
        found.append(np.floor(leaf / step + (0.5 if mistake else u)) * step)
    return flat(found)


def largest(change, share, mistake=False):
    """The mistake takes the largest of each leaf."""
    parts = jax.tree.leaves(change) if mistake else [flat(change)]
    kept = []
    for part in map(np.ravel, parts):
        order = np.argsort(-np.abs(part), kind="stable")[: max(1, round(share * part.size))]
        kept.append(np.where(np.isin(np.arange(part.size), order), part, 0))
    return np.concatenate(kept)


def signs(change, mistake=False):
    """The mistake takes one mean size for all leaves."""
    size = np.abs(flat(change)).mean()
    return flat([np.where(x < 0, -1, 1) * (size if mistake else np.abs(x).mean()) for x in change.values()])


def thin(change, rank, mistake=False):
    """The mistake takes the first axis against all others."""
    keys, found = jax.random.split(KEY, len(change)), []
    for key, leaf in zip(keys, jax.tree.leaves(change), strict=True):
        matrix = leaf.reshape(len(leaf), -1).T if mistake else leaf.reshape(-1, leaf.shape[-1])
        if rank * sum(matrix.shape) >= leaf.size or leaf.ndim < 2:
            found.append(leaf)
            continue
        q, _ = np.linalg.qr(matrix @ np.asarray(jax.random.normal(key, (matrix.shape[1], rank))))
        found.append(q @ (q.T @ matrix))
    return flat(found)


COMPRESSED = {
    "quantize": (Quantize(bits=3), functools.partial(quantized, bits=3)),
    "top-k": (TopK(share=0.1), functools.partial(largest, share=0.1)),
    "sign": (Sign(), signs),
    "low-rank": (LowRank(rank=2), functools.partial(thin, rank=2)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_change_is_that_of_numpy(name):
    transform, reference = COMPRESSED[name]
    found = flat(jax.jit(traced(transform).__call__)(KEY, CHANGE))
    np.testing.assert_allclose(found, reference(CHANGE), rtol=2e-5, atol=2e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(found, reference(CHANGE, mistake=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("transform", "bits"),
    [
        (Quantize(bits=3), 3 * 114 + 3 * 32),
        (Quantize(bits=32), 32 * 114),
        (TopK(share=0.1), 11 * (32 + 7)),  # 114 entries have numbers of 7 bits
        (TopK(share=1.0), 32 * 114),
        (Sign(), 114 + 3 * 32),
        (LowRank(rank=2), 32 * (7 + 2 + 2 * (15 + 7))),
    ],
)
def test_the_ledger_counts_the_bits_that_travel(transform, bits):
    assert int(traced(transform).scalars(CHANGE)) == math.ceil(bits / 32)


def test_a_large_message_has_more_bits_than_an_int32_counts():
    form = jax.ShapeDtypeStruct((10**8,), np.float32)
    assert int(traced(TopK(share=0.5)).scalars(form)) == 5 * 10**7 + math.ceil(5 * 10**7 * 27 / 32)


def test_quantisation_keeps_the_mean():
    """Of n draws the mean is within five standard errors; a rounded entry is off by up to half a step."""
    draws = jax.vmap(lambda key: Quantize(bits=2)(key, CHANGE)["bias"])(jax.random.split(KEY, 4000))
    step = np.abs(CHANGE["bias"]).max()
    assert (np.abs(draws.mean(0) - CHANGE["bias"]) < 5 * 0.5 * step / math.sqrt(4000)).all()
    assert set(np.round(np.unique(draws) / step, 5)) == {-1, 0, 1}


# ---- servers


def median(rows, weights, mistake=False):
    return np.median(rows if mistake else rows[weights > 0], axis=0)


def trimmed(rows, weights, mistake=False):
    from scipy.stats import trim_mean

    return trim_mean(rows[weights > 0], 0.2 if not mistake else 0.1, axis=0)


def krum(rows, weights, mistake=False):
    """Multi-Krum of two; the mistake counts a client as its own neighbour."""
    rows = rows[weights > 0]
    n, f = len(rows), (len(rows) - 3) // 2
    away = ((rows[:, None] - rows[None]) ** 2).sum(2)
    scores = [
        np.sort(np.delete(row, i) if not mistake else row)[: n - f - 2].sum() for i, row in enumerate(away)
    ]
    best = np.argsort(scores, kind="stable")[:2] if not mistake else np.argsort(scores)[:1]
    return rows[best].mean(0)


def geometric(rows, weights, mistake=False):
    """The mistake leaves weights out."""
    weights = np.where(weights > 0, 1, 0) if mistake else weights
    z = weights @ rows / weights.sum()
    for _ in range(8):
        b = weights / np.maximum(1e-6, np.sqrt(((rows - z) ** 2).sum(1)))
        z = b @ rows / b.sum()
    return z


SERVERS = {
    "median": (Median(), median),
    "trimmed-mean": (TrimmedMean(share=0.2), trimmed),
    "krum": (Krum(m=2), krum),
    "geometric-median": (GeometricMedian(), geometric),
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("weights", [WEIGHTS, np.ones(9, np.float32)], ids=["absent", "all"])
def test_a_server_computes_what_numpy_does(name, weights):
    server, reference = SERVERS[name]
    found = flat(jax.jit(traced(server).__call__)(MESSAGES, weights))
    np.testing.assert_allclose(found, reference(rows_of(MESSAGES), weights), rtol=1e-4, atol=1e-5)
    if weights is WEIGHTS:
        with pytest.raises(AssertionError):
            np.testing.assert_allclose(
                found, reference(rows_of(MESSAGES), weights, mistake=True), rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_a_loud_lie_does_not_hide_the_distances_of_others_from_krum(size):
    loud = jax.tree.map(np.copy, MESSAGES)
    for leaf in loud.values():
        leaf[[0, 3]] *= size
    found = flat(jax.jit(traced(Krum(m=2)).__call__)(loud, WEIGHTS))
    exact = rows_of(loud).astype(float)
    np.testing.assert_allclose(found, krum(exact, WEIGHTS), rtol=1e-5)
    assert np.abs(found).max() < 10


def test_krum_keeps_away_from_lies_where_fewer_answer_than_its_attackers_need():
    few = {"w": jnp.array([0, 0.1, 0.2, 0.3, 50, 50])}
    assert float(Krum(attackers=4)(few, jnp.ones(6))["w"]) < 1


@pytest.mark.parametrize("name", SERVERS)
def test_what_is_not_finite_is_left_out(name):
    server, reference = SERVERS[name]
    spoilt = jax.tree.map(np.copy, MESSAGES)
    spoilt["a"][0, 1], spoilt["b"][1] = np.nan, np.inf  # of client 0, and of client 1, which is absent
    found, left_out = jax.jit(of_finite)(traced(server), spoilt, WEIGHTS)
    assert left_out.tolist() == [True] + 8 * [False]
    weights = np.where(np.arange(9) == 0, 0, WEIGHTS)
    np.testing.assert_allclose(flat(found), reference(rows_of(MESSAGES), weights), rtol=1e-4, atol=1e-5)
    spoilt["a"][WEIGHTS > 0, 1] = np.inf  # of everybody: the server has diverged with them
    found, left_out = jax.jit(of_finite)(traced(server), spoilt, WEIGHTS)
    assert np.isnan(flat(found)).all() and not left_out.any()


def test_a_client_may_send_nothing():
    """As under `local`."""
    transforms = [*COMPRESSIONS.values(), SignFlip, Noise, Scale]
    assert all(of()(KEY, {}) == {} for of in transforms)
    assert Gaussian().noisy(KEY, clipped({}, 1.0)) == {}


def test_clipping_scales_the_whole_message_and_only_down():
    norm = np.linalg.norm(flat(CHANGE))
    np.testing.assert_allclose(flat(clipped(CHANGE, norm / 3)), flat(CHANGE) / 3, rtol=1e-5)
    assert_same(clipped(CHANGE, 2 * norm), jax.tree.map(jnp.asarray, CHANGE))
    assert_same(clipped(CHANGE, 3e38), jax.tree.map(jnp.asarray, CHANGE))


# ---- whole rounds


def on(federation, **options):
    """Return the federation with the wire of these options."""
    return dataclasses.replace(federation, wire=wire_of(Setup.of(**options), federation))


UNIFORM = {"weighting": "uniform"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aggregate": "krum,attackers=2"}, "needs 7 messages .* 5 on average"),
        ({"aggregate": "krum,m=6"}, "needs 6 messages .* 5 on average"),
        ({"aggregate": "krum", "participation": 0.4}, "needs 3 messages .* 2 on average"),
        ({"aggregate": "trimmed-mean,share=0.19"}, "leaves out none .* 5 in a round on average; raise share"),
        (
            {"aggregate": "krum,attackers=1", "sampling": "poisson", "participation": 0.6},
            "needs 5 messages .* 3 on average",
        ),
        ({"privacy": "gaussian,rate=0.3"}, "rate is of a clip norm that adapts; add adapt=0.5"),
        ({"attack": "sign-flip,share=0.1"}, "makes none of 5 clients an attacker"),
        ({"attack": "mean"}, "There is no attack 'mean'"),
        ({"aggregate": "none"}, "There is no server 'none'"),
    ],
)
def test_what_a_round_cannot_have_is_refused(options, words):
    with pytest.raises(JaxflError, match=words):
        on(alike(), **options)


def test_without_an_attack_few_clients_are_enough():
    assert not on(federated((mlp(), 3), sizes=SIZES[:3]), compress="sign").wire.attackers.any()


@pytest.mark.parametrize("known", [{"w": jnp.float32([1, 2])}, None])
def test_a_function_of_ones_own_gets_changes_in_place_of_messages(known):
    """What the server knows None of is a change already."""
    own = Own(lambda messages, weights: {"w": 2 * messages["w"][0]}, (), lambda m, weights: tree.one(m))
    wire = Wire(np.zeros(2, bool), np.ones(1), aggregate=own)
    made, _ = wire.trusted({"w": jnp.array([[4.0, 8], [9, 9]])}, jnp.ones(2), known)
    np.testing.assert_array_equal(made["w"], [7, 14] if known else [8, 16])


NOTHING = [
    ({"privacy": "gaussian,noise=0,clip=3e38"}, UNIFORM),
    ({"privacy": "gaussian,noise=0,clip=3e38,where=client"}, UNIFORM),
    ({"compress": "quantize,bits=32"}, {}),
    ({"compress": "top-k,share=1"}, {}),
    ({"compress": "top-k,share=1,feedback=true"}, {}),
    ({"compress": "low-rank,rank=99"}, {}),
    ({"attack": "sign-flip,share=0"}, {}),
    ({"attack": "scale,factor=1,share=0.9"}, {}),
    ({"aggregate": "norm-bound,bound=3e38"}, {}),
    ({"aggregate": "trimmed-mean,share=0"}, UNIFORM),
]
FEEDBACK = NOTHING[4]  # with which SCAFFOLD does all that it does over a wire


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [("fedavg", *row) for row in NOTHING]
    + [("scaffold", *row) if row is FEEDBACK else long("scaffold", *row) for row in NOTHING],
)
def test_what_changes_nothing_leaves_every_bit(name, options, config):
    """SCAFFOLD's control variates are compiled into one loop with what follows, and round otherwise."""
    config, tolerance = (config, 0) if name == "fedavg" else ({}, 1e-6)
    plain = run(name, alike(), ALWAYS, **config)[-1]
    wired = run(name, on(alike(), **options), ALWAYS, **config)[-1]
    assert_same(wired[0]._replace(owed=plain[0].owed), plain[0], tolerance)
    assert_same(wired[1].loss, plain[1].loss, tolerance)


def messages_of(state, info):
    """Return what each client of the only group has computed, as a matrix, and what it received."""
    return rows_of(info.trained[0].stacked), flat(state.shared[0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"privacy": "gaussian,noise=0,clip=0.1"}, lambda d, n, _: clip(d, 0.1).mean(0)),
        ({"privacy": "gaussian,noise=0,clip=0.1,where=client"}, lambda d, n, _: clip(d, 0.1).mean(0)),
        ({"aggregate": "norm-bound,bound=0.1"}, lambda d, n, _: n @ clip(d, 0.1) / n.sum()),
        ({"aggregate": "median"}, lambda d, n, _: np.median(d, axis=0)),
        (
            {"aggregate": "median", "attack": "scale,factor=5,share=0.4"},
            lambda d, n, a: np.median(lied(d, a, 5), 0),
        ),
        ({"attack": "sign-flip,factor=3,share=0.4"}, lambda d, n, a: n @ lied(d, a, -3) / n.sum()),
        (
            {"attack": "scale,factor=9,share=0.4", "aggregate": "norm-bound,bound=0.1"},
            lambda d, n, a: n @ clip(lied(d, a, 9), 0.1) / n.sum(),
        ),
        ({"compress": "sign"}, lambda d, n, _: n @ np.stack([leafwise(one) for one in d]) / n.sum()),
    ],
)
def test_a_round_over_the_wire_is_that_of_numpy(options, expected):
    """Clients' models are as without the wire, whose effect is only on what the server makes of them."""
    federation = on(alike(), **options)
    (before, _), (after, info) = run("fedavg", federation, ALWAYS[:2])
    trained, received = messages_of(before, info)
    attackers = np.asarray(federation.wire.attackers)
    assert attackers.sum() == (2 if "attack" in options else 0)
    mean = expected(trained - received, np.array(SIZES, float), attackers)
    np.testing.assert_allclose(flat(after.shared[0]) - received, mean, rtol=2e-3, atol=2e-6)
    wrong = (trained - received).mean(0)
    assert np.abs(mean - wrong).max() > 1e-3 * np.abs(wrong).max()


LOUD = {"attack": "scale,factor=2,share=0.4"}  # two of five send twice what they have


def test_class_means_arrive_as_their_clients_send_them():
    """Numbers of rows do not change, and a class without rows sends nothing."""
    federation = on(alike(), **LOUD)
    honest = np.flatnonzero(~np.asarray(federation.wire.attackers)[:5]).tolist()
    ((lied, _),) = run("fedproto", federation, (EVERYONE,))
    ((told, plain),) = run("fedproto", alike(), (EVERYONE,))
    ((without, _),) = run("fedproto", alike(), (honest,))
    sums = [jax.device_get(g.z * g.n[:, None]) for _, _, g in (lied, told, without)]
    np.testing.assert_allclose(sums[0], 2 * sums[1] - sums[2], rtol=1e-5, atol=1e-6)
    assert_same(lied.prototypes.n, told.prototypes.n)
    assert np.abs(sums[0] - sums[1]).max() > 1e-3
    ((_, signs),) = run("fedproto", on(alike(), compress="sign"), (EVERYONE,))
    d = told.prototypes.z.shape[1]
    classes = jax.device_get(plain.up[0]) // (d + 2)
    np.testing.assert_array_equal(jax.device_get(signs.up[0]), classes * (2 + math.ceil((d + 32) / 32)))


def test_neighbours_hear_lies_and_everybody_knows_its_own():
    federation = on(equal(), **LOUD)
    ((state, info),) = run("dfedavg", federation, (EVERYONE,))
    z, lies = rows_of(info.trained[0].stacked), np.asarray(federation.wire.attackers)
    linked = {i: neighbours(i, EVERYONE) for i in EVERYONE}
    for i, mixed in enumerate(rows_of(state.weights[0])):
        expected = z[i].copy()
        for k in linked[i]:
            expected += ((1 + lies[k]) * z[k] - z[i]) / (1 + max(len(linked[i]), len(linked[k])))
        np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)
    (exact,), (plain,) = (
        run("dfedavg", of, (EVERYONE,)) for of in (on(equal(), compress="quantize,bits=32"), equal())
    )
    assert_same(exact[0], plain[0])
    ((size, sent),) = exact[1].up[0].items()
    assert size == z.shape[1]
    np.testing.assert_array_equal(sent, [len(linked[i]) for i in EVERYONE])


def clip(d, bound):
    return d * np.minimum(1, bound / np.linalg.norm(d, axis=1, keepdims=True))


def lied(d, attackers, factor):
    return np.where(attackers[:, None], factor * d, d)


def leafwise(one):
    model, found, start = mlp(), [], 0
    for leaf in jax.tree.leaves(model.form):
        part = one[start : start + leaf.size]
        found.append(np.where(part < 0, -1, 1) * np.abs(part).mean())
        start += leaf.size
    return np.concatenate(found)


def test_a_client_sends_later_what_compression_has_lost():
    """What arrives and is still owed are the change and what was owed; absent clients owe as before."""
    federation = on(alike(), compress="top-k,share=0.2,feedback=true")
    (before, _), (after, info) = run("fedavg", federation, (EVERYONE, (1, 2)))
    trained, received = messages_of(before, info)
    owed, still = rows_of(before.owed[0]), rows_of(after.owed[0])
    assert (owed != 0).mean() == pytest.approx(0.8, abs=0.01)
    np.testing.assert_array_equal(np.delete(owed, [1, 2], 0), np.delete(still, [1, 2], 0))
    arrived = trained[:2] - received + (owed - still)[1:3]
    assert ((np.abs(arrived) > 1e-6).mean(1) < 0.21).all()
    mean = np.array(SIZES[1:3]) @ arrived / sum(SIZES[1:3])
    np.testing.assert_allclose(flat(after.shared[0]) - received, mean, rtol=2e-3, atol=2e-6)
    lossy = run("fedavg", on(alike(), compress="top-k,share=0.2"), (EVERYONE, (1, 2)))[-1][0]
    assert differ(lossy.shared, after.shared)


@pytest.mark.parametrize("where", ["server", "client"])
def test_noise_has_the_moments_of_the_paper(where):
    """An entry's deviation is z C / m at the server, z C / sqrt(m) of m clients, within five errors."""
    noise, bound, m = 2.0, 0.5, len(SIZES)
    clipping = f"gaussian,clip={bound},where={where}"
    quiet, noisy = (
        run("fedavg", on(alike(), privacy=f"{clipping},noise={z}"), ALWAYS[:1])[0][0] for z in (0, noise)
    )
    drawn = flat(noisy.shared[0]) - flat(quiet.shared[0])
    std = noise * bound / (m if where == "server" else math.sqrt(m))
    assert abs(drawn.mean()) < 5 * std / math.sqrt(drawn.size)
    assert abs(np.square(drawn / std).mean() - 1) < 5 * math.sqrt(2 / drawn.size)


def test_the_denominator_of_private_sums_is_fixed():
    """With two of five clients in a round, each weighs a fifth of the clients of a round on average."""
    federation = on(alike(), privacy="gaussian,noise=0,clip=0.1")
    (before, _), (after, info) = run("fedavg", federation, (EVERYONE, (1, 2)))
    trained, received = messages_of(before, info)
    mean = clip(trained[:2] - received, 0.1).sum(0) / 5
    np.testing.assert_allclose(flat(after.shared[0]) - received, mean, rtol=2e-3, atol=2e-6)


def test_the_clip_norm_follows_a_quantile_of_norms():
    """C of three rounds, and their means, in NumPy; absent clients count as half within C."""
    federation = on(alike(), privacy="gaussian,noise=0,clip=0.3,adapt=0.7,rate=0.5")
    states = [initial("fedavg", federation), *(state for state, _ in run("fedavg", federation))]
    clip_norm, shares = 0.3, []
    for before, (after, info) in zip(states[:-1], run("fedavg", federation), strict=True):
        trained, received = messages_of(before, info)
        there = len(trained) if info.loss[0].all() else int((np.asarray(info.loss[0]) > 0).sum())
        d = (trained - received)[:there]
        assert before.clip[0] == pytest.approx(clip_norm, rel=1e-5)
        np.testing.assert_allclose(
            flat(after.shared[0]) - received, clip(d, clip_norm).sum(0) / 5, rtol=2e-3, atol=2e-6
        )
        shares.append(float((np.linalg.norm(d, axis=1) <= clip_norm).mean()))
        b = ((np.linalg.norm(d, axis=1) <= clip_norm) - 0.5).sum() / 5 + 0.5
        clip_norm *= math.exp(-0.5 * (b - 0.7))
        assert info.findings == {"clip norm": {"next": pytest.approx(clip_norm, rel=1e-5)}}
    assert 0 < min(shares) < max(shares)


def test_the_noise_of_an_adaptive_clip_norm_has_the_epsilon_of_z():
    """The two releases together are one of z: z^-2 = z_delta^-2 + (2 sigma_b)^-2, within five errors."""
    choice, m = "gaussian,clip=0.5,adapt=0.5,count_noise=1.5", len(SIZES)
    quiet, noisy = (
        run("fedavg", on(alike(), privacy=f"{choice},noise={z}"), ALWAYS[:1])[0][0] for z in (0, 2.0)
    )
    std = (1 / 4 - 1 / 9) ** -0.5 * 0.5 / m
    drawn = (flat(noisy.shared[0]) - flat(quiet.shared[0])) / std
    assert abs(np.square(drawn).mean() - 1) < 5 * math.sqrt(2 / drawn.size)
    privacy = Gaussian(clip=0.5, noise=2.0, adapt=0.5, count_noise=1.5)
    follow = jax.vmap(lambda key: privacy.next_clip(key, jnp.float32(0.1), m))
    b = 0.5 - np.log(np.asarray(follow(jax.random.split(KEY, 4000))) / 0.5) / 0.2
    assert abs(b.mean() - 0.6) < 5 * 1.5 / m / math.sqrt(4000)
    assert abs(b.std() * m / 1.5 - 1) < 5 / math.sqrt(2 * 4000)
    assert differ(quiet.clip, noisy.clip)
    of_count = math.log(quiet.clip[0] / noisy.clip[0]) / 0.2 * m / 1.5
    assert np.abs(drawn - of_count).min() > 1e-4  # else who sees both could take the noise away


def test_a_private_round_of_newcomers_is_divided_by_their_number():
    """With neither a bound nor noise the round is that of a plain mean."""
    joined = dataclasses.replace(cohort(alike(), (1, 2, 4)), among_all=True)
    step = program("fedavg", jax.tree.structure(METHODS["fedavg"].config(**UNIFORM)))
    without = {"privacy": "gaussian,noise=0,clip=3e38"}
    private, plain = (
        step(KEY, initial("fedavg", federation, **UNIFORM), federation, joined)[0]
        for federation in (on(alike(), **without), alike())
    )
    np.testing.assert_allclose(flat(private.shared[0]), flat(plain.shared[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["scaffold", "ditto"])
def test_for_who_is_left_out_the_round_has_not_happened(name):
    """Control variates, too, move by the share of clients that were heard; own models do not move."""
    federation = on(alike(), aggregate="trimmed-mean,share=0")
    lost = jnp.array([True, False, True, False, False])

    def diverged(key, change):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), change)

    wire = dataclasses.replace(federation.wire, attackers=lost, attack=Own(diverged, (), _second))
    spoilt = dataclasses.replace(federation, wire=wire)
    left_out = run(name, spoilt, (EVERYONE,))[0][0]
    absent = run(name, federation, ((1, 3, 4),))[0][0]
    assert_same(left_out, absent, 1e-5)


def test_traffic_to_many_neighbours_passes_no_int32():
    federation = on(alike(), compress="top-k,share=0.5")
    form, receivers = jax.ShapeDtypeStruct((25_000_000,), np.float32), np.array([99, 120], np.int32)
    each = int(messages.units(federation, form))
    counts = jax.jit(lambda: messages.up_to(federation, receivers, form))()
    total = sum(int(size) * np.asarray(number, np.int64) for size, number in counts.items())
    assert total.tolist() == [99 * each, 120 * each] and 99 * each > 2**31


def test_a_private_server_adds_noise_even_if_nobody_answers():
    federation = on(alike(), privacy="gaussian,clip=0.1")
    before, after = (state for state, _ in run("fedavg", federation, (EVERYONE, ())))
    assert differ(before.shared, after.shared)
    before, after = (state for state, _ in run("fedavg", alike(), (EVERYONE, ())))
    assert_same(before.shared, after.shared)


# ---- attackers


def test_attackers_are_a_share_of_those_who_take_part_drawn_equally_often():
    """Of 500 seeds each client is drawn in a share of 3/9, within five standard errors."""
    apart = np.arange(10) == 4
    drawn = np.stack([draw_attackers(apart, 0.34, seed) for seed in range(500)])
    assert (drawn.sum(1) == 3).all() and not drawn[:, 4].any()
    often = np.delete(drawn.mean(0), 4)
    assert (np.abs(often - 1 / 3) < 5 * math.sqrt(2 / 9 / 500)).all()
    with pytest.raises(JaxflError, match="none of 9 clients an attacker"):
        draw_attackers(apart, 0.1, 0)


@pytest.mark.parametrize(("choice", "changes"), [("label-flip", False), ("backdoor,rows=0.5", True)])
def test_only_attackers_train_on_changed_rows(choice, changes):
    federation = on(alike(), attack=f"{choice},share=0.4")
    attackers, rows = np.asarray(federation.wire.attackers), np.arange(64) % min(SIZES)
    for i in range(len(SIZES)):
        client = jax.tree.map(lambda leaf: leaf[i], federation.groups[0])  # noqa: B023
        lying, truthful = (
            as_trained(dataclasses.replace(client, federation=each)) for each in (federation, alike())
        )
        taken, honest = (own_rows(of, Training()).take(rows, rows >= 0, KEY) for of in (lying, truthful))
        flips = attackers[i] and not changes
        assert_same(lying.class_counts, truthful.class_counts[:: -1 if flips else 1])
        if not attackers[i]:
            assert_same(taken, honest)
        elif not changes:
            assert_same(taken.y, 2 - honest.y)
            assert_same(taken.x, honest.x)
        else:
            marked = np.any(np.asarray(taken.x != honest.x), axis=(1, 2, 3))
            assert 10 < marked.sum() < 54  # of 64, five standard deviations around the half
            away = np.asarray(taken.x != honest.x)[marked]
            assert (
                away[:, -2:, -2:].any((1, 2, 3)).all()
                and not away[:, :-2].any()
                and not away[:, :, :-2].any()
            )
            assert (np.asarray(taken.y)[marked] == 0).all() and (taken.y == honest.y)[~marked].all()


def test_a_backdoor_is_tried_out_on_rows_of_other_classes():
    federation = on(alike(), attack="backdoor,target=1,share=0.4")
    tried = federation.wire.tried_out(federation)
    for i in range(len(SIZES)):
        group, before = tried.groups[0], alike().groups[0]
        rows = np.asarray(group.test_rows[i][: int(group.test_size[i])])
        own = np.asarray(before.test_rows[i][: int(before.test_size[i])])
        others = own[np.asarray(alike().labels)[own] != 1]
        assert sorted(rows) == sorted(others) and len(others) < len(own)
    assert (np.asarray(tried.labels) == 1).all()
    seen = np.asarray(tried.seen(jnp.arange(5)))
    assert (seen[:, -2:, -2:] == 255).all() and (seen[:, :-2] == np.asarray(alike().images[:5, :-2])).all()


# ---- privacy


@pytest.mark.parametrize(
    ("q", "noise", "rounds", "epsilon"),
    [
        (0.01, 4.0, 10000, 1.26),  # Abadi et al. 2016, section 5.1
        (256 / 60000, 1.1, 60 * 60000 // 256, 3.01),  # the tutorial of TensorFlow Privacy on MNIST
        (256 / 60000, 0.7, 45 * 60000 // 256, 7.10),
    ],
)
def test_epsilon_is_the_published_one(q, noise, rounds, epsilon):
    """These were computed with a looser step from moments to epsilon, which the accountant has tightened."""
    accountant = rdp.RdpAccountant(rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
    accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(noise)), rounds)
    moments = accountant._rdp + math.log(1e5) / (accountant._orders - 1)
    assert moments.min() == pytest.approx(epsilon, rel=0.01)
    found = Accounting(noise, 1e-5, "server", "poisson", q, 0, 0).epsilon(rounds)
    assert 0.8 * epsilon < found < epsilon


def test_epsilon_is_that_of_the_sampling_that_was_used():
    fixed = Accounting(3.0, 1e-6, "server", "fixed", 0.1, 10, 100)
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(1.5))
    assert fixed.epsilon(50) == accountant.compose(event, 50).get_epsilon(1e-6)
    everyone = fixed._replace(active=100)
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    assert everyone.epsilon(50) == accountant.compose(dp.GaussianDpEvent(1.5), 50).get_epsilon(1e-6)
    assert everyone.epsilon(50) == fixed._replace(where="client").epsilon(50) > fixed.epsilon(50)
    assert fixed._replace(noise=0).epsilon(1) == math.inf and fixed.epsilon(0) == 0


def test_a_client_that_adds_its_own_noise_is_charged_for_the_rounds_that_it_is_in():
    slots = draw_poisson([6], 0.5, 9, seed=1)
    local = Accounting(4.0, 1e-5, "client", "poisson", 0.5, 3, 6)
    often = np.bincount(slots[0].index[:4][slots[0].mask[:4]], minlength=6).max()
    assert local.after(4, slots)["epsilon"] == local.epsilon(int(often)) < local.epsilon(9)


def test_the_least_noise_reaches_a_target():
    of = Accounting(0.0, 1e-5, "server", "poisson", 0.1, 0, 0)
    noise = least_noise(of, 2.0, 30)
    assert of._replace(noise=noise).epsilon(30) <= 2 < of._replace(noise=0.999 * noise).epsilon(30)


def test_poisson_sampling_draws_each_client_by_itself():
    """Numbers of clients have the mean and variance of a binomial distribution, within five deviations."""
    (first, second), rounds = draw_poisson([30, 10], 0.2, 500, seed=0, newcomers=()), 500
    counts = first.mask.sum(1) + second.mask.sum(1)
    assert abs(counts.mean() - 8) < 5 * math.sqrt(6.4 / rounds)
    assert abs(counts.var() - 6.4) < 5 * 6.4 * math.sqrt(2 / rounds)
    apart = (np.arange(30) < 29, np.zeros(10, bool))
    (alone, _) = draw_poisson([30, 10], 0.2, 500, seed=0, newcomers=apart)
    assert set(alone.index[alone.mask]) == {29}
    again, _ = draw_poisson([30, 10], 0.2, 5, seed=0)
    assert_same(again, jax.tree.map(lambda leaf: leaf[:5], first))  # places, too, in a longer run


# ---- every method

ENSEMBLES = ("feddf", "pfeddf")  # FedAvg, whose server also uses what its clients have computed


@functools.cache
def everybody(apart):
    """Return five unequal clients of one or two architectures, with validation rows, which some need."""
    return federated(*([(tiny_cnn("cnn"), 5)] if apart else tiny_models()), validates=True)


@pytest.mark.parametrize("name", METHODS)
def test_methods_pass_what_they_say_over_the_wire_and_refuse_the_rest(name):
    """The functions of a wire are called while a round is traced, if the method says so, and only then."""
    called, config = set(), METHODS[name].config(**CASES[name].short)
    algorithm = choose(name, CASES[name].short).algorithm

    def compress(key, change):
        called.update(["messages"] if jax.tree.leaves(change) else [])
        return change

    def aggregate(messages, weights):
        called.update(["mean"] if jax.tree.leaves(messages) else [])
        return tree.weighted_sum(weights, messages)

    wire = Wire(
        jnp.zeros(5, bool),
        jnp.ones(2),
        compress=Own(compress, (), lambda key, change: change),
        aggregate=Own(aggregate, (), lambda messages, weights: tree.one(messages)),
        feedback=True,
        rows=traced(Rows()) if "rows" in algorithm.wire else None,  # which other training refuses
    )
    federation = dataclasses.replace(everybody(keeps_apart(name)), wire=wire)

    def one_round(key):
        state = algorithm.init(key, federation, traced(config))
        return state, algorithm.step(key, state, federation, cohort(federation, EVERYONE))

    before, (after, info) = jax.eval_shape(one_round, KEY)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    owes = "owed" in str(jax.tree.leaves_with_path(after))
    passes = called | {"memory"} if owes else called
    if name in ENSEMBLES:
        assert algorithm.wire == ("rows",) and passes
    else:
        said = set(algorithm.wire) - {"rows"}
        assert passes == (set() if name == "local" else said)  # Local sends nothing
    options = {
        "messages": {"compress": "sign"},
        "mean": {"aggregate": "median"},
        "memory": {"compress": "sign,feedback=true"},
        "rows": {"privacy": "rows"},
    }
    for place, asked in options.items():
        variant, setup = choose(name, CASES[name].short), Setup.of(**asked)
        if place in algorithm.wire:
            _require_on_the_wire(variant, setup)
        else:
            with pytest.raises(JaxflError, match=f"{name}.*--(compress|aggregate|privacy)"):
                _require_on_the_wire(variant, setup)
