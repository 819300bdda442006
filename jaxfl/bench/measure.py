"""Measuring: training alone, in its steady state, all contestants in turn.

A *contestant* is one way to train the same rounds: jaxfl with a strategy, or the PyTorch loop. They train the
same cohorts one after the other, repetition by repetition, so a machine that slows down slows all of them. A
repetition before the first warms up and does not count.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl import registry
from jaxfl.bench.count import work
from jaxfl.bench.workloads import STRATEGIES, Phase, Workload, phases
from jaxfl.cohorts import balance, draw_cohorts
from jaxfl.data.federation import Federation
from jaxfl.data.sources import Source
from jaxfl.engine import traced
from jaxfl.experiment import Setup, prepare
from jaxfl.runs.run import Chosen, choose
from jaxfl.training import initial_weights
from jaxfl.types import Cohort, PerGroup

TORCH = "torch"  # stands in place of a strategy
TORCH_METHODS = ("fedavg", "fedper", "fedrep", "ditto")


class Contestant(NamedTuple):
    """One way to train.

    Args:
      strategy: its name.
      train: of the number of a repetition; ends when its cohorts are trained.
      compile_s: seconds of tracing and compiling; fewer where the persistent cache had the program, 0
        where an earlier contestant compiled the same one.
      peak_bytes: what the compiled rounds hold at once: arguments, results and temporaries.
    """

    strategy: str
    train: Callable[[int], None]
    compile_s: float | None = None
    peak_bytes: int | None = None


def measure(
    workload: Workload,
    choice: str,
    setup: Setup,
    source: Source,
    strategies: Sequence[str],
    *,
    repetitions: int,
    rounds: int,
    torch: bool,
    peak_flops: float,
) -> list[dict[str, Any]]:
    """Measure one method on one workload.

    Args:
      workload: which.
      choice: the method, perhaps with options.
      setup: the workload's options.
      source: its images.
      strategies: names in `STRATEGIES`.
      repetitions: how often each contestant is timed.
      rounds: that it trains each time.
      torch: whether the PyTorch loop takes part where it knows the method.
      peak_flops: of this machine, see `matmul_flops`.

    Returns:
      A record per contestant: "method"; "strategy"; "samples_per_s" and "steps_per_s", medians;
      "ratio_to_torch", the median of the ratios within a repetition, None without the loop; "compile_s" and
      "peak_bytes", see `Contestant`; "device_peak_bytes" of the process so far, where the device tells;
      "mfu", the model's FLOP/s as a share of `peak_flops`; "flops_per_sample"; "repetitions", the samples/s
      of each; "rounds_per_repetition".
    """
    method, options = registry.method(choice)
    config = method.config(**(workload.training | options))
    prepared = {
        name: prepare(dataclasses.replace(setup, **STRATEGIES[name]), source=source) for name in strategies
    }
    federation = prepared[strategies[0]].federation
    counts = [len(group.id) for group in federation.groups]
    cohorts = draw_cohorts(counts, setup.participation, rounds * (repetitions + 1), setup.seed)
    chunks = list(_chunks(cohorts, rounds))
    parts = tuple(phases(method.name, config, model) for model in federation.models)

    contestants = [
        in_jaxfl(name, choose(choice, method, config), data.federation, cohorts, rounds)
        for name, data in prepared.items()
    ]
    if torch and method.name in TORCH_METHODS and len(parts) == 1:
        contestants.append(in_torch(federation, method.name, config, parts[0], chunks))
    for one in contestants:
        one.train(0)
    turns = range(1, repetitions + 1)
    seconds = np.array([[timed(one.train, turn) for one in contestants] for turn in turns])
    works = np.array([work(federation, chunk, parts, config.batch_size) for chunk in chunks[1:]])
    samples, steps, flops = (works[:, i, None] / seconds for i in range(3))  # (repetitions, contestants)
    with_torch = contestants[-1].strategy == TORCH
    return [
        {
            "method": choice,
            "strategy": one.strategy,
            "samples_per_s": statistics.median(samples[:, i]),
            "steps_per_s": statistics.median(steps[:, i]),
            "ratio_to_torch": statistics.median(samples[:, i] / samples[:, -1]) if with_torch else None,
            "compile_s": one.compile_s,
            "peak_bytes": one.peak_bytes,
            "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "mfu": statistics.median(flops[:, i]) / peak_flops,
            "flops_per_sample": works[:, 2].sum() / works[:, 0].sum(),
            "repetitions": samples[:, i].tolist(),
            "rounds_per_repetition": rounds,
        }
        for i, one in enumerate(contestants)
    ]


def _chunks(cohorts: PerGroup, rounds: int) -> Iterator[PerGroup]:
    for first in range(0, len(cohorts[0].mask), rounds):
        yield jax.tree.map(lambda leaf: leaf[first : first + rounds], cohorts)  # noqa: B023


def timed(function: Callable, *args) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def in_jaxfl(
    strategy: str, chosen: Chosen, federation: Federation, cohorts: PerGroup, rounds: int
) -> Contestant:
    """The engine's rounds, compiled for chunks of so many."""
    key, program = jax.random.key(0), chosen.programs.rounds
    state = jax.tree.map(jnp.copy, chosen.programs.init(key, federation, traced(chosen.config)))
    key, state = federation.place((key, state))
    sizes = [np.asarray(group.size) for group in federation.groups]
    chunks = [
        Cohort(np.arange(rounds, dtype=np.int32), slots, rounds=rounds)
        for slots in _chunks(balance(cohorts, sizes, federation), rounds)
    ]

    def train(chunk):
        nonlocal state
        state, _ = jax.block_until_ready(program(key, state, federation, chunks[chunk]))

    before = program.seconds
    memory = program.compile(key, state, federation, chunks[0]).memory_analysis()
    return Contestant(
        strategy,
        train,
        program.seconds - before,
        memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,  # the state, which is an argument and a result in one place
    )


def in_torch(
    federation: Federation, method: str, config: Any, parts: tuple[Phase, ...], chunks: list[PerGroup]
) -> Contestant:
    """The PyTorch loop."""
    from jaxfl.bench import torch_loop  # PyTorch is an extra

    weights = initial_weights(jax.random.key(0), federation)[0]
    one_round = torch_loop.prepare(federation, method, config, parts, weights)

    def train(chunk):
        (slots,) = chunks[chunk]
        for index, mask in zip(slots.index, slots.mask, strict=True):
            one_round(index[mask].tolist())

    torch_loop.choose_threads(lambda: train(0))
    return Contestant(TORCH, train)


def matmul_flops(size: int = 1024, attempts: int = 10) -> float:
    """FLOP/s of a product of two square float32 matrices on this device: the best of some attempts."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    return 2 * size**3 / min(timed(lambda: product(a, a).block_until_ready()) for _ in range(attempts))
