"""Contestants: jaxfl with a strategy, and the PyTorch loop, ready to train chunks of rounds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.bench.count import Phase
from jaxfl.bench.workloads import Strategy
from jaxfl.config.setup import Setup
from jaxfl.core import flops, memory
from jaxfl.core.cohorts import align, balance
from jaxfl.core.initial_weights import initial_weights
from jaxfl.core.job import traced
from jaxfl.core.protocol import Cohort
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.folder.variant import Variant
from jaxfl.machine.processes import digest

TORCH = "torch"  # in place of a strategy's name


class Trained(NamedTuple):
    """What measured rounds leave besides the seconds of the clock."""

    flops: Any = ()
    """Floating-point operations to add up, arrays and numbers, see `jaxfl.core.rounds.Report`."""
    host_s: float = 0.0  # seconds of steps between rounds outside of compiled programs, such as a server's


class Contestant(NamedTuple):
    """One way to train."""

    strategy: str  # its name
    train: Callable[[int], Trained]  # takes the number of a repetition; returns when its rounds are trained
    devices: int  # number of devices that it uses
    precision: str = "full"  # arithmetic, as in `Setup`
    seeds: int = 1  # number of runs that it trains
    clients_at_once: int = 1  # number of clients that train side by side on a device
    compile_s: float | None = None
    """Seconds of tracing and compiling; fewer if the persistent cache had the program, 0 if an earlier
    contestant compiled the same one."""
    peak_bytes: int | None = None  # that compiled rounds hold at once, see `jaxfl.core.memory.peak_bytes`
    convolution: str | None = None  # how the networks convolve a batch, a word or several
    checksum: Callable[[], str] | None = None  # returns a checksum of the bits of what is trained by now


def chunks(cohorts: PerGroup, rounds: int) -> list[PerGroup]:
    """Split cohorts with leaves (..., all rounds, k_g) into chunks of `rounds` rounds."""
    firsts = range(0, cohorts[0].mask.shape[-2], rounds)
    return [jax.tree.map(lambda leaf, t=first: leaf[..., t : t + rounds, :], cohorts) for first in firsts]


def in_jaxfl(
    name: str,
    strategy: Strategy,
    variant: Variant,
    setup: Setup,
    federation: Federation,
    runs: list[PerGroup],
    rounds: int,
) -> Contestant:
    """Return the contestant of the engine's rounds, compiled for chunks of `rounds`.

    Setup and federation have the strategy's options; `runs` are the cohorts of each seed.

    Raises:
      JaxflError: if runs are to be one program, but the method has steps outside of programs.
    """
    program = variant.programs.rounds_of_runs if strategy.together else variant.programs.rounds
    host = variant.programs.algorithm.host
    if host and strategy.together:
        raise JaxflError(
            f"{variant.label} has steps between rounds outside of compiled programs, so several seeds cannot "
            f"be one program; leave out the strategy {name!r}."
        )
    before = program.seconds
    keys = [jax.random.key(setup.run.seed + i) for i in range(strategy.seeds)]
    hyper = traced(variant.config)
    states = [jax.tree.map(jnp.copy, variant.programs.algorithm.init(key, federation, hyper)) for key in keys]
    if strategy.together:
        keys, states = [jnp.stack(keys)], [jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)]
    keys = federation.replicate(keys)
    states = [federation.place(state, strategy.together) for state in states]

    def cohorts(federation):
        """Return for every repetition the cohorts of each program, in as many pieces as it runs.

        They are the last rounds of a run: after warm-ups and votes.
        """
        sizes = [np.asarray(group.size) for group in federation.groups]
        of_runs = align([balance(run, sizes, federation) for run in runs], federation)
        slots = jax.tree.map(lambda *leaves: np.stack(leaves), *of_runs)
        count = slots[0].mask.shape[1]
        run = max(setup.run.rounds, count)
        numbers = np.tile(np.arange(run - count, run, dtype=np.int32), (strategy.seeds, 1))
        once = 1 if host else rounds  # a host step follows every round
        firsts, each = range(0, count, once), rounds // once
        pieces = [
            Cohort(numbers[:, t : t + once], piece, run)
            for t, piece in zip(firsts, chunks(slots, once), strict=True)
        ]
        of_turns = [pieces[i : i + each] for i in range(0, len(pieces), each)]
        if strategy.together:
            return [[of_turn] for of_turn in of_turns]
        seeds = range(strategy.seeds)
        return [[jax.tree.map(lambda leaf, i=i: leaf[i], of_turn) for i in seeds] for of_turn in of_turns]

    def needed(federation):
        executable = program.compile(keys[0], states[0], federation, cohorts(federation)[0][0][0])
        return memory.peak_bytes(executable)

    limit = memory.available(federation)
    if limit is not None and setup.machine.clients_at_once is None:
        federation = memory.as_many_as_fit(federation, needed, limit)
    of_turns = cohorts(federation)

    def between(host, i, cohort):
        """Run the host step after a round of run i, and return its operations and seconds."""
        begun, cohort = time.perf_counter(), jax.tree.map(lambda leaf: leaf[0], cohort)
        key = jax.random.fold_in(keys[i], cohort.round)
        state = federation.replicate(states[i])
        (state, _), operations = flops.on_host(host, key, state, federation, cohort)
        states[i] = jax.block_until_ready(federation.place(state))
        return operations, time.perf_counter() - begun

    @memory.explained(federation)
    def train(turn):
        operations, host_s = [], 0.0
        for i, pieces in enumerate(of_turns[turn]):
            for cohort in pieces:
                states[i], reports = jax.block_until_ready(program(keys[i], states[i], federation, cohort))
                operations.append(reports.flops)
                if host:
                    of_host, seconds = between(host, i, cohort)
                    operations.append(of_host)
                    host_s += seconds
        return Trained(operations, host_s)

    used = dict.fromkeys(
        group.model.convolution_for(min(variant.config.batch_size, max(2, group.rows.shape[1])))
        for group in federation.groups
    )

    return Contestant(
        name,
        train,
        federation.devices,
        setup.run.precision,
        strategy.seeds,
        federation.clients_at_once,
        peak_bytes=needed(federation),
        compile_s=program.seconds - before,
        convolution=" ".join(used),
        checksum=lambda: digest(states).hex()[:16],
    )


def in_torch(
    federation: Federation, method: str, config: Any, parts: tuple[Phase, ...], run: PerGroup, rounds: int
) -> Contestant:
    """Return the PyTorch loop as a contestant; on a CPU it may use all cores."""
    from jaxfl.bench import torch_loop  # PyTorch is an extra

    weights = initial_weights(jax.random.key(0), federation)[0]
    one_round = torch_loop.prepare(federation, method, config, parts, weights)
    of_turns = chunks(run, rounds)

    def train(turn):
        (slots,) = of_turns[turn]
        for index, mask in zip(slots.index, slots.mask, strict=True):
            one_round(index[mask].tolist())
        return Trained()

    torch_loop.choose_threads(lambda: train(0))
    return Contestant(TORCH, train, 1)
