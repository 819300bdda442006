"""The share of a round that the parts between clients take: similarities, mixing, the matrix.

    python experiments/between_clients.py --data-dir DIR

The same compiled round runs with all clients' rows and with none: without rows no client trains or uses a
public image, and what is left happens between clients. Medians of repetitions, taken in turn.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.core.cohorts import balance, draw_cohorts
from jaxfl.core.job import traced
from jaxfl.core.programs import Program
from jaxfl.core.protocol import Cohort
from jaxfl.folder.variant import choose, provided
from jaxfl.runs.prepare import prepare

METHODS = {
    "fedcmd": {"selection_rounds": 0, "personal": "fc1"},  # the largest layer, in the second phase
    "mnfl": {"public_size": 500},
    "mnfl-homogeneous": {},
}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    print("method, clients, cohort, seconds a round, seconds between clients, share")
    for clients, participation in ((100, 0.1), (1000, 1.0)):
        for name, options in METHODS.items():
            whole, between, cohort = measure(name, options, clients, participation, arguments)
            print(
                f"{name}, {clients}, {cohort}, {whole:.3f}, {between:.3f}, {between / whole:.3f}", flush=True
            )


def measure(name, options, clients, participation, arguments):
    """Return median seconds of a round, the same without rows, and the size of the cohort."""
    variant = choose(name, batch_size=32, **options)
    config = variant.config
    setup = Setup.of(dataset="cifar10", data_dir=arguments.data_dir, partition="iid", clients=clients)
    setup = setup.replace(models=("lenet5",), participation=participation)
    federation = prepare(provided(setup, [variant])).federation
    algorithm = variant.method.build(config)
    drawn = draw_cohorts([clients], participation, 1, seed=0)
    places = balance(drawn, [np.asarray(federation.groups[0].size)], federation)
    cohort = Cohort(np.int32(0), jax.tree.map(lambda leaf: leaf[0], places), rounds=30)
    key = jax.random.key(0)
    state = jax.jit(algorithm.init)(key, federation, traced(config))
    (group,) = federation.groups
    idle = dataclasses.replace(
        federation, groups=(dataclasses.replace(group, size=jnp.zeros_like(group.size)),)
    )
    step = Program(algorithm.step)
    arguments_of = [federation.replicate((key, state, one, cohort)) for one in (federation, idle)]
    times = [[], []]
    for repetition in range(arguments.repetitions + 1):
        for taken, of_round in zip(times, arguments_of, strict=True):
            step.compile(*of_round)
            begun = time.perf_counter()
            jax.block_until_ready(step(*of_round))
            if repetition:
                taken.append(time.perf_counter() - begun)
    return *(float(np.median(taken)) for taken in times), int(cohort.groups[0].mask.sum())


if __name__ == "__main__":
    main()
