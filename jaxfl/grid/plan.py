"""The runs of a comparison before anything is trained: which there are, and whether their folder fits."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxfl.config.options import check_some, text
from jaxfl.config.setup import PartitionOptions, RunOptions, Setup
from jaxfl.errors import JaxflError
from jaxfl.folder import code, store
from jaxfl.folder.config import described, experiment
from jaxfl.folder.moved_paths import moved
from jaxfl.folder.variant import Variant, own_setup

MOST_RUNS = 100_000  # of a comparison: a larger number is a slip


class Planned(NamedTuple):
    """A run to start or continue.

    Args:
      variant: the method.
      setup: the run's options.
      done: number of rounds after which it continues; 0 for a new run.
    """

    variant: Variant
    setup: Setup
    done: int = 0


Runs = dict[Path, Planned]  # by folder


def plan(folder: Path, variants: Sequence[Variant], setup: Setup, seeds: int, partition_seeds: int) -> Runs:
    """Return a comparison's runs: every variant with every seed on every partition, see `compare`."""
    first, first_partition = setup.run.seed, setup.partition.partition_seed
    number = len(variants) * seeds * partition_seeds
    if number > MOST_RUNS:
        raise JaxflError(f"These are {number:,} runs; a comparison has at most {MOST_RUNS:,}.")
    last = "the comparison's last run"  # whose seeds are the largest
    check_some(last, RunOptions, {"seed": first + seeds - 1})
    check_some(last, PartitionOptions, {"partition_seed": first_partition + partition_seeds - 1})

    def run_folder(label, seed, number):
        partition = f"-partition-{number}" if number != first_partition else ""
        return folder / store.file_name(label) / f"seed-{seed}{partition}"

    return {
        run_folder(variant.label, seed, number): Planned(
            variant, own_setup(setup, variant).replace(seed=seed, partition_seed=number)
        )
        for number in range(first_partition, first_partition + partition_seeds)
        for seed in range(first, first + seeds)
        for variant in variants
    }


def is_begun(run: Path, entry: Planned) -> bool:
    """Return whether a folder holds the run planned for it, with the same method and options."""
    return store.holds(run, store.CONFIG) and not _differing(run, entry)


def has_finished(run: Path, entry: Planned) -> bool:
    """Return whether a run has finished with all rounds planned."""
    return store.holds(run, store.RESULT) and not is_shorter(run, entry) and not is_other(run, entry)


def is_other(run: Path, entry: Planned) -> bool:
    """Return whether a folder holds a run that differs from the plan in more than its rounds."""
    begun = store.holds(run, store.CONFIG)
    return begun and not all(each.startswith("rounds ") for each in _differing(run, entry))


def require_own(run: Path, entry: Planned) -> None:
    """Refuse a run that another command has made meanwhile, with other options than planned.

    Raises:
      JaxflError: naming it.
    """
    if is_other(run, entry):
        raise JaxflError(
            f"Another command has meanwhile made {run} with other options; repeat this one with another "
            "--run-dir."
        )


def is_shorter(run: Path, entry: Planned) -> bool:
    """Return whether a begun run has fewer rounds than planned."""
    return store.read_config(run)["options"]["rounds"] < entry.setup.run.rounds


def _differing(run: Path, entry: Planned) -> list[str]:
    """Describe each option in which a run differs from the plan."""
    begun = moved(run, store.read_config(run), code=True)
    then, now = (experiment(config) for config in (begun, described(*entry[:2])))

    def words(value):
        return text(tuple(value)) if isinstance(value, list) else text(value)

    return [
        f"{name} {words(then.get(name))}, not {words(now.get(name))}"
        for name in now | then
        if then.get(name) != now.get(name)
    ]


def check_distinct(variants: Sequence[Variant]) -> None:
    """Refuse variants that are the same, or whose runs would share a folder.

    Raises:
      JaxflError: naming the first two such variants.
    """
    for i, variant in enumerate(variants):
        for other in variants[:i]:
            if (variant.method, variant.config) == (other.method, other.config):
                raise JaxflError(f"{variant.label} is named twice; name every method once.")
            if (name := store.file_name(variant.label)) == store.file_name(other.label):
                named = " and ".join(each.name or each.label for each in (other, variant))
                raise JaxflError(
                    f"{named} are two methods whose runs would share a folder, {name}; give one of them "
                    "another name, the first argument of Method."
                )


def check_folder(folder: Path, planned: Runs, beside: bool) -> None:
    """Refuse a folder that holds anything except planned runs, perhaps with fewer rounds.

    Raises:
      JaxflError: if it holds anything else, a run that differs otherwise from the plan, or, unless `beside`
        is true, a run outside of the plan.
    """
    begun = store.runs_in(folder)
    if not begun and not store.holds(folder, store.COMMAND):  # whose runs have been removed, or not begun
        try:
            store.check_free(folder)
        except JaxflError:
            if not (begun := store.runs_in(folder)):  # of another part that begins at this moment
                raise
    for run in begun:
        if run not in planned:
            if beside:
                continue
            raise JaxflError(
                f"{run} is not a run of this comparison; name its method and seed as well, or choose "
                "another --run-dir."
            )
        if differing := _differing(run, planned[run]):
            has, wanted = store.read_config(run)["options"]["rounds"], planned[run].setup.run.rounds
            if has != wanted and len(differing) == 1 and not planned[run].setup.run.stops_early:
                if has < wanted:
                    continue
                raise JaxflError(
                    f"{run} has {has} rounds, not {wanted}, and cannot become shorter; ask for {has} "
                    "rounds, or choose another --run-dir."
                )
            if has < wanted:  # which alone would make it longer
                differing.sort(key=lambda each: each.startswith("rounds "))
            raise JaxflError(
                f"{run} was begun with {differing[0]}; choose another --run-dir, repeat the command that "
                f"began it, or finish this run alone with `jaxfl resume {shlex.quote(str(run))}`."
            )


def check_code(folder: Path, planned: Runs, changed_code: bool, warn: Callable[[str], None]) -> None:
    """Refuse begun runs of changed user files, or warn of them, and warn of runs of another jaxfl."""
    begun = [run for run in store.runs_in(folder) if run in planned]
    finished = [has_finished(run, planned[run]) for run in begun]
    others, changed = [], []
    for run, ended in zip(begun, finished, strict=True):
        then = code.latest(run, store.read_config(run), store.read_metrics(run))
        if not changed_code:
            code.refuse_changed(run, then)
        elif ended and (files := code.changed(then)):
            changed.append((run, files[0]))
        others.append(not code.same_package(then))
    if changed:
        run, file = changed[0]
        warn(
            f"{len(changed)} of {len(begun)} runs in {folder} have finished with another version of your "
            f"code ({file}) and are kept as they are; remove their folders, such as {run}, to train "
            "them again."
        )
    objects = [
        run for run, ended in zip(begun, finished, strict=True) if ended and not planned[run].variant.name
    ]
    if objects:
        warn(
            f"{len(objects)} of {len(begun)} runs in {folder} have finished and are kept; edits of a "
            f"method that is an object are not seen: remove folders, such as {objects[0]}, to train again."
        )
    kept = sum(other and ended for other, ended in zip(others, finished, strict=True))
    if kept:
        warn(
            f"{kept} of {len(begun)} runs in {folder} have finished with another version of jaxfl and are "
            "kept as they are; choose another --run-dir to compute them again."
        )
    if sum(others) > kept:
        warn(
            f"jaxfl has changed since {sum(others) - kept} of {len(begun)} runs in {folder} were computed; "
            "their results say from which round on this version computes them."
        )
