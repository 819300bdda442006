"""Reports on finished runs: a table and pictures."""

import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.config import choices
from jaxfl.config.options import hints
from jaxfl.config.setup import Setup
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.config import at_own_default, experiment
from jaxfl.folder.moved_paths import moved
from jaxfl.machine import files
from jaxfl.results.measures import measure, names_of_classes
from jaxfl.results.paired import UNPAIRED, Draw, label_of, notes_on, paired
from jaxfl.results.result import OTHER_DATA, notes_on_selected, selected
from jaxfl.results.row_scores import CONFUSION, confusion_csv
from jaxfl.results.table import (
    Table,
    as_csv,
    as_latex,
    as_markdown,
    notes_on_code,
    notes_on_untrained,
    tabulate,
    untrained,
)
from jaxfl.results.target import by_target, check_targets
from jaxfl.results.tuned import apart, best_of, check_tuned, notes_on_tuned


def report(
    folders: Sequence[Path],
    out: Path,
    show: Sequence[str] = (),
    target: Sequence[float] = (),
    against: str | None = None,
    notes: Sequence[str] = (),
    pictures: str = "png",
    select: str = "last",
    hide: Collection[str] = (),
    tune: Sequence[str] = (),
) -> Table:
    """Tabulate and plot finished runs.

    Args:
      folders: run folders, or folders that contain some.
      out: where table.csv, .md, .tex and the pictures are written.
      show: further columns, see `jaxfl.results.table.tabulate`; also drawn.
      target: accuracies, for what runs have spent until they reached them; the runs need not have been given
        them as targets.
      against: a label of the table. A further column shows how much more accurate the others are, in pairs
        of the same seed and partition, see `jaxfl.results.paired`.
      notes: further sentences under the table.
      pictures: their format, "png", "pdf" or "svg".
      select: the evaluation that the accuracies are of, see `jaxfl.results.result.selected`.
      hide: usual columns to leave out, see `jaxfl.results.table.tabulate`.
      tune: options; of the labels that differ only in these, the best one stays, see `jaxfl.results.tuned`.

    Raises:
      JaxflError: if a target is no accuracy, a folder has no finished run, a run is damaged, two differ only
        in their folders, `against` is in no row or has other partitions than another row, or the table
        cannot be written.
    """
    from jaxfl.results import plot  # here, so that commands without plots do not wait for it

    check_targets(target)
    table, metrics, results = _tabulated(folders, show, target, against, select, hide, tune)
    table = table._replace(notes=(*table.notes, *notes))
    words, matrices = names_of_classes([result for _, result in results]), _confused(results, show)
    forms = {"table.csv": as_csv, "table.md": as_markdown, "table.tex": as_latex}
    texts = {name: form(table) for name, form in forms.items()}
    texts |= {"confusion.csv": confusion_csv(matrices, words)} if matrices else {}
    files.write_texts(out, texts)
    drawn = {"curves": plot.draw_curves, "loss": plot.draw_loss, "architectures": plot.draw_architectures}
    drawn |= {"metrics": partial(plot.draw_metrics, shown=show, class_names=words), "bytes": plot.draw_bytes}
    drawn["confusion"] = lambda _: plot.draw_confusion(matrices, words)
    files.write_pictures(out, {f"{name}.{pictures}": partial(draw, metrics) for name, draw in drawn.items()})
    return table


def table_of(folder: Path, against: str | None = None) -> Table | None:
    """Return the table of the finished runs in a folder, as `report` makes it; None if there are none.

    Its targets are those that the runs were given, and its accuracies of the evaluation that a comparison in
    the folder chose when it ended.

    Raises:
      JaxflError: if a run is damaged, two differ only in their folders, or `against` is in no row.
    """
    if not store.finished_below(folder):
        return None
    asked = [store.read_config(run)["options"].get("target", ()) for run in store.finished_in([folder])]
    end, targets = store.end_of(folder), list(dict.fromkeys(itertools.chain(*asked)))
    select, tune = end.get("select", "last"), end.get("tune", ())
    return _tabulated([folder], (), targets, against, select, tune=tune)[0]


def _tabulated(
    folders: Sequence[Path],
    show: Sequence[str],
    target: Sequence[float],
    against: str | None,
    select: str = "last",
    hide: Collection[str] = (),
    tune: Sequence[str] = (),
) -> tuple[Table, dict[str, list], list[tuple[str, dict]]]:
    """Return the table of all finished runs in some folders, their metrics by label, and labelled results."""
    runs = store.finished_in(list(folders))
    configs = [moved(run, store.read_config(run), code=True) for run in runs]
    draws = [(config["options"]["seed"], config["options"]["partition_seed"]) for config in configs]
    repeated = _crossed([experiment(config) for config in configs], draws)
    labels = _labels(configs, ("partition_seed",) if repeated else ())
    results, metrics, by_draw, folder_of = [], {}, {}, {}
    for folder, label, draw in zip(runs, labels, draws, strict=True):
        result, of_run = store.read_finished(folder)
        result = selected(result, of_run, select)
        same = folder_of.setdefault(label, {}).setdefault(draw, folder)
        if same != folder:
            if result["accuracy"] == by_draw[label][draw]["accuracy"]:  # settings of a study can share runs
                continue
            raise JaxflError(f"{folder} and {same} are both {label} with the same seed; report one of them.")
        results.append((label, result | {"targets": by_target(of_run, target)}))
        metrics.setdefault(label, []).append(of_run)
        by_draw.setdefault(label, {})[draw] = result
    notes = notes_on_selected(select, (result for _, result in results))
    if tune:
        check_tuned(tune, itertools.chain(*(choices.split(label)[1] for label in by_draw)))
        grid = {label: apart(label, tune) for label in by_draw}
        stay = best_of(grid, by_draw)
        notes += notes_on_tuned({method: grid[label][1] for label, method in stay.items()})
        results = [(stay[label], result) for label, result in results if label in stay]
        metrics, by_draw, folder_of = (
            {method: of_label[label] for label, method in stay.items()}
            for of_label in (metrics, by_draw, folder_of)
        )
    notes += _of_partitions(runs, [partition_seed if repeated else 0 for _, partition_seed in draws])
    notes += _of_spread({label: list(of_label) for label, of_label in by_draw.items()}, repeated)
    notes += notes_on_code({label: list(of_label.values()) for label, of_label in by_draw.items()})
    notes += notes_on_untrained([untrained(of_run) for of_label in metrics.values() for of_run in of_label])
    if unfinished := store.unfinished_in(folders):
        number = "1 run has" if len(unfinished) == 1 else f"{len(unfinished)} runs have"
        notes.append(f"Left out: {number} not finished; the first is {unfinished[0]}.")
    table = tabulate(results, show, hide)
    table = table._replace(notes=(*table.notes, *notes))
    if against is not None:
        against = label_of(against, folder_of)
        _check_partitions(against, folder_of)
        table = _compared(table, against, by_draw)
    return table, metrics, results


def _confused(results: Sequence[tuple[str, dict]], show: Sequence[str]) -> dict[str, list[list[float]]]:
    """Return the confusion matrix of each label, the mean over its runs, if they are to be shown."""
    matrices = {}
    for label, result in results if CONFUSION in show else ():
        if found := result["accuracy"].get(CONFUSION):
            matrices.setdefault(label, []).append(found)
    return {label: np.mean(of_runs, axis=0).tolist() for label, of_runs in matrices.items()}


def _of_spread(draws: Mapping[str, list[Draw]], repeated: bool) -> list[str]:
    """Return a note that says what ± is over, if the table has it.

    Args:
      draws: seeds and partition seeds of each label.
      repeated: whether every label has every seed on every partition.
    """
    numbers = {label: len(of_label) for label, of_label in draws.items()}
    if max(numbers.values()) == 1:
        return []
    what = "Mean and sample standard deviation over"
    if repeated:
        seeds, partitions = (len(set(of_all)) for of_all in zip(*next(iter(draws.values())), strict=True))
        return [f"{what} {partitions} partitions with {seeds} seed{'s' if seeds > 1 else ''} each."]
    if len(set(numbers.values())) == 1:
        return [f"{what} {max(numbers.values())} seeds."]
    return [f"{what} the seeds available: {'; '.join(f'{n} of {label}' for label, n in numbers.items())}."]


def _compared(table: Table, against: str, by_draw: Mapping[str, Mapping[Draw, dict]]) -> Table:
    """Return the table with a column after the accuracies: how far they are above those of one label.

    Args:
      table: table of all labels.
      against: the label to compare with.
      by_draw: results of each label by seed and partition seed.
    """
    accuracy = measure("accuracy")
    differences = {
        label: paired(results, by_draw[against], accuracy.value, accuracy.of_clients)
        if label != against
        else UNPAIRED
        for label, results in by_draw.items()
    }
    lonely = [label for label, difference in differences.items() if not difference.pairs and label != against]
    notes = notes_on(against, differences)
    notes += [f"{label} and {against} have no seed in common: nothing can be paired." for label in lonely]
    first, *others = table.titles
    rows = [(label, [cells[0], differences[label], *cells[1:]]) for label, cells in table.rows]
    titles = [first, f"minus {against}", *others]
    return table._replace(titles=titles, rows=rows, notes=(*table.notes, *notes))


def _check_partitions(against: str, folders: Mapping[str, Mapping[Draw, Path]]) -> None:
    """Refuse to pair runs on different partitions.

    Args:
      against: the label that others are compared with.
      folders: folder of the run of each label and draw.

    Raises:
      JaxflError: naming two runs.
    """
    others = folders[against]
    for of_label in folders.values():
        pairs = [(draw, draw) for draw in of_label.keys() & others.keys()]
        # If no draw is common, compare runs of one seed: their partitions may differ.
        pairs = pairs or [(one, two) for one, two in itertools.product(of_label, others) if one[0] == two[0]]
        for one, two in sorted(pairs):
            if store.checksums(of_label[one]) != store.checksums(others[two]):
                raise JaxflError(
                    f"{of_label[one]} and {others[two]} have different data or partitions and cannot be "
                    "paired; report runs of one partition, or leave --against out."
                )


def _crossed(experiments: list[dict], draws: list[tuple[int, int]]) -> bool:
    """Return whether there are several partition seeds, each with each seed in every experiment.

    Args:
      experiments: experiment of each run, see `jaxfl.folder.config.experiment`.
      draws: seed and partition seed of each run.
    """
    of_experiments = {}
    for of_run, draw in zip(experiments, draws, strict=True):
        tried = json.dumps(of_run | {"partition_seed": None}, sort_keys=True)
        of_experiments.setdefault(tried, set()).add(draw)
    seeds, partition_seeds = map(set, zip(*draws, strict=True))
    every = set(itertools.product(seeds, partition_seeds))
    return len(partition_seeds) > 1 and all(draws_there == every for draws_there in of_experiments.values())


def _of_partitions(runs: list[Path], draws: list[int]) -> list[str]:
    """Return a note if runs have different data or rows that should be the same.

    Args:
      runs: folders of the runs.
      draws: a number per run, equal for runs that must have the same partition.
    """
    partitions, data = {}, set()
    for run, draw in zip(runs, draws, strict=True):
        of_data, of_rows = store.checksums(run)
        partitions.setdefault(draw, set()).add(of_rows)
        data.add(of_data)
    if len(data) > 1:
        return [OTHER_DATA]
    if any(len(found) > 1 for found in partitions.values()):
        return ["These runs have different partitions: their accuracies are comparable on average only."]
    return []


def _labels(configs: list[dict], repeated: Sequence[str] = ()) -> list[str]:
    """Return the runs' labels, with the options that distinguish them.

    Seeds and `repeated` options are left out, because they are averaged. Options that all methods have are
    shown if two runs differ in them, unless a run has its method's own default. A method's own options are
    shown if two runs of one label differ in them.
    """
    experiments = [
        {name: value for name, value in experiment(config).items() if name not in repeated}
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
    shared = {*hints(Setup), *hints(Training)}

    def differs(run: int, name: str) -> bool:
        """Return whether a run has another value than one whose label does not show that already."""
        return any(
            other_experiment.get(name) != experiments[run][name]
            for label, other_experiment, of_other in zip(first, experiments, known, strict=True)
            if label == first[run] or (name in shared and name not in known[run] | of_other)
        )

    def options_of(run: int) -> list[str]:
        return [
            f"{name}={_in_label(value, [its.get(name) for its in experiments])}"
            for name, value in experiments[run].items()
            if name not in given[run] and differs(run, name)
        ]

    return [",".join([label, *options_of(run)]) for run, label in enumerate(first)]


def _in_label(value: Any, all_values: Sequence[Any]) -> str:
    """Return an option's value for a label: paths without the folders common to those of all runs."""
    own, *others = (map(str, each if isinstance(each, list) else [each]) for each in (value, *all_values))
    folders = [os.path.dirname(entry) for entry in itertools.chain(*others) if os.path.isabs(entry)]
    common = os.path.join(os.path.commonpath(folders), "") if folders else ""
    return "+".join(entry.removeprefix(common) for entry in own) or "none"
