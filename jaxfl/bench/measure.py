"""Measuring: training alone, in its steady state, all contestants in turn.

A *contestant* is one way to train the same rounds: jaxfl with a strategy, or the PyTorch loop. They train the
same cohorts one after the other, repetition by repetition, so a machine that slows down slows all of them. A
repetition before the first warms up and does not count.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfl.bench.contestants import TORCH, TORCH_METHODS, chunks, in_jaxfl, in_torch
from jaxfl.bench.count import work
from jaxfl.bench.workloads import Strategy, Workload
from jaxfl.config.setup import Setup
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.data.sources import Source
from jaxfl.runs.prepare import prepare
from jaxfl.runs.variant import choose


def measure(
    workload: Workload,
    choice: str,
    setup: Setup,
    source: Source,
    strategies: dict[str, Strategy],
    *,
    repetitions: int,
    rounds: int,
    torch: bool,
) -> list[dict[str, Any]]:
    """Measure one method on one workload.

    Args:
      workload: which.
      choice: the method, perhaps with options.
      setup: the workload's options.
      source: its images.
      strategies: by name.
      repetitions: how often each contestant is timed.
      rounds: that it trains each time.
      torch: whether the PyTorch loop takes part where it knows the method.

    Returns:
      A record per contestant: "method"; "strategy"; "samples_per_s" and "steps_per_s", medians;
      "ratio_to_torch" and "ratio_to_first" (contestant), medians of the ratios of samples/s within a
      repetition, the former None without the loop; "compile_s", "peak_bytes", "devices" and
      "clients_at_once", see `Contestant`; "device_peak_bytes" of the process so far, where the device tells;
      "mfu", the model's FLOP/s as a share of "matmul_flops_per_s", see `matmul_flops`; "flops_per_sample";
      "repetitions", the samples/s of each; "rounds_per_repetition".
    """
    chosen = choose(choice, workload.training)
    method, config = chosen.method, chosen.config
    setups = {name: setup.replace(**strategy.setup) for name, strategy in strategies.items()}
    federations = {name: prepare(its_own, source=source).federation for name, its_own in setups.items()}
    federation = next(iter(federations.values()))
    counts = [len(group.id) for group in federation.groups]
    runs = [
        draw_cohorts(counts, setup.run.participation, rounds * (repetitions + 1), setup.run.seed + i)
        for i in range(max(strategy.seeds for strategy in strategies.values()))
    ]
    parts = tuple(method.phases(config, model) for model in federation.models)

    contestants = [
        in_jaxfl(name, strategy, chosen, setups[name], federations[name], runs[: strategy.seeds], rounds)
        for name, strategy in strategies.items()
    ]
    if torch and method.name in TORCH_METHODS and len(parts) == 1:
        contestants.append(in_torch(federation, method.name, config, parts[0], runs[0], rounds))
    for one in contestants:
        one.train(0)
    turns = range(1, repetitions + 1)
    seconds = np.array([[timed(one.train, turn) for one in contestants] for turn in turns])
    of_runs = np.array(
        [
            [work(federation, of_turn, parts, config.batch_size) for of_turn in chunks(run, rounds)]
            for run in runs
        ]
    )  # (runs, 1 + repetitions, 3)
    works = np.stack([of_runs[: one.seeds, 1:].sum(0) for one in contestants], 1)
    samples, steps, flops = np.moveaxis(works / seconds[..., None], 2, 0)  # (repetitions, contestants)
    with_torch = contestants[-1].strategy == TORCH
    peaks = [matmul_flops(one.precision, one.devices) for one in contestants]
    return [
        {
            "method": choice,
            "strategy": one.strategy,
            "samples_per_s": statistics.median(samples[:, i]),
            "steps_per_s": statistics.median(steps[:, i]),
            "ratio_to_torch": statistics.median(samples[:, i] / samples[:, -1]) if with_torch else None,
            "ratio_to_first": statistics.median(samples[:, i] / samples[:, 0]),
            "compile_s": one.compile_s,
            "peak_bytes": one.peak_bytes,
            "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "mfu": statistics.median(flops[:, i]) / peaks[i],
            "matmul_flops_per_s": peaks[i],
            "flops_per_sample": works[:, i, 2].sum() / works[:, i, 0].sum(),
            "devices": one.devices,
            "clients_at_once": one.clients_at_once,
            "repetitions": samples[:, i].tolist(),
            "rounds_per_repetition": rounds,
        }
        for i, one in enumerate(contestants)
    ]


def timed(function: Callable, *args) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


@functools.cache
def matmul_flops(precision: str, devices: int, attempts: int = 10) -> float:
    """FLOP/s of products of two square matrices, one on each of some devices at the same time.

    Measured together and not multiplied: the product of one CPU device already takes all cores.

    Args:
      precision: as in `Setup`, what the matrices are made of.
      devices: how many of JAX's.
      attempts: the best of them counts.
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.result_type(float)
    mesh = jax.make_mesh((devices,), ("devices",), (AxisType.Auto,), devices=jax.local_devices()[:devices])
    one_each = PartitionSpec("devices")
    a = jax.random.normal(jax.random.key(0), (devices, size, size), dtype)
    a = jax.device_put(a, NamedSharding(mesh, one_each))
    product = jax.jit(jax.shard_map(lambda a: a @ a, mesh=mesh, in_specs=one_each, out_specs=one_each))
    product(a).block_until_ready()
    seconds = min(timed(lambda: product(a).block_until_ready()) for _ in range(attempts))
    return 2 * devices * size**3 / seconds
