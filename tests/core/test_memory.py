"""Device memory: the choice of clients side by side, and the message when it runs out."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxfl.config.setup import Setup
from jaxfl.core import engine, memory
from jaxfl.core.programs import Program
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError
from jaxfl.folder import variant
from jaxfl.folder.owner import owned
from jaxfl.runs.engine_job import fit_to_machine, job_of
from jaxfl.runs.loop import compilation, proceed
from jaxfl.runs.open import begin
from jaxfl.runs.prepare import prepare

pytestmark = pytest.mark.usefixtures("optimised_compilation")  # so that programs need as much as for users

OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes.")
SETUP = Setup.of(
    models=("mlp,hidden=40",),
    partition="classes,classes_per_client=2,samples_per_client=10",
    clients=6,
    rounds=2,
    eval_every=1,
    devices=1,
)


@pytest.fixture
def chosen():
    """Return FedAvg, with programs that no other test has compiled."""
    variant._kept_programs.cache_clear()
    return variant.choose("fedavg", epochs=1, batch_size=7)


@pytest.fixture
def data():
    """Return the data of six clients, all side by side, as on an accelerator."""
    data = prepare(SETUP)
    return data._replace(federation=dataclasses.replace(data.federation, clients_at_once=6))


def start(folder, chosen, data, setup=SETUP):
    """Begin a run and run it to its end."""
    spent = compilation(chosen.programs)
    with owned(folder):
        data = fit_to_machine(chosen, setup, data)
        begun = begin(folder, chosen, setup, data, lambda new: None)
        (outcome,) = proceed(job_of([(chosen, setup)], data.federation), [begun], spent)
    if isinstance(outcome, JaxflError):
        raise outcome


def fail(*arguments):
    raise OUT_OF_MEMORY


@pytest.mark.long
def test_a_run_takes_as_many_clients_side_by_side_as_fit(chosen, data, tmp_path, monkeypatch):
    needed = {}
    for at_once in (6, 3, 2):
        federation = dataclasses.replace(data.federation, clients_at_once=at_once)
        of_run = engine.compiled(job_of([(chosen, SETUP)], federation))
        needed[at_once] = max(map(memory.peak_bytes, of_run))
    assert needed[6] > needed[3] > needed[2]

    monkeypatch.setattr(memory, "available", lambda federation: needed[2])
    with pytest.warns(UserWarning, match="6 clients side by side do not fit .* --clients-at-once 2"):
        start(tmp_path / "run", chosen, data)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["options"]["clients_at_once"] == 2
    # Trials compile the run's own programs, two for each number of clients; none is compiled twice.
    assert chosen.programs.compilations == 6


def test_nothing_is_tried_if_devices_report_no_memory_or_the_user_chose(chosen, data, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "as_many_as_fit", None)
    start(tmp_path / "run", chosen, data)
    monkeypatch.setattr(memory, "available", lambda federation: 1)
    given = SETUP.replace(clients_at_once=6)
    start(tmp_path / "given", chosen, data, given)


def test_a_program_that_the_machine_cannot_hold_is_announced(monkeypatch):
    """On a CPU, whose system ends a process that takes too much."""
    free = SimpleNamespace(available=4 * 10**6)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)
    with pytest.warns(UserWarning, match=r"needs some 0\.0 GB, and 0\.0 GB are free: the system may end"):
        Program(lambda x: x + 1)(jnp.zeros((2**20,)))
    free.available = 5 * 10**6
    Program(lambda x: x + 2)(jnp.zeros((2**20,)))
    free.available = 12 * 10**6  # of a result and a temporary of 4 MB: the process's other devices do nothing
    Program(lambda x: x @ x @ x)(jnp.zeros((1000, 1000)))


def test_available_memory_includes_the_federation_and_ignores_unused_devices(data, monkeypatch):
    def devices(*stats):
        named = [{"bytes_limit": limit, "bytes_in_use": used} for limit, used in stats]
        return lambda: [SimpleNamespace(memory_stats=lambda one=one: one) for one in named]

    assert memory.available(data.federation) is None  # a CPU
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(data.federation))
    monkeypatch.setattr(jax, "local_devices", devices((10_000_000, held), (5_000_000, held)))
    assert memory.available(data.federation) == int(memory.USABLE * 10_000_000)  # the second is not used


def test_one_client_at_once_is_chosen_if_nothing_fits(data):
    # The compiler for TPUs fails like this.
    assert memory.as_many_as_fit(data.federation, fail, 1).clients_at_once == 1


@pytest.mark.parametrize(
    ("needed", "limit", "fits", "tried"),
    [
        (lambda number: 100 + 10 * number, 150, 4, [64, 8, 4]),  # 64 alone does not rule out 8
        (lambda number: 1000 + 10 * number, 500, 1, [64, 16, 4]),
        ({64: 1000, 16: 600, 8: 300}.get, 400, 8, [64, 16, 8]),
    ],
)
def test_numbers_that_cannot_fit_are_not_tried(needed, limit, fits, tried):
    asked = []
    assert memory.most_that_fit(64, lambda number: asked.append(number) or needed(number), limit) == fits
    assert asked == tried


@pytest.mark.parametrize(
    ("at_once", "words"),
    [
        (6, "start again with --clients-at-once 3."),
        (1, "lower --batch-size or --eval-every, change --devices"),
    ],
)
def test_out_of_memory_names_the_option_to_change(chosen, data, tmp_path, monkeypatch, at_once, words):
    monkeypatch.setattr(Program, "__call__", fail)
    federation = dataclasses.replace(data.federation, clients_at_once=at_once)
    with pytest.raises(JaxflError, match=f"memory ran out with --clients-at-once {at_once}; {words}"):
        start(tmp_path / "run", chosen, data._replace(federation=federation))


def test_out_of_memory_for_the_data_is_one_sentence(monkeypatch):
    monkeypatch.setattr(Federation, "replicate", fail)
    with pytest.raises(JaxflError, match="memory ran out while the data were put on it; end other programs"):
        prepare(SETUP)
