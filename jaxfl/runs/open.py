"""The folder of a run, made for its first round, opened at its newest checkpoint, or made longer."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxfl.config.setup import Setup
from jaxfl.config.values import as_path
from jaxfl.core.engine import depends_on_length
from jaxfl.core.schedule import factors
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, code, store
from jaxfl.folder.config import described, moved
from jaxfl.folder.records import Config
from jaxfl.folder.variant import Variant
from jaxfl.machine.environment import environment
from jaxfl.machine.processes import agree
from jaxfl.results.target import stops
from jaxfl.runs.engine_job import job_of, saved_state
from jaxfl.runs.init_from import initial_arrays
from jaxfl.runs.loop import Run
from jaxfl.runs.prepare import Data
from jaxfl.runs.recorded_data import images_of


def begin(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Make the folder of a new run, with data from `fit_to_machine`; `watch` gets its metrics as they come.

    Raises:
      JaxflError: if the folder is not free or cannot be written.
    """
    chosen, federation = described(variant, setup), data.federation
    # A resume computes as this machine does.
    chosen["options"] |= {"clients_at_once": federation.clients_at_once, "devices": federation.devices}
    now = code.present(chosen)
    agree("code", now)
    config: Config = {
        **chosen,
        "models": [
            {"name": model.name, "clients": count, "parameters": model.size, "note": model.note}
            for model, count in data.models
        ],
        "data": images_of(data.source, data.federation, data.others),
        "starts": list(data.starts),
        "environment": environment() | {"folder": str(folder.resolve())},
        "code": now,
    }
    store.begin(folder, config, data.partition, data.source, federation.links, initial_arrays(data))
    return Run(folder, config, variant, setup.machine, now, watch, [], new=True)


def reopen(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Reopen a run at its newest checkpoint, with data from `prepare` with its partition.

    Raises:
      JaxflError: if there are checkpoints and none can be read, or one belongs to another configuration.
    """
    config = store.read_config(folder)
    done, state = saved_state(folder, config, variant, setup, data.federation)
    now = code.present(moved(folder, config, code=True))
    agree("checkpoints", done)
    agree("code", now)
    metrics = store.trim(folder, done)
    taken_over = None if code.same(code.latest(folder, config, metrics), now) else done
    place = setup.machine.data_dir and str(as_path(setup.machine.data_dir).absolute())
    for option, now_ in (("devices", data.federation.devices), ("data_dir", place)):
        if now_ != config["options"].get(option):
            config = store.change(folder, option, now_)
    checkpoint.trim(folder, done, setup.machine.keep_checkpoints)
    state = jax.device_get(state)  # a run of several waits, while the device has other work
    return Run(folder, config, variant, setup.machine, now, watch, metrics, state, taken_over=taken_over)


def require_same_beginning(folder: Path, variant: Variant, setup: Setup, data: Data, rounds: int) -> None:
    """Refuse to make a run longer if a new run of `rounds` rounds would begin otherwise.

    Raises:
      JaxflError: if a round of the method, a schedule or the noise for a target differs in a longer run.
    """
    require_same_rates(folder, setup, rounds)
    if setup.wire.target_epsilon is not None:
        raise JaxflError(
            f"{folder} has noise for --target-epsilon {setup.wire.target_epsilon:g} after {setup.run.rounds} "
            f"rounds; start a new run with --rounds {rounds}."
        )
    if depends_on_length(job_of([(variant, setup)], data.federation), rounds):
        raise JaxflError(
            f"{variant.label} has rounds that depend on the length of the run: one of {rounds} rounds "
            f"does not begin like {folder}, begun for {setup.run.rounds}; start a new run with --rounds "
            f"{rounds}."
        )


def extend(folder: Path, config: Config, rounds: int, kept: int) -> None:
    """Write that a run has more rounds, of which the first ones `kept` are done, see `rounds_kept`."""
    longer: Config = {**config, "options": config["options"] | {"rounds": rounds}}
    if stops(config, store.read_metrics(folder)[:kept]):
        longer["beyond_target"] = True
    store.lengthen(folder, longer, kept)


def rounds_kept(folder: Path, setup: Setup, rounds: int) -> int:
    """Return the number of rounds done from which a run can become longer.

    Raises:
      JaxflError: if it has no checkpoint of that round.
    """
    if not store.holds(folder, store.RESULT) and not checkpoint.saved(folder):
        return 0  # it has diverged or was stopped before its first checkpoint, and begins anew
    done = len(store.read_metrics(folder))
    # The last rounds of a run may be fewer than --eval-every: the longer run is not scored after these.
    kept = done - done % setup.run.eval_every
    if kept and not checkpoint.saved(folder, kept):
        raise JaxflError(
            f"A longer run would go on from round {kept} of {folder}, which has no checkpoint of it; start a "
            f"new run with --rounds {rounds}, and next time keep more checkpoints (--keep-checkpoints)."
        )
    return kept


def require_same_rates(folder: Path, setup: Setup, rounds: int) -> None:
    """Refuse to make a run longer whose schedule depends on its length.

    Raises:
      JaxflError: if a run of `rounds` rounds would have other learning rates in the rounds so far.
    """
    if rates_depend_on_length(setup, rounds):
        before = setup.run.rounds
        raise JaxflError(
            f"--schedule {setup.run.schedule} depends on the length of the run: one of {rounds} rounds does "
            f"not begin like {folder}, begun for {before}; start a new run with --rounds {rounds}, or one "
            f"with --schedule cosine,rounds={before},final=0.01, which can be made longer."
        )


def rates_depend_on_length(setup: Setup, rounds: int) -> bool:
    """Return whether a run's learning rates would be others in a run of `rounds` rounds."""
    before = setup.run.rounds
    short, long = (factors(setup.run.schedule, length) for length in (before, rounds))
    return short is not None and long is not None and bool((short != long[:before]).any())
