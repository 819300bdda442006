"""What teaches clients, scored on their own test rows: by value, and at no cost unless asked for."""

import jax
import numpy as np
import pytest
from conftest import long
from reference import nets
from reference.exchange import mixture
from reference.training import softmax

from jaxfl.core import engine, tree
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.core.job import Job, traced
from jaxfl.core.protocol import Cohort
from jaxfl.core.rounds import as_programs
from jaxfl.registry import METHODS
from jaxfl.results.result import records
from methods.cases import CASES, mnfl
from methods.recording import by_client
from methods.rounds import TRAINING, mixed

ROUNDS = 4


def test_the_recorded_accuracy_is_that_of_each_clients_mixture_of_the_rounds_models():
    """From the models and the matrix of a run of MNFL; the rows of other clients give another accuracy.

    Where distillation has the rate 0, models are the same after a round as when they taught in it.
    """
    federation, method = mixed(), METHODS["mnfl"]
    options = TRAINING | mnfl.OPTIONS | {"lr": 0.3, "weight_decay": 0.0, "distill_lr": 0.0}
    config, cohorts = method.config(**options), draw_cohorts([2, 3], 0.8, ROUNDS, seed=1)
    programs = as_programs(method.build(config))
    job = Job(programs, federation, [config], [cohorts], [jax.random.key(0)], 1, score_cohort=True)
    matrix = np.full((5, 5), 1 / 5)
    recorded, expected, of_others = [], [], []
    for chunks in engine.simulate(job):
        (line,) = records(chunks[0], federation, cohorts, 0.0)
        state = jax.device_get(chunks[0].state)
        present, found = line["clients"], line["cohort"]
        right = shares(federation, by_client(state.weights, federation), present, matrix, config.temperature)
        recorded.append(found["teacher"]["mean"])
        expected.append(right.diagonal().mean())
        of_others.append(right[np.arange(len(right)), np.arange(len(right)) - 1].mean())
        assert found["teacher"]["lead"] == pytest.approx(recorded[-1] - found["trained"]["mean"])
        matrix = state.matrix
    assert recorded == pytest.approx(expected)
    assert recorded != pytest.approx(of_others)


def shares(federation, weights, present, matrix, temperature):
    """Return by NumPy (k, k): which share of a client's test rows the teacher of each client gets right."""
    clients = by_client(federation.groups, federation)

    def right(client, s, row):
        rows = client.test_rows[: client.test_size]
        return (mixture(matrix, row, s).argmax(1) == client.relabel[federation.labels[rows]]).mean()

    def of_client(client):
        x = np.asarray(federation.inputs(client.test_rows[: client.test_size]))
        s = {m: softmax(logits(weights[m], x) / temperature) for m in present}
        return [right(client, s, row) for row in present]

    return np.array([of_client(clients[n]) for n in present])


def logits(weights, x):
    """Return an MLP's logits of images by NumPy."""
    by_name = {"/".join(path): np.asarray(leaf) for path, leaf in tree.by_path(weights.params).items()}
    return nets.logits(nets.NETS["mlp"], by_name, x)


@pytest.mark.parametrize("name", ["mnfl", *map(long, ("compfl", "feddf", "fedkemf"))])
def test_a_teacher_that_nobody_asks_for_costs_nothing(name):
    method, federation = METHODS[name], mixed()
    config = method.config(**TRAINING | CASES[name].short)
    algorithm = method.build(config)

    def silent(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, cohort)
        return state, info._replace(teacher=None)

    def cost(algorithm):
        slots = draw_cohorts([2, 3], 0.8, ROUNDS, seed=1)
        cohorts = Cohort(np.arange(ROUNDS, dtype=np.int32), slots, ROUNDS)
        state = jax.eval_shape(algorithm.init, jax.random.key(0), federation, traced(config))
        compiled = as_programs(algorithm).rounds.compile(jax.random.key(0), state, federation, cohorts)
        return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes

    assert cost(algorithm) == cost(algorithm._replace(step=silent))
