"""The runs of a comparison before anything is trained: which there are, and whether their folder fits.

Several machines may each train a part of them.
"""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxfl.config.asked import read_options
from jaxfl.config.command_options import Seeds
from jaxfl.config.options import declared
from jaxfl.config.setup import Setup
from jaxfl.config.values import text
from jaxfl.errors import JaxflError
from jaxfl.folder import code, several_runs, store
from jaxfl.folder.config import described, experiment, moved
from jaxfl.folder.variant import Variant, own_setup

Item = TypeVar("Item")


class Planned(NamedTuple):
    """A run to start or continue."""

    variant: Variant
    setup: Setup  # the run's options
    done: int = 0  # number of rounds after which it continues; 0 for a new run
    further: bool = False
    """Whether it goes on to its last round, past a target, or patience, that has ended it."""


Runs = dict[Path, Planned]  # by folder


def plan(folder: Path, variants: Sequence[Variant], setup: Setup, seeds: Seeds) -> Runs:
    """Return a comparison's runs: every variant with every seed on every partition, see `compare`."""
    first, first_partition = setup.run.seed, setup.partition.partition_seed
    drawn = range(first, first + seeds.seeds)
    divided = range(first_partition, first_partition + seeds.partition_seeds)
    last = {"seed": drawn[-1], "partition_seed": divided[-1]}
    read_options("the comparison's last run", declared(Setup), last)

    def run_folder(label, seed, number):
        partition = f"-partition-{number}" if number != first_partition else ""
        return folder / store.file_name(label) / f"seed-{seed}{partition}"

    return {
        run_folder(variant.label, seed, number): Planned(
            variant, own_setup(setup, variant).replace(seed=seed, partition_seed=number)
        )
        for number in divided
        for seed in drawn
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
    return store.holds(run, store.CONFIG) and not _differing(run, entry).keys() <= {"rounds"}


def require_own(run: Path, entry: Planned) -> None:
    """Refuse a run that another command has made meanwhile, with other options than planned."""
    if is_other(run, entry):
        raise JaxflError(
            f"Another command has meanwhile made {run} with other options; repeat this one with another "
            "--run-dir."
        )


def is_shorter(run: Path, entry: Planned) -> bool:
    """Return whether a begun run is to have more rounds than it was begun for, or than it has ended with."""
    ended = entry.further and store.holds(run, store.RESULT)
    return ended or store.read_config(run)["options"]["rounds"] < entry.setup.run.rounds


def _differing(run: Path, entry: Planned) -> dict[str, tuple[Any, Any]]:
    """Return each option in which a run differs from the plan, with its values then and now."""
    begun = moved(run, store.read_config(run), code=True)
    beyond = begun.get("beyond_target", False)
    then, now = experiment(begun), experiment(described(*entry[:2]), beyond)
    both = {name: (then.get(name), now.get(name)) for name in now | then}
    return {name: (before, after) for name, (before, after) in both.items() if before != after}


def draw_in_words(entry: Planned, several: bool) -> str:
    """Return a run's seed in words, and its partition seed if there are several."""
    partition = f", partition seed {entry.setup.partition.partition_seed}" if several else ""
    return f"seed {entry.setup.run.seed}{partition}"


def sentences(planned: Runs, errors: Mapping[Path, JaxflError]) -> list[str]:
    """Say why runs do not finish: a sentence for each method and reason, with its seeds unless all."""
    several = len({entry.setup.partition.partition_seed for entry in planned.values()}) > 1
    number = Counter(entry.variant.label for entry in planned.values())
    alike = defaultdict(list)  # runs of a label whose sentences differ only in the folders
    for folder, error in errors.items():
        label = planned[folder].variant.label
        sentence = str(error).removeprefix(f"{label}: ")
        alike[label, sentence.replace(str(folder), "their folders")].append((folder, sentence))
    found = []
    for (label, shared), failed in alike.items():
        draws = "; ".join(draw_in_words(planned[folder], several) for folder, _ in failed)
        some = f" ({draws})" if len(failed) < number[label] else ""
        found.append(f"{label}{some}: {shared if len(failed) > 1 else failed[0][1]}")
    return found


def check_distinct(variants: Sequence[Variant]) -> None:
    """Refuse variants that are the same, or whose runs would share a folder."""
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
    try:
        store.check_free(folder)
    except JaxflError:  # runs may have begun, of another part at this moment, or been removed
        if not (several_runs.runs_in(folder) or store.holds(folder, store.COMMAND)):
            raise
    for run in several_runs.runs_in(folder):
        if run not in planned:
            if beside:
                continue
            raise JaxflError(
                f"{run} is not a run of this comparison; name its method and seed as well, or choose "
                "another --run-dir."
            )
        if differing := _differing(run, planned[run]):
            has, asked = store.read_config(run)["options"]["rounds"], planned[run].setup.run
            if differing.keys() == {"rounds"}:
                why = "cannot become shorter"
                if has < asked.rounds:
                    if not asked.stop_at_target and asked.patience is None:
                        continue
                    why = "may be ended by --patience or --stop-at-target, so no comparison makes it longer"
                raise JaxflError(
                    f"{run} has {has} rounds, not {asked.rounds}, and {why}; ask for {has} rounds, or choose "
                    "another --run-dir."
                )
            # More rounds alone would make it longer.
            name = min(differing, key=lambda name: name == "rounds" and has < asked.rounds)
            then, now = map(text, differing[name])
            raise JaxflError(
                f"{run} was begun with {name} {then}, not {now}; choose another --run-dir, repeat the "
                "command that began it, or finish this run alone with "
                f"`jaxfl resume {shlex.quote(str(run))}`."
            )


def check_code(folder: Path, planned: Runs, changed_code: bool, warn: Callable[[str], None]) -> None:
    """Refuse begun runs of changed user files, unless they may go on; warn of runs of other code."""
    begun = [run for run in several_runs.runs_in(folder) if run in planned]
    then = {run: code.latest(run, store.read_config(run), store.read_metrics(run)) for run in begun}
    if not changed_code:
        for run in begun:
            code.refuse_changed(run, then[run])
    others = {
        "another version of jaxfl": [run for run in begun if not code.same_package(then[run])],
        "another version of your code": [run for run in begun if code.changed(then[run])],
        "a method that is an object, whose edits are not seen": [
            run for run in begun if not planned[run].variant.name and has_finished(run, planned[run])
        ],
    }
    for what, runs in others.items():
        kept = [run for run in runs if has_finished(run, planned[run])]
        if kept:
            warn(
                f"{len(kept)} of {len(begun)} runs in {folder} have finished with {what}, and are kept as "
                f"they are; remove their folders, such as {kept[0]}, to train them again."
            )
        if len(runs) > len(kept):
            warn(
                f"{len(runs) - len(kept)} of {len(begun)} runs in {folder} were begun with {what}; their "
                "results say from which round on this version computes them."
            )


def labels_to_train(variants: Sequence[Variant], part: str, folder: Path | None) -> list[str]:
    """Return the labels of the variants that a part of a comparison trains, see `take_part`.

    Raises:
      JaxflError: if `part` is not one of several parts, or no folder is named that all of these share.
    """
    labels = take_part([variant.label for variant in variants], part)
    if folder is None and not part.endswith("/1"):
        raise JaxflError(f"--part {part}: name the folder that all parts share, with --run-dir.")
    return labels


def take_part(work: Sequence[Item], part: str) -> list[Item]:
    """Return the items of one part: of 2/8 every eighth one, from the second on.

    Raises:
      JaxflError: if `part` is not two such numbers.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(part))
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise JaxflError(f"--part {part!r} is not one of several parts; write 1/8 to 8/8 for eight of them.")
    return list(work[number - 1 :: count])
