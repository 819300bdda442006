"""Jobs of the engine, made from options and data: cohorts, and clients at once on this machine."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.core import memory
from jaxfl.core.answers import draw_dropouts
from jaxfl.core.cohorts import align, balance, draw_cohorts, draw_poisson
from jaxfl.core.engine import compiled
from jaxfl.core.host_state import taken_over
from jaxfl.core.job import Job, of_rounds, traced
from jaxfl.core.noisy_steps import noisy_steps
from jaxfl.core.protocol_check import check
from jaxfl.core.rounds import Conditions
from jaxfl.core.schedule import factors
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.data.sources import Source, kind_of
from jaxfl.errors import JaxflError, beyond_cohort
from jaxfl.folder import checkpoint, store
from jaxfl.folder.records import Config
from jaxfl.folder.variant import Variant, needs_of
from jaxfl.machine.clock import Deadline
from jaxfl.machine.processes import on_first_process
from jaxfl.mechanisms.wire import WITHOUT, accounting_of, chosen_of, needed_of, of_rows
from jaxfl.results.scores import needs_rows
from jaxfl.runs.architectures import client_devices
from jaxfl.runs.prepare import Data
from jaxfl.tasks import require_classes


def job_of(runs: Sequence[tuple[Variant, Setup]], federation: Federation) -> Job:
    """Return the job of one run, or of several that differ only in their seeds and rates: one program."""
    variant, setup = runs[0]
    cohorts = [_cohorts(setup, federation) for _, setup in runs]
    devices = client_devices(setup, federation)
    return Job(
        variant.programs,
        federation,
        configs=[variant.config for variant, _ in runs],
        cohorts=align(cohorts, federation) if len(runs) > 1 else cohorts,
        keys=[jax.random.key(setup.run.seed) for _, setup in runs],
        eval_every=setup.run.eval_every,
        score_cohort=setup.run.score_cohort,
        likely=needs_rows(federation.task, setup.machine.show),
        conditions=[_conditions(setup, federation, devices) for _, setup in runs],
        on_host=setup.machine.client_state == "host",
        accounting=[_accounting(*run, federation, of_run) for run, of_run in zip(runs, cohorts, strict=True)],
        client_devices=devices,
    )


def _accounting(
    variant: Variant, setup: Setup, federation: Federation, cohorts: PerGroup
) -> Callable[[int], Any] | None:
    """Return what differential privacy guarantees after so many rounds; None without."""
    if accounting := accounting_of(setup, federation):
        return partial(accounting.after, cohorts=cohorts)
    if (rows := chosen_of(setup).rows) is None:
        return None

    @cache
    def counted():
        key, hyper = jax.random.key(setup.run.seed), traced(variant.config)
        of_run = of_rounds(cohorts, 0, setup.run.rounds)
        return noisy_steps(variant.programs.algorithm, key, hyper, federation, of_run)

    sizes = np.concatenate([np.asarray(group.size) for group in federation.groups])
    return of_rows(rows, variant.config.batch_size, sizes, counted)


def _cohorts(setup: Setup, federation: Federation) -> PerGroup:
    """Draw the cohort of every round of a run, with the place of each client: leaves (rounds, k_g)."""
    counts = [len(group.id) for group in federation.groups]
    chosen = setup.run.participation, setup.run.rounds, setup.run.seed
    draw = draw_cohorts if setup.run.sampling == "fixed" else draw_poisson
    drawn = draw(counts, *chosen, federation.newcomers)
    return balance(drawn, [np.asarray(group.size) for group in federation.groups], federation)


def _conditions(setup: Setup, federation: Federation, devices: PerGroup | None) -> Conditions:
    """Return the conditions of a run's rounds that do not depend on its method."""
    run, dropped, deadline = setup.run, None, None
    if run.dropout or run.deadline:
        counts = [len(group.id) for group in federation.groups]
        dropped = draw_dropouts(counts, run.dropout, run.rounds, run.seed)
    if run.deadline:
        assert devices  # `check_setup` requires it
        deadline = traced(Deadline(run.deadline, devices))
    return Conditions(factors(run.schedule, run.rounds), dropped, deadline)


def form_of_state(variant: Variant, setup: Setup, federation: Federation):
    """Return a run's state with shapes in place of arrays, into which a checkpoint is read."""
    key, hyper = jax.random.key(setup.run.seed), traced(variant.config)
    return jax.eval_shape(variant.programs.algorithm.init, key, federation, hyper)


def saved_state(
    folder: Path,
    config: Config,
    variant: Variant,
    setup: Setup,
    federation: Federation,
    rounds: int | None = None,
) -> tuple[int, Any]:
    """Load a run's newest checkpoint, see `checkpoint.newest`, or that of a certain round.

    Raises:
      JaxflError: as `checkpoint.newest`, or if there is no checkpoint of that round.
    """
    like = partial(form_of_state, variant, setup, federation)
    done, mark = len(store.read_metrics(folder)), store.fingerprint(config)
    if rounds is None:
        return checkpoint.newest(folder, done, like, mark)
    if rounds not in (saved := checkpoint.saved(folder, done)):
        raise JaxflError(
            f"{folder} has no checkpoint of round {rounds}, only of {', '.join(map(str, saved)) or 'none'}; "
            "a run keeps more of them with --keep-checkpoints."
        )
    return rounds, checkpoint.load(folder, rounds, like(), mark)


def at_rest(variant: Variant, setup: Setup, federation: Federation, state: Any) -> Any:
    """Place a checkpoint's state where `client_state` keeps it while some clients' models are made."""
    if setup.machine.client_state == "device":
        return jax.device_put(state) if federation.mesh is None else federation.place(state)
    key, hyper = jax.random.key(setup.run.seed), traced(variant.config)
    return taken_over(variant.programs.algorithm.init, key, federation, hyper, state)


def fit_to_machine(variant: Variant, setup: Setup, data: Data) -> Data:
    """Return the data of a run: without links that it does not use, and divided such that memory suffices.

    If the device's memory requires it, fewer clients train side by side, unless the setup says how many.

    Raises:
      JaxflError: if the method is the user's own and does not keep the protocol, or vectors are to be
        augmented like images, or windows rotated, or the labels are for a task that the method cannot do, or
        its messages do not pass through what the setup has on the wire, or
        clients' state is to be in the host's memory and a round needs all clients.
    """
    if "classes" in needs_of(variant):
        require_classes(data.source.task, variant.label)
    _require_images_to_augment(variant, data.source)
    if setup.machine.client_state == "host" and (variant.programs.algorithm.host or variant.programs.prepare):
        raise beyond_cohort(f"{variant.label} has a step that uses all clients")
    _require_on_the_wire(variant, setup)
    federation = data.federation
    if setup.run.topology == "none":  # other methods of a comparison may have links
        federation = dataclasses.replace(federation, links=federation.links[:0, :0])
    if not variant.built_in:
        check(variant.algorithm, federation, traced(variant.config), setup.run.rounds)
    if setup.machine.clients_at_once is None:
        federation = _as_many_as_fit(variant, setup, federation)
    return data._replace(federation=federation)


def _require_on_the_wire(variant: Variant, setup: Setup) -> None:
    """Refuse options of the wire that the method's rounds do not pass through, see `Algorithm.wire`."""
    passes = variant.programs.algorithm.wire
    for choice, place in needed_of(setup).items():
        if place not in passes:
            raise JaxflError(f"{variant.label}: {choice} {WITHOUT[place]}; leave it out.")


def _require_images_to_augment(variant: Variant, source: Source) -> None:
    """Refuse to augment vectors and tokens like images, and to rotate or colour windows of a signal."""
    augment, shape = variant.config.augment, source.images.shape[1:]
    if augment and kind_of(shape) in ("vectors", "tokens"):
        raise JaxflError(
            f"{variant.label}: --augment {' '.join(augment)} changes images, but {source.name} holds "
            f"{kind_of(shape)}; leave it out."
        )
    for kind, does in (("rotate", "turns"), ("colour", "changes the colours of")):
        if kind in augment and 1 in shape[:2]:
            raise JaxflError(
                f"{variant.label}: --augment {kind} {does} images, but {source.name} holds {kind_of(shape)}; "
                "leave it out."
            )


def _as_many_as_fit(variant: Variant, setup: Setup, federation: Federation) -> Federation:
    def needed(fewer):
        return max(map(memory.peak_bytes, compiled(job_of([(variant, setup)], fewer))))

    limit = on_first_process(memory.available)(federation)
    if limit is None:
        return federation
    fitting = memory.as_many_as_fit(federation, needed, limit)
    if fitting.clients_at_once < federation.clients_at_once:
        warnings.warn(
            f"{variant.label}: {federation.clients_at_once} clients side by side do not fit in a device's "
            f"memory; now using --clients-at-once {fitting.clients_at_once}.",
            stacklevel=4,
        )
    return fitting


def most_together(runs: Sequence[tuple[Variant, Setup]], federation: Federation) -> int:
    """Return how many of the runs fit in memory as one program."""
    limit = on_first_process(memory.available_to_several)(federation)

    def needed(number):
        (rounds,) = compiled(job_of(runs[:number], federation))
        return memory.peak_bytes(rounds)

    return memory.most_that_fit(len(runs), needed, limit)
