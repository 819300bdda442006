"""Studies: methods under several settings, described in one file, with a table of results by setting.

A setting is one value of every axis. Its runs are a comparison in its own folder, so what is true of
comparisons is true here: finished runs are kept, begun ones go on, a run that fails does not end the others.
"""

import itertools
import shlex
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.given import divide
from jaxfl.config.options import as_path, hints
from jaxfl.config.setup import Setup
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine import files
from jaxfl.runs import store
from jaxfl.runs.compare import check_distinct, compare, is_begun, plan
from jaxfl.runs.interrupt import Interrupted, deferred, limited, reason
from jaxfl.runs.observer import ONLY_WARNINGS, Observer
from jaxfl.runs.paired import UNPAIRED, Draw, matching_label, notes_on, paired
from jaxfl.runs.prepare import check_setup
from jaxfl.runs.table import Cell, Measure, Table, as_csv, as_latex, as_markdown, cell, measure
from jaxfl.runs.target import by_target
from jaxfl.runs.variant import Variant, choose, provided

METHOD = "method"  # the axis that every study has
SHOW = "show"  # and the one of studies that show several things
MOST_NAMED = 6  # cells in a note that lists some


class Study(NamedTuple):
    """The content of a study's file.

    Args:
      title: title of the study.
      claim: what the study is to show, in a line.
      methods: choices of methods, with options.
      options: options of every run, by name.
      axes: further options by name, each with its values.
      seeds: number of repetitions of every run.
      partition_seeds: number of repetitions of all of that, on other divisions of the data.
      columns: the axis whose values are the table's columns; may be `METHOD` or, if several things are shown,
        `SHOW`.
      show: what the table shows, see `jaxfl.runs.table.measure`.
      against: the method with which the others are compared in further columns, see `jaxfl.runs.paired`.
    """

    title: str
    methods: tuple[str, ...]
    claim: str = ""
    options: Mapping[str, Any] = {}
    axes: Mapping[str, list] = {}
    seeds: int = 1
    partition_seeds: int = 1
    columns: str = METHOD
    show: tuple[str, ...] = ("accuracy",)
    against: str = ""


class Cells(NamedTuple):
    """The results of a study so far.

    Args:
      study: the study.
      results: results by setting (a text of its values) and choice of a method, then by seed and partition
        seed.
    """

    study: Study
    results: dict[tuple[str, str], dict[Draw, dict]]


def read(path: str | Path) -> Study:
    """Read a study from a TOML file.

    Raises:
      JaxflError: naming what the file lacks, or has too much of, or what is not an option or a value of it.
    """
    path = as_path(path)
    said = _read_toml(path)
    for name in said:
        if name not in Study._fields:
            raise JaxflError(f"{path}: there is no {name!r} in a study; {nearest(name, Study._fields)}")
    axes, options = said.get("axes", {}), said.get("options", {})
    kinds = {"methods": list, "options": dict, "axes": dict, "seeds": int, "partition_seeds": int, SHOW: list}
    if isinstance(said.get(SHOW), str):
        said[SHOW] = [said[SHOW]]
    for name, value in said.items():
        kind = kinds.get(name, str)
        if type(value) is not kind:
            raise JaxflError(f"{path}: {name} must be of type {kind.__name__}.")
        if kind is str:  # a note of a table is one line
            said[name] = " ".join(value.split())
    if not said.get("methods") or not all(isinstance(choice, str) for choice in said["methods"]):
        raise JaxflError(f'{path} names no methods; write methods = ["fedavg", "fedper"].')
    for name in ("seeds", "partition_seeds"):
        if said.get(name, 1) < 1:
            raise JaxflError(f"{path}: {name} must be at least 1, not {said[name]}.")
    if both := [name for name in axes if name in options]:
        raise JaxflError(f"{path}: {both[0]} is an option and an axis; leave it out of one.")
    for name, values in axes.items():
        if not isinstance(values, list) or not values:
            raise JaxflError(f"{path}: the axis {name} is not a list of values; write {name} = [..., ...].")
    shown = tuple(said.setdefault(SHOW, ["accuracy"]))
    if not shown or not all(isinstance(name, str) for name in shown):
        raise JaxflError(f'{path} shows nothing; write show = "accuracy" or show = ["accuracy", "received"].')
    for name, values in {"methods": said["methods"], SHOW: shown, **axes}.items():
        # By the names of their folders.
        of_values = [store.file_name(setting_name({name: value})) for value in values]
        for i, value in enumerate(values):
            if of_values[i] in of_values[:i]:
                raise JaxflError(f"{path}: {name} has {value} twice; write it once.")
    known = (METHOD, *axes, *([SHOW] if len(shown) > 1 else []))
    columns = said.setdefault("columns", SHOW if SHOW in known else next(reversed(axes), METHOD))
    if columns not in known:
        raise JaxflError(f"{path}: there is no axis {columns!r}; {nearest(columns, known)}")
    study = Study(path.stem, tuple(said.pop("methods")))._replace(**(said | {SHOW: shown}))
    for name in shown:
        measure(name)
    if study.against:
        against = matching_label(study.against, study.methods)
        if against is None:
            raise JaxflError(
                f"{path}: no method {study.against!r} is compared; {nearest(study.against, study.methods)}"
            )
        study = study._replace(against=against)
    for choice, name in itertools.product(study.methods, axes):
        if name in choices.split(choice)[1]:
            raise JaxflError(f"{path}: {choice} sets {name}, which is also an axis; leave it out of one.")
    for setting in settings(study):
        variants, setup = _planned(study, setting)
        check_distinct(variants)
        if not setup.run.target and (names := [*filter(_to_target, shown)]):
            raise JaxflError(
                f"{path} shows {names[0]}, but has no target; add target = [0.5] to its options."
            )
    return study


def usual_folder(path: Path) -> Path:
    """Return the default folder of a study's runs, named after the file and the folder that it is in.

    >>> str(usual_folder(Path("experiments/digits/label-skew.toml")))
    'runs/digits-label-skew'
    """
    beside = "" if path.parent == Path() else path.resolve().parent.name
    return Path("runs") / "-".join(filter(None, [beside, path.stem]))


def settings(study: Study) -> list[dict[str, Any]]:
    """Return every combination of the axes' values; a single empty one if there are no axes."""
    return [dict(zip(study.axes, values, strict=True)) for values in itertools.product(*study.axes.values())]


def setting_name(setting: Mapping[str, Any]) -> str:
    """Return a setting in words, which are also the name of its folder.

    >>> setting_name({"partition": "dirichlet,alpha=0.1", "models": ["mlp", "lenet5"]})
    'partition=dirichlet,alpha=0.1,models=mlp+lenet5'
    """
    texts = {name: "+".join(map(str, v)) if isinstance(v, list) else str(v) for name, v in setting.items()}
    return ",".join(f"{name}={text}" for name, text in texts.items())


def run(
    study: Study,
    folder: str | Path,
    *,
    part: tuple[int, int] = (1, 1),
    data_dir: str | Path | None = None,
    changed_code: bool = False,
    max_seconds: float | None = None,
    observer: Observer = ONLY_WARNINGS,
) -> tuple[Table | None, list[str]]:
    """Start or continue the runs of a study, and write its table and picture.

    Args:
      study: from `read`.
      folder: new folder, or that of the same study.
      part: (k, n): only every n-th setting, from the k-th on, so that several machines can divide a study.
        The table has what all of them have finished.
      data_dir: see `jaxfl.config.setup.MachineOptions`.
      changed_code: whether to go on although the user's own files have changed.
      max_seconds: time limit in seconds; the rounds done are saved.
      observer: callbacks for progress reports.

    Returns:
      The table of the finished runs, None if there are none; and why others have not finished.

    Raises:
      JaxflError: if there is no such part, `max_seconds` is not positive, or a table cannot be written.
      Interrupted: if stopped early, see `jaxfl.runs.interrupt`.
    """
    (number, parts), folder = part, as_path(folder)
    if parts < 1:
        raise JaxflError(f"--part {number}/{parts}: there must be at least one part.")
    if not 1 <= number <= parts:
        raise JaxflError(
            f"--part {number}/{parts} is not one of {parts} parts; write 1/{parts} to {parts}/{parts}."
        )
    everything, failures = settings(study), []
    if not store.holds(folder, store.STUDY) and not any(_folder(folder, its).exists() for its in everything):
        store.check_free(folder)
    mine = everything[number - 1 :: parts]
    if lacking := _without_axis(study):
        choice, axis = lacking[0]
        observer.warned(
            f"{choice} has no option {axis}, so its runs are the same along that axis, and all are computed; "
            f'to save them write methods with their options, methods = ["NAME,{axis}={study.axes[axis][0]}", '
            "...], in place of the axis."
        )
    with limited(max_seconds), deferred() as request:
        for done, setting in enumerate(mine, 1):
            its = f"{': ' * bool(setting)}{setting_name(setting)}"
            observer.said(f"{study.title}: setting {done} of {len(mine)}{its}")
            try:
                if stop := request.made:
                    raise Interrupted("", stop)
                variants, setup = _planned(study, setting)
                made = compare(
                    variants,
                    setup if data_dir is None else setup.replace(data_dir=as_path(data_dir)),
                    study.seeds,
                    _folder(folder, setting),
                    partition_seeds=study.partition_seeds,
                    changed_code=changed_code,
                    beside=True,  # runs of seeds and methods that the file no longer names
                    observer=observer,
                )
                said = made.failures
            except Interrupted as stopped:
                raise Interrupted(
                    f"The study in {folder} has stopped in setting {done} of {len(mine)}{its}"
                    f"{reason(stopped.code)}; repeat the command, with --run-dir "
                    f"{shlex.quote(str(folder))}, to continue.",
                    stopped.code,
                ) from None
            except JaxflError as error:  # it ends this setting; the others go on
                said = [str(error)]
            failures += [f"{setting_name(setting)}: {sentence}" if setting else sentence for sentence in said]
    cells = finished(study, folder)
    if not cells.results:
        if store.holds(folder, store.STUDY):
            observer.warned(
                f"{folder / store.STUDY} and the files beside it are from runs with other options."
            )
        return None, failures
    table = tabulate(cells)
    forms = {store.STUDY: as_csv, "study.md": as_markdown, "study.tex": as_latex}
    files.write_texts(folder, {name: form(table) for name, form in forms.items()})
    from jaxfl.runs import plot  # here: other commands need not wait for it

    if len(study.show) > 1:
        by_measure = tabulate(cells._replace(study=study._replace(columns=SHOW)))
        draw = partial(plot.draw_panels, by_measure, study.title)
    else:
        form = plot.draw_grid if (len(study.methods), len(study.axes)) == (1, 2) else plot.draw_table
        draw = partial(form, table, study.title, measures_of(study)[0].title)
    files.write_pictures(folder, {"study.png": draw})
    return table, failures


def _without_axis(study: Study) -> list[tuple[str, str]]:
    """Return the methods and axes, of two values or more, of which the method does not have the option."""
    shared = {*hints(Setup), *hints(Training)}
    return [
        (choice, axis)
        for choice, (axis, values) in itertools.product(study.methods, study.axes.items())
        if len(values) > 1 and axis not in shared and axis not in hints(registry.method(choice)[0].config)
    ]


def finished(study: Study, folder: Path) -> Cells:
    """Return the results of finished runs that were begun as the study plans them."""
    results = {}
    for setting in settings(study):
        variants, setup = _planned(study, setting)
        choice_of = {variant.label: choice for variant, choice in zip(variants, study.methods, strict=True)}
        try:
            setup = provided(setup, variants)
            planned = plan(_folder(folder, setting), variants, setup, study.seeds, study.partition_seeds)
        except JaxflError:  # it has ended this setting
            continue
        for run, its in planned.items():
            if is_begun(run, its) and store.holds(run, store.RESULT):
                result, metrics = store.read_finished(run)
                draw = its.setup.run.seed, its.setup.partition.partition_seed
                of_choice = results.setdefault((setting_name(setting), choice_of[its.variant.label]), {})
                of_choice[draw] = result | {"targets": by_target(metrics, setup.run.target)}
    return Cells(study, results)


def tabulate(cells: Cells) -> Table:
    """Return a study's table: a column for each value of `columns`, a row for each combination of the others.

    What is shown is one more axis if it is several things. If the study compares methods `against` one of
    them, columns of differences follow these.
    """
    study, measures = cells.study, measures_of(cells.study)
    expected = study.seeds * study.partition_seeds
    rows, differences, incomplete, missed = {}, {}, [], []

    for choice, setting in itertools.product(study.methods, settings(study)):
        of_seeds = cells.results.get((setting_name(setting), choice), {})
        its = f"{choice} {setting_name(setting)}".rstrip()
        if len(of_seeds) < expected:
            incomplete.append(f"{its} has {len(of_seeds)} of {expected}")
        rivals = cells.results.get((setting_name(setting), study.against), {})
        for name, (what, value, of_clients) in zip(study.show, measures, strict=True) if of_seeds else ():
            values = [value(result) for result in of_seeds.values()]
            reached = int(np.isfinite(values).sum())
            if _to_target(name) and 0 < reached < len(values):
                missed.append(f"{its} in {reached} of {len(values)} runs")
            row, column = _place(study, setting | {METHOD: choice, SHOW: what})
            rows.setdefault(row, {})[column] = cell(values)
            if rivals and choice != study.against:
                difference = paired(of_seeds, rivals, value, of_clients)
                differences[f"{its} {what}" if len(measures) > 1 else its] = difference
                rows[row][f"{column} minus {study.against}"] = difference
    over = f"{expected} runs"
    if study.partition_seeds > 1:
        over = f"{study.partition_seeds} partitions with {study.seeds} seed{'s' * (study.seeds > 1)} each"
    spread = f", mean and sample standard deviation over {over}" if expected > 1 else ""
    shown = "; ".join(title for title, *_ in measures)
    notes = [f"{study.title}: {shown}{spread}."] + ([f"Claim: {study.claim}"] if study.claim else [])
    missing = expected * len(settings(study)) * len(study.methods) - sum(map(len, cells.results.values()))
    notes += [f"{missing} of its runs are missing: {_listed(incomplete)}."] if missing else []
    notes += [f"The target is reached by {_listed([*dict.fromkeys(missed)])}."] if missed else []
    values = {METHOD: study.methods, SHOW: [title for title, *_ in measures], **study.axes}[study.columns]
    means = [_place(study, {study.columns: value})[1] for value in values]
    nothing = dict.fromkeys(means, Cell(float("nan"), None))
    nothing |= {f"{column} minus {study.against}": UNPAIRED for column in means}
    nothing = {
        column: cell for column, cell in nothing.items() if any(column in its for its in rows.values())
    }
    body = [(row, [*(nothing | of_row).values()]) for row, of_row in rows.items()]
    notes = (*notes, *notes_on(study.against, differences))
    return Table([*nothing], body, notes, of_rows="setting" if study.columns == METHOD else METHOD)


def _place(study: Study, where: Mapping[str, Any]) -> tuple[str, str]:
    """Return the row and the column of what is shown of a method in a setting, by the values of all axes."""
    axes = [name for name in study.axes if name in where and name != study.columns]
    others = setting_name({name: where[name] for name in axes})
    method = "" if study.columns == METHOD else where.get(METHOD, "")
    what = where.get(SHOW, "") if len(study.show) > 1 and study.columns != SHOW else ""
    row = " ".join(filter(None, (method, others, what))) or study.title
    named = study.columns in (METHOD, SHOW)  # these values speak for themselves
    column = where[study.columns] if named else setting_name({study.columns: where[study.columns]})
    return row, column


def _listed(sentences: list[str]) -> str:
    """Join the first few of some sentences, and say how many more there are."""
    more = len(sentences) - MOST_NAMED
    return "; ".join(sentences[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def measures_of(study: Study) -> list[Measure]:
    """Return what the table shows; titles name the target, if all settings have the same."""
    _, setup = _planned(study, settings(study)[0])
    target = None if "target" in study.axes else next(iter(setup.run.target), None)
    return [measure(name, target) for name in study.show]


def _to_target(shown: str) -> bool:
    return shown.endswith("to-target")


def found_below(folder: Path) -> dict[str, Study]:
    """Return the studies of a folder by their names, which are their paths without the ending.

    TOML files that name no methods are not studies.
    """
    paths = [path for path in sorted(folder.rglob("*.toml")) if "methods" in _read_toml(path)]
    return {path.relative_to(folder).with_suffix("").as_posix(): read(path) for path in paths}


def _read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(files.read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise JaxflError(f"{path} is not valid TOML: {error}.") from error


def _folder(folder: Path, setting: Mapping[str, Any]) -> Path:
    return folder / store.file_name(setting_name(setting)) if setting else folder / "runs"


def _planned(study: Study, setting: Mapping[str, Any]) -> tuple[list[Variant], Setup]:
    """Return the methods of a setting, and the setup of all of them.

    An option of all methods or of the federation applies to every run. Any other option applies to the
    methods that have it, of which there must be at least one.
    """
    options = {**study.options, **setting}
    shared = {*hints(Setup), *hints(Training)}
    own = {name: value for name, value in options.items() if name not in shared}
    setup, common = divide({n: v for n, v in options.items() if n in shared}, Training, study.title)
    check_setup(setup)
    having = {choice: hints(registry.method(choice)[0].config) for choice in study.methods}
    for name in own:
        if not any(name in of_method for of_method in having.values()):
            known = sorted(shared | {option for of_method in having.values() for option in of_method})
            raise JaxflError(
                f"{study.title}: none of its methods has an option {name!r}; {nearest(name, known)}"
            )
    variants = []
    for choice, of_method in having.items():
        its = {name: value for name, value in own.items() if name in of_method}
        method, given = registry.method(choice)
        if twice := [name for name in its if name in given]:
            raise JaxflError(
                f"{study.title}: {choice} sets {twice[0]}, which the study sets for all; leave it out of one."
            )
        _, typed = divide(its, method.config, choice)
        variants.append(choose(choice, common, typed))
    return variants, setup
