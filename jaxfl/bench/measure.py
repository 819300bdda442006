"""Measuring: training alone, in its steady state, all contestants in turn.

A *contestant* is one way to train the same rounds: jaxfl with a strategy, the PyTorch loop, a rival method.
They train the same cohorts one after the other, repetition by repetition, so a machine that slows down slows
all of them. A repetition before the first warms up and does not count.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfl.bench.contestants import TORCH, Contestant, chunks, in_jaxfl, in_torch
from jaxfl.bench.count import PHASES, work
from jaxfl.bench.workloads import Strategy, Workload
from jaxfl.config.setup import Setup
from jaxfl.core import memory
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.data.sources import Source
from jaxfl.models.model import PRODUCTS
from jaxfl.runs.prepare import prepare
from jaxfl.runs.variant import choose, provided


class Turn(NamedTuple):
    """What a contestant did in one repetition.

    Args:
      seconds: that it took.
      host_s: of these, outside of compiled programs; see `Trained`.
      flops: operations of its training and, as far as these add them, of host steps; 0 of the PyTorch loop,
        which counts none.
    """

    seconds: float
    host_s: float
    flops: float


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
    checksum: bool = False,
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
      torch: whether the PyTorch loop takes part where it knows the method and the workload has no rival.
      checksum: whether the bits of what was trained are to be known again.

    Returns:
      A record per contestant: "method"; "strategy"; "flops_per_s", "seconds_per_round" and
      "host_s_per_round", medians of the repetitions; "flops_per_round"; "samples_per_s" and "steps_per_s",
      medians, and "flops_per_sample", all None of methods without an entry in `PHASES`; "ratio_to_torch" and
      "ratio_to_first" (contestant), medians of the ratios of samples/s, or else of rounds/s, within a
      repetition, the former None without the loop; "ratio_to_rival", the same of seconds per operation, and
      "rival", None without one; "compile_s", "peak_bytes", "devices", "clients_at_once", "convolution",
      "precision", "seeds" and "checksum" (None where it is not asked for), see `Contestant`; "models", their
      names, "clients", how many there are, and "batch_size";
      "device_peak_bytes" of the process so far, where the device tells; "mfu", the FLOP/s as a share of
      "matmul_flops_per_s", see `matmul_flops`; "repetitions", with the "seconds", "host_s", "flops", perhaps
      "samples", and the rival's of each; "rounds_per_repetition".

    Raises:
      JaxflError: if a device's memory is exhausted.
    """
    variant = choose(choice, workload.training)
    setup = provided(setup, [variant])
    setups = {name: setup.replace(**strategy.setup) for name, strategy in strategies.items()}
    federations = {name: prepare(its_own, source=source).federation for name, its_own in setups.items()}
    federation = next(iter(federations.values()))
    counts = [len(group.id) for group in federation.groups]
    runs = [
        draw_cohorts(counts, setup.run.participation, rounds * (repetitions + 1), setup.run.seed + i)
        for i in range(max(strategy.seeds for strategy in strategies.values()))
    ]
    phases = PHASES.get(variant.method.name)
    parts = tuple(phases(variant.config, model) for model in federation.models) if phases else ()

    with memory.explained(federation):
        for name, its_own in setups.items():  # now: states will fill the memory
            matmul_flops(its_own.run.precision, federations[name].devices)
        contestants = [
            in_jaxfl(name, strategy, variant, setups[name], federations[name], runs[: strategy.seeds], rounds)
            for name, strategy in strategies.items()
        ]
        ours = len(contestants)
        if workload.rival:
            beside = choose(workload.rival, workload.training)
            contestants.append(
                in_jaxfl(workload.rival, Strategy(), beside, setup, federation, runs[:1], rounds)
            )
        elif torch and len(parts) == 1:
            config = variant.config
            contestants.append(in_torch(federation, variant.method.name, config, parts[0], runs[0], rounds))

    with_torch = contestants[-1].strategy == TORCH
    seconds, host_s, flops = _in_turn(contestants, repetitions, workload.patience_s)
    pace = np.array([one.seeds * rounds for one in contestants]) / seconds  # (repetitions, contestants)
    samples = steps = None
    if parts:
        batch_size = variant.config.batch_size
        of_runs = np.array(
            [[work(federation, turn, parts, batch_size) for turn in chunks(run, rounds)] for run in runs]
        )  # (runs, 1 + repetitions, 2)
        works = np.stack([of_runs[: one.seeds, 1 : len(seconds) + 1].sum(0) for one in contestants], 1)
        samples, steps = np.moveaxis(works, 2, 0)
        pace = samples / seconds
        if with_torch:  # it computes what the first contestant does
            flops[:, -1] = samples[:, -1] * flops[:, 0].sum() / samples[:, 0].sum()
    dearness = seconds / flops

    def record(i):
        one, peak = contestants[i], matmul_flops(contestants[i].precision, contestants[i].devices)
        done = {"seconds": seconds[:, i], "host_s": host_s[:, i], "flops": flops[:, i]}
        counted = {"samples_per_s": None, "steps_per_s": None, "flops_per_sample": None}
        if samples is not None and steps is not None:
            done["samples"] = samples[:, i]
            counted = {
                "samples_per_s": statistics.median(samples[:, i] / seconds[:, i]),
                "steps_per_s": statistics.median(steps[:, i] / seconds[:, i]),
                "flops_per_sample": flops[:, i].sum() / samples[:, i].sum(),
            }
        against_rival = None
        if workload.rival:
            done |= {"rival_seconds": seconds[:, -1], "rival_flops": flops[:, -1]}
            against_rival = statistics.median(dearness[:, i] / dearness[:, -1])
        flops_per_s = statistics.median(flops[:, i] / seconds[:, i])
        return {
            "method": choice,
            "strategy": one.strategy,
            **counted,
            "flops_per_s": flops_per_s,
            "flops_per_round": flops[:, i].mean() / rounds,
            "seconds_per_round": statistics.median(seconds[:, i]) / rounds,
            "host_s_per_round": statistics.median(host_s[:, i]) / rounds,
            "ratio_to_torch": statistics.median(pace[:, i] / pace[:, -1]) if with_torch else None,
            "ratio_to_first": statistics.median(pace[:, i] / pace[:, 0]),
            "rival": workload.rival,
            "ratio_to_rival": against_rival,
            "compile_s": one.compile_s,
            "peak_bytes": one.peak_bytes,
            "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            "mfu": flops_per_s / peak,
            "matmul_flops_per_s": peak,
            "devices": one.devices,
            "clients_at_once": one.clients_at_once,
            "convolution": one.convolution,
            "precision": one.precision,
            "seeds": one.seeds,
            "checksum": one.checksum() if checksum and one.checksum else None,
            "models": [model.name for model in federation.models],
            "clients": federation.clients,
            "batch_size": variant.config.batch_size,
            "repetitions": [
                dict(zip(done, values, strict=True)) for values in np.array([*done.values()]).T.tolist()
            ],
            "rounds_per_repetition": rounds,
        }

    return [record(i) for i in range(ours + with_torch)]


def _in_turn(contestants: Sequence[Contestant], repetitions: int, patience_s: float) -> np.ndarray:
    """The `Turn`s of some contestants, one after the other: (3, repetitions, contestants).

    Args:
      contestants: who trains.
      repetitions: how often; fewer where one of them has used up its patience.
      patience_s: seconds.
    """
    for one in contestants:
        one.train(0)
    turns = []
    for number in range(1, repetitions + 1):
        turns.append([_turn(one, number) for one in contestants])
        if max(sum(turn.seconds for turn in of_one) for of_one in zip(*turns, strict=True)) > patience_s:
            break
    return np.moveaxis(np.array(turns), 2, 0)


def _turn(one: Contestant, number: int) -> Turn:
    begun = time.perf_counter()
    trained = one.train(number)
    seconds = time.perf_counter() - begun
    flops = sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(trained.flops))
    return Turn(seconds, trained.host_s, float(flops))


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
      precision: as in `Setup`, of the matrices and their product.
      devices: how many of JAX's.
      attempts: the best of them counts.
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    dtype = jnp.bfloat16 if precision == "bfloat16" else jnp.result_type(float)
    mesh = Mesh(np.array(jax.local_devices()[:devices]), ("devices",), axis_types=(AxisType.Auto,))
    one_each = PartitionSpec("devices")
    a = jax.random.normal(jax.random.key(0), (devices, size, size), dtype)
    a = jax.device_put(a, NamedSharding(mesh, one_each))
    product = jax.jit(jax.shard_map(lambda a: a @ a, mesh=mesh, in_specs=one_each, out_specs=one_each))
    with jax.default_matmul_precision(PRODUCTS[precision]):
        product = product.lower(a).compile()
    product(a).block_until_ready()
    seconds = min(timed(lambda: product(a).block_until_ready()) for _ in range(attempts))
    return 2 * devices * size**3 / seconds
