"""DP-SGD on clients' rows: steps by value, sampling, what is counted, and what is refused."""

import dataclasses
import math

import dp_accounting as dp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SIZES, assert_same, cohort, long, tiny_models
from dp_accounting import rdp
from methods.cases import CASES
from methods.rounds import ALWAYS, EVERYONE, alike, federated, normalised, run

from jaxfl.config.setup import Setup
from jaxfl.core.dp_sgd import noisy_descent, poisson_sample
from jaxfl.core.examples import arrays, stretch
from jaxfl.core.job import traced
from jaxfl.core.noisy_steps import NoisySteps, noisy_steps
from jaxfl.core.streams import NOISE
from jaxfl.core.training import Training, descend, fit, mean
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.wire.accounting import of_rows
from jaxfl.mechanisms.wire.privacy import Rows
from jaxfl.mechanisms.wire.setup import wire_of
from jaxfl.models.model import Weights
from jaxfl.registry import METHODS

KEY = jax.random.key(3)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4)).astype(np.float32), RNG.normal(size=12).astype(np.float32)
REAL = 10  # of the rows, the others are padding
PRIVATE = Rows(clip=0.8, noise=0.7)
HYPER = Training(epochs=3, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.1)
START = {"a": {"w": np.full(4, 0.3, np.float32)}, "b": {"c": np.float32(0.1)}}


def private(examples, privacy=PRIVATE):
    return dataclasses.replace(examples, privacy=traced(privacy))


def squares(weights, batch, key):
    """A linear regression of two blocks, with a term that every row's gradient has."""
    w, c = weights.params["a"]["w"], weights.params["b"]["c"]
    value = mean(jnp.square(batch.x @ w + c - batch.y), batch) / 2
    return value + 0.1 * jnp.square(w).sum(), weights.stats


def reference(mistake="", steps=9, size=4):
    """DP-SGD in NumPy on the same draws; returns w and c."""
    w, c, velocity = START["a"]["w"].astype(float), float(START["b"]["c"]), np.zeros(5)
    phase = jax.random.fold_in(KEY, 1)
    for t in range(steps):
        key = jax.random.fold_in(phase, t)
        drawn = np.flatnonzero(np.asarray(jax.random.uniform(key, (12,)))[:REAL] < size / REAL)
        if mistake == "shuffled":
            drawn = drawn[:size]
        residual = X[drawn] @ w + c - Y[drawn]
        g = np.column_stack([residual[:, None] * X[drawn] + 0.2 * w, residual])
        parts = [slice(0, 4), slice(4, 5)] if mistake == "each block" else [slice(0, 5)]
        if mistake == "mean" and len(g):
            g = np.tile(g.mean(0), (len(g), 1))
        for part in parts:
            norms = np.linalg.norm(g[:, part], axis=1, keepdims=True)
            g[:, part] *= np.minimum(1, PRIVATE.clip / norms)
        noise = optax.tree.random_like(jax.random.fold_in(key, NOISE), START)
        noise = PRIVATE.noise * np.append(noise["a"]["w"], noise["b"]["c"])
        noise = noise * (1 if mistake == "no clip in noise" else PRIVATE.clip)
        total = g.sum(0) + noise * (np.sqrt(len(g)) if mistake == "noise per row" else 1)
        rows = max(1, len(g)) if mistake == "rows drawn" else size
        here = np.append(w, c)
        velocity = 0.5 * velocity + total / rows + 0.1 * here
        w, c = np.split(here - 0.1 * velocity, [4])
        c = float(c[0])
    return np.append(w, c)


def test_noisy_steps_are_those_of_numpy():
    """Samples larger than a batch, and smaller ones, are among the nine."""
    phase = jax.random.fold_in(KEY, 1)
    sizes = [int(poisson_sample(jax.random.fold_in(phase, t), jnp.int32(REAL), 12, 4)[0]) for t in range(9)]
    assert min(sizes) < 4 < max(sizes)

    @jax.jit
    def trained():
        return descend(
            squares,
            Weights(jax.tree.map(jnp.asarray, START), {}),
            KEY,
            private(arrays(jnp.asarray(X), jnp.asarray(Y), jnp.int32(REAL))),
            traced(HYPER),
            phase=1,
        )

    found = trained()
    assert int(found.steps) == 9
    params = found.weights.params
    found = np.append(params["a"]["w"], params["b"]["c"])
    np.testing.assert_allclose(found, reference(), rtol=1e-4, atol=1e-5)
    for mistake in ("shuffled", "each block", "mean", "no clip in noise", "noise per row", "rows drawn"):
        assert np.abs(found - reference(mistake)).max() > 1e-3, mistake


def test_noise_has_the_moments_of_the_paper():
    """One step of rate 1 without gradients moves an entry by z C / B on average, within five errors."""
    params = {"a": jnp.zeros((100, 80)), "b": jnp.zeros(2000)}
    moved, _, _ = noisy_descent(
        lambda params, row, key: 0.0 * params["b"][0],
        params,
        optax.sgd(1.0),
        KEY,
        private(arrays(jnp.asarray(X), jnp.asarray(Y), jnp.int32(REAL)), Rows(clip=0.5, noise=3.0)),
        epochs=0.1,
        batch_size=4,
    )
    drawn = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moved)]) / (3 * 0.5 / 4)
    assert abs(drawn.mean()) < 5 / math.sqrt(drawn.size)
    assert abs(np.square(drawn).mean() - 1) < 5 * math.sqrt(2 / drawn.size)


def test_every_row_has_its_own_random_numbers():
    """As in dropout: a step of rate 1 on all rows moves the parameter by the mean of what they draw."""
    moved, _, _ = noisy_descent(
        lambda w, row, key: w * jax.random.uniform(key),
        jnp.float32(0),
        optax.sgd(1.0),
        KEY,
        private(arrays(jnp.asarray(X), jnp.asarray(Y), jnp.int32(REAL)), Rows(clip=9.0, noise=0.0)),
        epochs=1,
        batch_size=12,
    )
    of_batch = jax.random.fold_in(jax.random.fold_in(KEY, 0), 0)
    drawn = [float(jax.random.uniform(jax.random.fold_in(of_batch, row))) for row in range(REAL)]
    assert float(moved) == pytest.approx(-np.mean(drawn), rel=1e-5)


def test_every_row_is_drawn_by_itself():
    """Rows, and how many of them, are drawn as a binomial distribution has it, within five deviations."""
    draw = jax.jit(jax.vmap(lambda key: poisson_sample(key, jnp.int32(20), 25, 5)))
    size, order = map(np.asarray, draw(jax.random.split(KEY, 4000)))
    assert abs(size.mean() - 5) < 5 * math.sqrt(3.75 / 4000)
    assert abs(size.var() - 3.75) < 5 * 3.75 * math.sqrt(2 / 4000)
    often = np.zeros(25)
    for number, places in zip(size, order, strict=True):
        often[places[:number]] += 1
    assert not often[20:].any()
    assert (np.abs(often[:20] / 4000 - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)).all()
    everybody, _ = poisson_sample(KEY, jnp.int32(20), 25, 20)
    nobody, _ = poisson_sample(KEY, jnp.int32(0), 25, 20)
    assert (int(everybody), int(nobody)) == (20, 0)


def on(federation, privacy):
    return dataclasses.replace(federation, wire=wire_of(Setup.of(privacy=privacy), federation))


@pytest.mark.parametrize("name", ["fedavg", *map(long, ("scaffold", "fedrep", "ditto", "fedavg-ft"))])
def test_all_rows_without_noise_are_plain_training(name):
    whole = {"epochs": 2, "batch_size": max(SIZES)}
    plain = run(name, alike(), ALWAYS[:2], **whole)[-1]
    found = run(name, on(alike(), "rows,noise=0,clip=3e38"), ALWAYS[:2], **whole)[-1]
    assert_same(found[0], plain[0], 1e-5)
    assert_same(found[1].loss, plain[1].loss, 1e-5)


# ---- what the accountant counts

EPOCHS, BATCH = 2, 3
EACH = np.array([EPOCHS * -(-n // BATCH) for n in SIZES])  # steps of a client's local training
SOME = (0, 3, 4)
FIRST = {"fedmd": EACH, "fccl": EACH}  # before the first round
PHASES = {"ditto": 2 * EACH, "fedrep": 3 * EACH // 2}  # FedRep trains its head for half as many epochs
TUNED = ("fedavg-ft", "fedbabu", "pfeddf")
PROTECTED = [name for name, method in METHODS.items() if "rows" in method.build(method.config()).wire]
USUAL = [name for name in PROTECTED if name not in ("ditto", "fedmd", "fedbabu")]


@pytest.mark.parametrize("name", ["ditto", "fedmd", "fedbabu", *map(long, USUAL)])
def test_every_local_phase_is_counted(name):
    found = counted(name, **{**CASES[name].short, "epochs": EPOCHS, "batch_size": BATCH})
    rounds = np.tile(np.where(np.isin(EVERYONE, SOME), PHASES.get(name, EACH), 0), (2, 1))
    rounds[0] += FIRST.get(name, 0)
    np.testing.assert_array_equal(found.rounds, rounds)
    np.testing.assert_array_equal(found.deployed, EACH if name in TUNED else 0 * EACH)


def test_clients_that_train_outside_of_cohorts_are_counted():
    found = counted("local", local_schedule="all", steps=7, batch_size=BATCH)
    np.testing.assert_array_equal(found.rounds, np.full((2, 5), 7))


def counted(name, **options):
    """Return the noisy steps of two rounds of some clients."""
    config = METHODS[name].config(**options)
    federation = on(federated(*tiny_models(), validates=True), "rows")
    two = jax.tree.map(lambda leaf: np.stack([leaf] * 2), cohort(federation, SOME))
    two = dataclasses.replace(two, round=np.arange(2, dtype=np.int32))
    return noisy_steps(METHODS[name].build(config), KEY, traced(config), federation, two)


@pytest.mark.parametrize(
    ("z", "n", "batch", "epochs", "epsilon"),
    [(1.1, 60000, 256, 60, 3.01), (0.7, 60000, 256, 45, 7.10), (4.0, 10**6, 10**4, 100, 1.26)],
)
def test_epsilon_is_below_the_published_one(z, n, batch, epochs, epsilon):
    """Abadi et al. 2016, section 5.1, and TensorFlow Privacy on MNIST; the accountant has become tighter."""
    steps = epochs * (n // batch)
    few = np.array([[steps, 1]])
    found = of_rows(Rows(noise=z), batch, np.array([n, 2 * n]), lambda: NoisySteps(few, 0 * few[0]))(1)
    accountant = rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(batch / n, dp.GaussianDpEvent(z)), steps)
    assert found["epsilon"] == accountant.get_epsilon(1e-5)
    assert 0.8 * epsilon < found["epsilon"] < epsilon


def test_epsilon_is_the_largest_of_a_client_so_far():
    sizes, rounds = np.array([40, 10, 20, 10]), np.array([[9, 2, 3, 0], [9, 2, 3, 1], [9, 2, 3, 0]])
    after = of_rows(Rows(noise=2.0), 5, sizes, lambda: NoisySteps(rounds, np.array([0, 0, 4, 0])))

    def of_client(q, steps):
        event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(2.0))
        return rdp.RdpAccountant().compose(event, steps).get_epsilon(1e-5)

    each = [of_client(5 / n, steps) for n, steps in zip(sizes, (27, 6, 13, 1), strict=True)]
    assert after(3)["epsilon"] == max(each)
    assert after(1)["epsilon"] < after(2)["epsilon"] < after(3)["epsilon"]
    assert of_rows(Rows(noise=0.0), 5, sizes, lambda: NoisySteps(rounds, rounds[0]))(1)["epsilon"] is None


# ---- what is refused

PUBLISH = ("fedfomo", "hermes")  # which choose by validation rows, and these are not protected
BETWEEN = ("pfedhr", "pfedclub", "pfedclub-plus")  # whose server's steps are between rounds
QUICK = ("fedrod", "per-fedavg", "fedproto", "pfedme")
OTHERS = [name for name in METHODS if name not in (*PROTECTED, *PUBLISH, *BETWEEN, *QUICK)]


@pytest.mark.parametrize("name", [*QUICK, *map(long, OTHERS)])
def test_other_uses_of_rows_are_seen_where_they_are_traced(name):
    """So a method that says wrongly that it protects rows does not run."""
    with pytest.raises(
        (TypeError, JaxflError), match="--privacy rows (protects what descend|draws from all)"
    ):
        traced_round(name)


def traced_round(name):
    config = METHODS[name].config(**CASES[name].short)
    algorithm = METHODS[name].build(config)
    federation = on(federated(*tiny_models(), validates=True), "rows")

    def one_round(key):
        state = algorithm.init(key, federation, traced(config))
        everyone = cohort(federation, EVERYONE)
        if algorithm.prepare:
            state, _ = algorithm.prepare(key, state, federation, everyone)
        state, _ = algorithm.step(key, state, federation, everyone)
        return algorithm.personal(key, state, federation, everyone)

    jax.eval_shape(one_round, KEY)


def test_other_uses_of_private_rows_are_refused():
    rows = private(arrays(jnp.asarray(X), jnp.asarray(Y), jnp.int32(REAL)))
    start = Weights(jax.tree.map(jnp.asarray, START), {})

    def update(carry, batch, key):
        return carry, 0.0

    with pytest.raises(JaxflError, match="protects what descend learns from own_rows"):
        fit(update, 0.0, KEY, rows, epochs=1, batch_size=4)
    with pytest.raises(JaxflError, match="draws from all rows of a client"):
        stretch(rows, jnp.int32(0), jnp.int32(5))
    with pytest.raises(JaxflError, match="protects what descend learns from own_rows"):
        descend(squares, start, KEY, (rows, rows), traced(HYPER))
    for other in ({"tally": jnp.zeros(3)}, {"batch_size": 5}):
        with pytest.raises(JaxflError, match="also observes its rows, or takes batches of another size"):
            descend(squares, start, KEY, rows, traced(HYPER), **other)
    with pytest.raises(JaxflError, match="BatchNorm .in the block 'fc1'. normalises them together"):
        run("fedavg", on(normalised(), "rows"), ALWAYS[:1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"privacy": "rows", "target_epsilon": 3.0},
            "--target-epsilon 3 chooses the noise of",
        ),
        ({"privacy": "gaussian,adapt=0.5,where=client"}, "leave out adapt or where=client"),
        ({"privacy": "gaussian,adapt=0.5"}, "a noise of 0.25, but needs more than half of the .* 1; raise"),
    ],
)
def test_options_that_contradict_are_refused(options, words):
    with pytest.raises(JaxflError, match=words):
        wire_of(Setup.of(**options), alike())
