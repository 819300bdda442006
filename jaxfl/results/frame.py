"""The frame: finished runs, each with its method, setting and seeds, of which all tables are made."""

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.config import choices
from jaxfl.config.options import declared
from jaxfl.config.setup import PartitionOptions, Setup, is_saved
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.folder import several_runs, store
from jaxfl.folder.config import at_own_default, experiment, moved
from jaxfl.folder.records import Config, Result, Round
from jaxfl.results.result import selected
from jaxfl.results.target import by_target

Setting = tuple[tuple[str, str], ...]  # axes of a study, each with a value in words: (("lr", "lr=0.1"),)
Case = tuple[str, Setting]  # a method in a setting
Draw = tuple[int, int]  # a run's seed and partition seed


class Entry(NamedTuple):
    """A finished run, an entry of the frame."""

    method: str  # label in a report; in a study the method as its file names it
    setting: Setting  # values along the axes of a study; nothing in a report
    draw: Draw  # seed and partition seed
    result: Result  # the content of result.json, with the accuracies of a selected evaluation
    metrics: list[Round]  # that of metrics.jsonl
    untrained: tuple[list[int], int]  # ids of clients with a score but no loss, and how many have a score
    sums: tuple[Any, Any]  # checksums of data set and partition, see `jaxfl.folder.store.checksums`
    folder: Path  # where it is


Frame = Sequence[Entry]


def words(case: Case) -> str:
    """Return a method and its setting in words."""
    method, setting = case
    return f"{method} {','.join(value for _, value in setting)}".rstrip()


def by_case(frame: Frame) -> dict[Case, dict[Draw, Entry]]:
    """Return runs by method and setting, and by their draws, in the order in which these first appear."""
    found = {}
    for run in frame:
        found.setdefault((run.method, run.setting), {})[run.draw] = run
    return found


def finished_run(
    folder: Path,
    draw: Draw,
    method: str,
    setting: Setting = (),
    target: Sequence[float] = (),
    select: str = "last",
) -> Entry:
    """Read a finished run as an `Entry`.

    Its result says what was spent until each `target` was reached. Its accuracies are of the evaluation that
    `select` names, see `jaxfl.results.result.selected`.

    Raises:
      JaxflError: if it is damaged, or has no validation rows to select by.
    """
    result, metrics = store.read_finished(folder)
    result: Result = {**selected(result, metrics, select), "targets": by_target(metrics, target)}
    return Entry(method, setting, draw, result, metrics, untrained(metrics), store.checksums(folder), folder)


def untrained(metrics: list[Round]) -> tuple[list[int], int]:
    """Return which clients of a run are scored but have a loss in no round, and how many are scored."""
    known = {i for i, share in enumerate(metrics[-1]["accuracy"]["per_client"]) if share is not None}
    told = (zip(record["clients"], record["client_loss"], strict=True) for record in metrics)
    trained = {client for of_round in told for client, loss in of_round if loss is not None}
    return sorted(known - trained), len(known)


def read(folders: Sequence[Path], target: Sequence[float] = (), select: str = "last") -> Frame:
    """Read all finished runs in some folders or below, with labels that distinguish them.

    `target` and `select` are those of `finished_run`.

    Raises:
      JaxflError: if a folder has no finished run, a run is damaged, or two differ only in their folders and
        accuracies.
    """
    folders = several_runs.finished_in(list(folders))
    configs = [moved(folder, store.read_config(folder), code=True) for folder in folders]
    draws = [(config["options"]["seed"], config["options"]["partition_seed"]) for config in configs]
    crossed = _crossed([experiment(config) for config in configs], draws)
    found: dict[tuple[str, Draw], Entry] = {}
    for folder, label, draw in zip(folders, labels(configs, crossed), draws, strict=True):
        run = finished_run(folder, draw, label, (), target, select)
        same = found.setdefault((label, draw), run)
        if same.result["accuracy"] != run.result["accuracy"]:  # else settings of a study have shared them
            raise JaxflError(
                f"{folder} and {same.folder} are both {label} with the same seed; report one of them."
            )
    return alike_in_data([*found.values()])


def alike_in_data(frame: Frame) -> Frame:
    """Return runs told apart by their images only if all know their checksum, else by labels alone."""
    if all(images is not None for (_, images), _ in (run.sums for run in frame)):
        return frame
    return [run._replace(sums=((run.sums[0][0], None), run.sums[1])) for run in frame]


def _crossed(experiments: list[dict], draws: list[Draw]) -> bool:
    """Return whether there are several partition seeds, each with each seed in every experiment."""
    tried = [of_run | {"partition_seed": None} for of_run in experiments]
    found = {}
    for of_run, draw in zip(tried, draws, strict=True):
        found.setdefault(tried.index(of_run), set()).add(draw)  # 1 and 1.0 are equal
    seeds, partition_seeds = map(set, zip(*draws, strict=True))
    every = set(itertools.product(seeds, partition_seeds))
    return len(partition_seeds) > 1 and all(there == every for there in found.values())


def labels(configs: Sequence[Config], crossed: bool = False) -> list[str]:
    """Return the runs' labels, with the options that distinguish them.

    Seeds are left out, because they are averaged, and partition seeds `crossed` with them. Options that all
    methods have are shown if two runs differ in them, unless a run has its method's own default. A method's
    own options are shown if two runs of one label differ in them.
    """
    averaged = {"partition_seed"} if crossed else set()
    experiments = [
        {name: value for name, value in experiment(config).items() if name not in averaged}
        for config in configs
    ]
    # Runs that differ only in their seeds share the label of the first.
    first = [configs[experiments.index(of_run)]["label"] for of_run in experiments]
    outside = [re.sub(r"=\[.*?\](?=,|$)", "=", label) for label in first]  # options of values do not count
    given = [{*re.findall(r",(\w+)=", label)} for label in outside]  # a value may have commas
    # The graph does not distinguish methods that use no links.
    unlinked = [{"topology"} if options.get("topology") == "none" else set() for options in experiments]
    known = [
        options | at_own_default(config) | without
        for options, config, without in zip(given, configs, unlinked, strict=True)
    ]
    shared = {*declared(Setup), *declared(Training)}
    # A saved partition has its own of these.
    divided = {*declared(PartitionOptions), "public"} - {"partition"}
    settled = [divided if is_saved(options["partition"]) else set() for options in experiments]

    def differs(run: int, name: str) -> bool:
        """Return whether a run has another value than one whose label does not show that already."""
        return any(
            other_experiment.get(name) != experiments[run][name]
            for label, other_experiment, of_other, saved in zip(
                first, experiments, known, settled, strict=True
            )
            if name not in settled[run] ^ saved
            and (label == first[run] or (name in shared and name not in known[run] | of_other))
        )

    def shown(run: int) -> dict[str, str]:
        return {
            name: _in_label(value, [its.get(name) for its in experiments])
            for name, value in experiments[run].items()
            if name not in given[run] and differs(run, name)
        }

    return [choices.join(label, shown(run)) for run, label in enumerate(first)]


def _in_label(value: Any, all_values: Sequence[Any]) -> str:
    """Return an option's value for a label: paths without the folders common to those of all runs."""
    own, *others = (map(str, each if isinstance(each, list) else [each]) for each in (value, *all_values))
    entries = {*itertools.chain(*others)}
    paths = [*filter(os.path.isabs, entries)]
    common = os.path.join(os.path.commonpath(map(os.path.dirname, paths)), "") if paths else ""
    if not entries.isdisjoint(path.removeprefix(common) for path in paths):  # names of something else
        common = ""
    return "+".join(entry.removeprefix(common) for entry in own) or "none"
