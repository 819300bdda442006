"""Clients' state on the device and in host memory, side by side: Markdown for docs/devices.md.

python experiments/bench/host_state.py DATA_DIR [CLIENTS ...]

Ten of CLIENTS clients train in a round (LeNet5, one epoch of MNIST): bytes that the program of a round gets
and holds on a device, by the compiler's count, and seconds a round, the shortest of three chunks of five
rounds, both places in turn.
"""

import sys
from pathlib import Path

import jax

from jaxfl.config.setup import Setup
from jaxfl.core.engine import compiled, simulate
from jaxfl.core.memory import peak_bytes
from jaxfl.folder.variant import choose, provided
from jaxfl.runs.engine_job import fit_to_machine, job_of
from jaxfl.runs.prepare import prepare

METHODS = ("fedper", "local", "scaffold")
COHORT, CHUNK, CHUNKS = 10, 5, 3
PLACES = ("device", "host")


def argument_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of a compiled program's arguments on a device."""
    memory = program.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes


def job(name: str, clients: int, place: str):
    """Return the job of a method whose clients' state is in a place."""
    variant = choose(name, {"epochs": 1})
    options = {"dataset": "mnist", "data_dir": Path(sys.argv[1]), "partition": "iid", "models": ("lenet5",)}
    options |= {"test": "source", "max_test": 10, "clients": clients, "participation": COHORT / clients}
    options |= {"rounds": CHUNK * CHUNKS, "eval_every": CHUNK, "client_state": place}
    setup = provided(Setup.of(**options), [variant])
    data = fit_to_machine(variant, setup, prepare(setup))
    return job_of([(variant, setup)], data.federation)


print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
print("| method | clients | arguments of a round, MB | at most at once, MB | seconds a round |")
print("|---|---|---|---|---|")
for clients in map(int, sys.argv[2:] or (100, 1000)):
    for name in METHODS:
        jobs = {place: job(name, clients, place) for place in PLACES}
        rounds = [compiled(jobs[place])[0] for place in PLACES]
        held = [argument_bytes(program) for program in rounds]
        peaks = [peak_bytes(program) for program in rounds]
        seconds = dict.fromkeys(PLACES, float("inf"))
        for chunks in zip(*(simulate(jobs[place]) for place in PLACES), strict=True):
            for place, (chunk,) in zip(PLACES, map(dict.values, chunks), strict=True):
                seconds[place] = min(seconds[place], chunk.train_seconds / CHUNK)
        figures = ([f"{size / 1e6:,.1f}" for size in sizes] for sizes in (held, peaks))
        columns = [*figures, [f"{seconds[place]:.3f}" for place in PLACES]]
        print(
            f"| {name} | {clients:,} | " + " | ".join(" / ".join(column) for column in columns) + " |",
            flush=True,
        )
