"""Bytes of a run's state on one device, by the number of devices: Markdown for docs/devices.md.

JAX_NUM_CPU_DEVICES=4 python experiments/bench/divided.py [METHOD ...]

Bytes by the shardings given to JAX, beside the compiler's count of a round's arguments: the state, the data
set and all else.
"""

import math
import sys

import jax

from jaxfl.config.setup import Setup
from jaxfl.core.engine import compiled
from jaxfl.folder.variant import choose, provided
from jaxfl.machine import placement
from jaxfl.runs.engine_job import fit_to_machine, form_of_state, job_of
from jaxfl.runs.prepare import prepare

METHODS = ("fedavg", "fedper", "lg-fedavg", "ditto", "scaffold", "hermes", "pfedbayes", "fccl")
OPTIONS = {
    "dataset": "digits",
    "models": ("mlp,hidden=64", "mcmahan,width=0.25,padding=same,features=64"),
    "clients": 22,
    "participation": 0.5,
    "rounds": 2,
    "eval_every": 2,
    "clients_at_once": 1,
}
DEVICES = (1, 2, 4)
placement.FEW = 0  # small arrays are divided as large ones are


def held(name: str, devices: int) -> tuple[int, int, int]:
    """Return bytes on one device: of the state, of clients' own part, of all arguments of the program."""
    variant = choose(name)
    setup = provided(Setup.of(**OPTIONS, devices=devices), [variant])
    data = prepare(setup)
    data = fit_to_machine(variant, setup, data)
    federation = data.federation
    groups = {federation.clients, *(len(group.id) for group in federation.groups)}
    state = jax.tree.leaves(federation.form(form_of_state(variant, setup, federation)))

    def size(leaf):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape
        return math.prod(shape) * leaf.dtype.itemsize

    own = sum(size(leaf) for leaf in state if leaf.ndim > 1 and leaf.shape[0] in groups)
    rounds = compiled(job_of([(variant, setup)], federation))[0]
    memory = rounds.memory_analysis()
    assert memory is not None
    return sum(map(size, state)), own, memory.argument_size_in_bytes


print(f"jax {jax.__version__}; devices: {', '.join(map(str, DEVICES))}\n")
print(
    "| | state | clients' own of it | share of one device's | arguments of a round |\n|---|---|---|---|---|"
)
for method in sys.argv[1:] or METHODS:
    states, owns, arguments = zip(*(held(method, devices) for devices in DEVICES), strict=True)
    shares = [f"{own / owns[0]:.3f}" if owns[0] else "" for own in owns]
    columns = ([f"{number:,}" for number in numbers] for numbers in (states, owns, arguments))
    state, own, argument = (" / ".join(column) for column in columns)
    print(f"| {method} | {state} | {own} | {' / '.join(filter(None, shares))} | {argument} |")
