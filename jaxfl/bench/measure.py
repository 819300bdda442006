"""Measurements of training only, in its steady state, all contestants in turn.

A *contestant* is one way to train the same rounds: jaxfl with a strategy, the PyTorch loop, a rival method.
They train the same cohorts one after the other, repetition by repetition, so a machine that slows down slows
all of them. A repetition before the first warms up and does not count.
"""

import functools
import statistics
import time
import timeit
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfl.bench.contestants import TORCH, Contestant, chunks, in_jaxfl, in_torch
from jaxfl.bench.count import PHASES, require_counted, work
from jaxfl.bench.workloads import Strategy, Workload
from jaxfl.config.setup import Setup
from jaxfl.core import memory
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.data.sources import Source
from jaxfl.folder.variant import choose, provided
from jaxfl.models.model import PRODUCTS
from jaxfl.runs.prepare import prepare


class Done(NamedTuple):
    """Measurements of the contestants, in arrays (repetitions, contestants)."""

    seconds: np.ndarray  # that they took
    host_s: np.ndarray  # seconds of these outside of compiled programs, see `Trained`
    flops: np.ndarray
    """Operations of training and, as far as these add them, of host steps. The PyTorch loop counts none; it
    has those of the first contestant for as many samples."""
    samples: np.ndarray | None = None  # see `work`; None for methods without an entry in `PHASES`
    steps: np.ndarray | None = None  # the same


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
    """Measure one method on one workload, whose options and images are given.

    Each contestant trains some rounds in each repetition. With `torch` the PyTorch loop takes part where it
    knows the method and the workload has no rival.

    Returns:
      A record, for JSON, of each strategy, and of the PyTorch loop if it took part.

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
    if phases:
        require_counted(variant.label, variant.config)
    parts = tuple(phases(variant.config, model) for model in federation.models) if phases else ()

    with memory.explained(federation):
        for name, its_own in setups.items():  # now: states will fill the memory
            matmul_flops(its_own.run.precision, federations[name].devices)
        contestants = [
            in_jaxfl(name, strategy, variant, setups[name], federations[name], runs[: strategy.seeds], rounds)
            for name, strategy in strategies.items()
        ]
        if workload.rival:
            rival = choose(workload.rival, workload.training)
            contestants += [in_jaxfl(workload.rival, Strategy(), rival, setup, federation, runs[:1], rounds)]
        elif torch and len(parts) == 1:
            name = variant.method.name
            contestants += [in_torch(federation, name, variant.config, parts[0], runs[0], rounds)]

    done = _in_turn(contestants, repetitions, workload.patience_s)
    if parts:
        done = _with_work(done, contestants, federation, runs, parts, variant.config.batch_size, rounds)
    facts = {
        "method": choice,  # as it was chosen, perhaps with options
        "rival": workload.rival,  # the method with which this one is compared; None without
        "models": [model.name for model in federation.models],
        "clients": federation.clients,
        "batch_size": variant.config.batch_size,
        "rounds_per_repetition": rounds,  # that are timed together
    }
    kept = contestants[:-1] if workload.rival else contestants
    return [_record(i, contestants, done, checksum, facts) for i in range(len(kept))]


def _in_turn(contestants: Sequence[Contestant], repetitions: int, patience_s: float) -> Done:
    """Train contestants in turn, also less often if one of them has taken more than `patience_s`."""
    for one in contestants:
        one.train(0)
    turns = []
    for number in range(1, repetitions + 1):
        turns.append([_turn(one, number) for one in contestants])
        if max(sum(seconds for seconds, *_ in of_one) for of_one in zip(*turns, strict=True)) > patience_s:
            break
    return Done(*np.moveaxis(np.array(turns), 2, 0))


def _turn(one: Contestant, number: int) -> tuple[float, float, float]:
    """Train one repetition, and return its seconds, seconds on the host and operations."""
    begun = time.perf_counter()
    trained = one.train(number)
    seconds = time.perf_counter() - begun
    flops = sum(np.asarray(leaf, np.float64).sum() for leaf in jax.tree.leaves(trained.flops))
    return seconds, trained.host_s, float(flops)


def _with_work(
    done: Done,
    contestants: Sequence[Contestant],
    federation: Federation,
    runs: Sequence[PerGroup],
    parts: PerGroup,
    batch_size: int,
    rounds: int,
) -> Done:
    """Return `done` with the samples and steps of the cohorts that each contestant trained."""
    of_runs = np.array(
        [[work(federation, turn, parts, batch_size) for turn in chunks(run, rounds)] for run in runs]
    )  # (runs, 1 + repetitions, 2)
    counted = slice(1, len(done.seconds) + 1)  # a repetition before the first warms up
    of_each = np.stack([of_runs[: one.seeds, counted].sum(0) for one in contestants], 1)
    samples, steps = np.moveaxis(of_each, 2, 0)
    flops = done.flops
    if contestants[-1].strategy == TORCH:
        of_torch = samples[:, -1:] * flops[:, 0].sum() / samples[:, 0].sum()
        flops = np.concatenate([flops[:, :-1], of_torch], axis=1)
    return done._replace(flops=flops, samples=samples, steps=steps)


def _record(
    i: int, contestants: Sequence[Contestant], done: Done, checksum: bool, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the record of contestant i; `facts` are the entries that all share."""
    one, last = contestants[i], contestants[-1]
    seconds, host_s, flops = done.seconds[:, i], done.host_s[:, i], done.flops[:, i]
    rounds = facts["rounds_per_repetition"]
    peak, flops_per_s = matmul_flops(one.precision, one.devices), statistics.median(flops / seconds)
    of_each = {"seconds": seconds, "host_s": host_s, "flops": flops}
    samples_per_s = steps_per_s = flops_per_sample = against_rival = None
    trained = np.array([contestant.seeds * rounds for contestant in contestants])
    if done.samples is not None and done.steps is not None:
        trained = done.samples
        samples, steps = done.samples[:, i], done.steps[:, i]
        samples_per_s, steps_per_s = statistics.median(samples / seconds), statistics.median(steps / seconds)
        flops_per_sample = flops.sum() / samples.sum()
        of_each["samples"] = samples
    if facts["rival"]:
        theirs, their_flops = done.seconds[:, -1], done.flops[:, -1]
        of_each |= {"rival_seconds": theirs, "rival_flops": their_flops}
        against_rival = statistics.median(seconds / flops / (theirs / their_flops))
    pace = trained / done.seconds  # (repetitions, contestants)
    return facts | {  # medians are over the repetitions, ratios are taken within each
        "strategy": one.strategy,  # its name, or `TORCH`
        # Training rows per second, each as often as it is used; this and the next two are None for methods
        # without an entry in `PHASES`.
        "samples_per_s": samples_per_s,
        "steps_per_s": steps_per_s,  # optimiser steps of single clients per second
        "flops_per_sample": flops_per_sample,  # operations per training row
        "flops_per_s": flops_per_s,  # operations per second
        "flops_per_round": flops.mean() / rounds,  # operations per round, the mean
        "seconds_per_round": statistics.median(seconds) / rounds,
        "host_s_per_round": statistics.median(host_s) / rounds,  # of these outside of compiled programs
        # Of samples/s, or else rounds/s, to the PyTorch loop's, None without, and to the first contestant's.
        "ratio_to_torch": statistics.median(pace[:, i] / pace[:, -1]) if last.strategy == TORCH else None,
        "ratio_to_first": statistics.median(pace[:, i] / pace[:, 0]),
        "ratio_to_rival": against_rival,  # ratio of seconds per operation
        "compile_s": one.compile_s,  # see `Contestant`, as for what else comes from it
        "peak_bytes": one.peak_bytes,
        # Of the process so far, if the device tells.
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "mfu": flops_per_s / peak,
        "matmul_flops_per_s": peak,
        "devices": one.devices,
        "clients_at_once": one.clients_at_once,
        "convolution": one.convolution,
        "precision": one.precision,
        "seeds": one.seeds,
        "checksum": one.checksum() if checksum and one.checksum else None,
        "repetitions": [
            dict(zip(of_each, values, strict=True)) for values in np.array([*of_each.values()]).T.tolist()
        ],
    }


@functools.cache
def matmul_flops(precision: str, devices: int) -> float:
    """Return FLOP/s of products of two square matrices, one on each of some devices at the same time.

    The devices are measured together, not multiplied: the product of one CPU device already takes all cores.
    The precision, as in `Setup`, is that of the matrices and their product. The best of ten attempts counts.
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
    seconds = min(timeit.repeat(lambda: product(a).block_until_ready(), number=1, repeat=10))
    return 2 * devices * size**3 / seconds
