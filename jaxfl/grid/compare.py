"""Comparison of methods on one federation: same partition, cohorts and initial weights, several seeds."""

import dataclasses
import itertools
import shlex
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxfl.config import choices
from jaxfl.config.asked import make
from jaxfl.config.command_options import Columns, Continuation, Seeds, View
from jaxfl.config.setup import Setup, is_saved
from jaxfl.deployed.load import load as open_run
from jaxfl.errors import JaxflError
from jaxfl.folder import several_runs, store
from jaxfl.folder.config import described, restore
from jaxfl.folder.owner import in_turn, is_owned
from jaxfl.folder.variant import Variant, provided
from jaxfl.grid.comparison import Comparison, by_label
from jaxfl.grid.execute import Watched, execute, require_validation
from jaxfl.grid.plan import (
    Planned,
    Runs,
    check_code,
    check_distinct,
    check_folder,
    draw_in_words,
    has_finished,
    plan,
    sentences,
)
from jaxfl.grid.resolve import seed_draws
from jaxfl.grid.run import continued
from jaxfl.machine import files
from jaxfl.machine.environment import environment
from jaxfl.machine.processes import agree
from jaxfl.results.paired import label_of, matching_label
from jaxfl.results.report import report
from jaxfl.results.table import Table
from jaxfl.results.tuned import check_tuned, differing, label_without
from jaxfl.runs.interrupt import Interrupted, limited, reason
from jaxfl.runs.log import Log
from jaxfl.runs.observer import Terms


def compare(
    variants: Sequence[Variant],
    setup: Setup,
    seeds: Seeds,
    columns: Columns,
    folder: Path | None,
    terms: Terms,
    *,
    beside: bool = False,
    only: Collection[str] | None = None,
) -> Comparison:
    """Start or continue all runs, and write a table and pictures of those that finish.

    Runs that differ only in seeds and rates share a program where possible, and runs with fewer rounds go on
    to as many. `against` names a variant, without what is tuned; the differences from it are shown once all
    of its runs have finished, see `jaxfl.results.paired`. With `beside` the folder may hold other runs, which
    stay unchanged and are in no table. If labels are given, `only` these variants are trained; other
    processes train the rest, and the table has what all of them have finished.

    Raises:
      JaxflError: if a method is named twice, an option does not fit, the data are not available, `against`
        is none of the methods, the folder holds anything else, or runs of changed user files, another process
        was given something else to compare, a run's configuration is damaged, or the table cannot be written.
        A run that fails, and a partition that is impossible, do not end the others.
      Interrupted: if stopped early, after the rounds in progress are saved; see `jaxfl.runs.interrupt`.
    """
    if seeds.partition_seeds > 1 and is_saved(setup.partition.partition) and not seed_draws(setup):
        raise JaxflError(
            f"--partition-seeds does not change the saved {setup.partition.partition}; leave it out."
        )
    tune, observer = columns.tune, terms.observer
    check_tuned(tune, itertools.chain(*(choices.split(variant.label)[1] for variant in variants)))
    if columns.against is not None:
        alike = [each._replace(label=label_without(each.label, tune)) for each in variants]
        columns = dataclasses.replace(columns, against=_named(columns.against, alike))
    follow, setup = Log(terms.log), provided(setup, variants)
    validates = "--select validation" if columns.select == "validation" else "--tune" if tune else None
    if validates and not is_saved(setup.partition.partition):
        require_validation(validates, bool(setup.partition.validation_fraction))
    folder = folder or store.free_folder("compare", setup.data.dataset)
    planned = plan(folder, variants, setup, seeds)
    check_distinct(variants)
    mine = {run: entry for run, entry in planned.items() if only is None or entry.variant.label in only}
    runs = [(run.absolute(), described(*entry[:2]), run in mine) for run, entry in planned.items()]
    agree("options", (runs, beside, terms.changed_code))
    check_folder(folder, planned, beside)
    check_code(folder, mine, terms.changed_code, observer.warned)

    def watch(run, new, kept=False):
        entry, tell = mine[run], observer.kept if kept else observer.progressed
        tell(f"{entry.variant.label}, {draw_in_words(entry, seeds.partition_seeds > 1)}", new)
        if not kept:  # a run that had finished was logged then
            follow(run, new)

    asked = {
        **vars(seeds),
        **vars(columns),
        "beside": beside,
        "methods": [described(variant, setup) for variant in variants],
        "environment": environment() | {"folder": str(folder.resolve())},
    }
    if not mine:
        observer.said("All methods are left to other parts.")
    with follow, limited(terms.max_seconds):
        try:
            keep = partial(several_runs.keep_command, folder, asked)
            told = Watched(watch, observer)
            errors = execute(mine, told, beside=planned, validates=validates, prepared=keep)
        except Interrupted as stopped:
            done = sum(store.holds(run, store.RESULT) for run in planned)
            raise Interrupted(
                f"The comparison in {folder} has stopped with {done} of {len(planned)} runs finished"
                f"{reason(stopped.code)}; continue with `jaxfl resume {shlex.quote(str(folder))}`.",
                stopped.code,
            ) from None
    with in_turn(folder):
        finished = [run for run, entry in planned.items() if _has_ended(run, entry)]
        failures = sentences(mine, {run: e for run, e in errors.items() if run not in finished})
        view = View(**vars(columns), show=setup.machine.show, target=setup.run.target)
        table = _conclude(folder, planned, finished, mine, failures, view)
    objects = {run: entry.variant for run, entry in planned.items() if entry.variant.name is None}
    opened = [
        dataclasses.replace(open_run(run, terms.changed_code), variant=objects.get(run))
        for run in planned
        if store.holds(run, store.CONFIG) and (run in finished or not store.holds(run, store.RESULT))
    ]
    if not opened:
        several_runs.discard_command(folder)
    return Comparison(folder, table, by_label(opened), failures)


def resume(folder: Path, changed: Continuation, terms: Terms) -> Comparison:
    """Go on with a comparison as its folder says that it was asked for.

    Raises:
      JaxflError: if the folder does not say that, a method is an object without a name, or as in `compare`.
    """
    asked: dict[str, Any] = {**several_runs.read_command(folder)}
    where = {"environment": asked["environment"]}
    methods = [restore(folder, where | method, terms.changed_code) for method in asked["methods"]]
    setup, variants = continued(methods[0][0], changed), [variant for _, variant in methods]
    seeds, columns = make(Seeds, whose := str(folder / store.COMMAND), asked), make(Columns, whose, asked)
    return compare(variants, setup, seeds, columns, folder, terms, beside=asked["beside"])


def _has_ended(run: Path, entry: Planned) -> bool:
    """Return whether a run has finished with all rounds planned, and can be read."""
    try:
        return has_finished(run, entry) and bool(store.read_finished(run))
    except JaxflError:
        return False


def _conclude(
    folder: Path,
    planned: Runs,
    finished: Sequence[Path],
    mine: Runs,
    failures: list[str],
    view: View,
) -> Table | None:
    """Write the table and the pictures of the finished runs, and how the comparison ended."""
    notes = [f"Left out: {failure}" for failure in failures]
    elsewhere = planned.keys() - mine.keys() - set(finished)
    if elsewhere:
        notes.append(f"Not finished, left to other parts: {len(elsewhere)} of {len(planned)} runs.")
    if view.against is not None and view.against not in _complete_labels(planned, finished, view.tune):
        notes.append(f"Nothing is compared with {view.against}: not all runs have finished.")
        view = dataclasses.replace(view, against=None)
    there = differing(view.tune, (planned[run].variant.label for run in finished))
    table = report(finished, folder, dataclasses.replace(view, tune=there), notes) if finished else None
    # Where another process is at work, the comparison has not ended.
    at_work = any(is_owned(run) for run in planned if run not in finished)
    if several_runs.runs_in(folder) and not at_work:
        order = list(dict.fromkeys(run.parent.name for run in planned))
        end = {"runs": len(planned), "finished": len(finished), "failures": failures, "order": order}
        end |= {"select": view.select, "tune": view.tune}
        files.write_json(folder / store.END, end)
    return table


def _named(against: str, variants: Sequence[Variant]) -> str:
    """Return the label of the variant to compare with, given its label or its command-line name."""
    labels = {variant.label: choices.split(variant.label)[1] for variant in variants}
    in_files = {
        choices.join(variant.name, labels[variant.label]): variant.label
        for variant in variants
        if variant.name
    }
    found = matching_label(choices.absolute(against), in_files)
    return in_files[found] if found else label_of(against, labels)


def _complete_labels(planned: Runs, finished: Sequence[Path], tune: Sequence[str]) -> set[str]:
    """Return the labels, without what is tuned, whose runs have all finished.

    On several partitions there are none if another label has finished only some of its runs.
    """
    labels = {run: label_without(entry.variant.label, tune) for run, entry in planned.items()}
    left = {label for run, label in labels.items() if run not in finished}
    ended = {labels[run] for run in finished}
    several = len({entry.setup.partition.partition_seed for entry in planned.values()}) > 1
    return set() if several and left & ended else ended - left
