"""Making a run longer: what forbids it, and what its folder says then."""

from pathlib import Path

from jaxfl.config.setup import Setup
from jaxfl.core.engine import depends_on_length
from jaxfl.core.schedule import factors
from jaxfl.errors import JaxflError
from jaxfl.folder import checkpoint, store
from jaxfl.folder.records import Config
from jaxfl.folder.variant import Variant
from jaxfl.results.target import stops
from jaxfl.runs.engine_job import job_of
from jaxfl.runs.prepare import Data


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
    before = setup.run.rounds
    if rates_depend_on_length(setup, rounds):
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
