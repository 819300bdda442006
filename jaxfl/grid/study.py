"""Studies: methods under several settings, described in one file, with a table of results by setting.

A setting is one value of every axis. Its runs are a comparison in its own folder, so what is true of
comparisons is true here: finished runs are kept, begun ones go on, a run that fails does not end the others.
"""

import contextlib
import itertools
import os
import shlex
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxfl.config.command_options import Columns, Continuation
from jaxfl.config.values import as_path
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.owner import in_turn
from jaxfl.folder.variant import provided
from jaxfl.grid.compare import compare
from jaxfl.grid.plan import is_begun, plan, take_part
from jaxfl.grid.run import continued
from jaxfl.grid.study_file import (
    SHOW,
    Study,
    found_below,
    options_of,
    planned,
    read,
    setting_name,
    settings,
    usual_folder,
    without_axis,
)
from jaxfl.grid.study_table import as_runs, in_words, measures_of, tabulate, without_tuned
from jaxfl.machine import files
from jaxfl.results.frame import Frame, alike_in_data, finished_run
from jaxfl.results.table import Table, written
from jaxfl.runs.interrupt import Interrupted, deferred, limited, reason
from jaxfl.runs.observer import USUAL, Observer, Terms

__all__ = ["Study", "finished", "found_below", "read", "run", "settings", "usual_folder"]


def run(
    study: Study,
    folder: str | Path,
    *,
    part: str = "1/1",
    data_dir: Path | None = None,
    pictures: str = "png",
    terms: Terms = USUAL,
) -> tuple[Table | None, list[str]]:
    """Start or continue the runs of a study, and write its table and picture.

    A `part` such as "2/8" runs every eighth cell from the second on. A cell is a method in a setting; all
    settings of a method are counted before the next method, so that each of as many parts as settings has one
    setting. The table has what all parts have finished.

    Returns:
      The table of the finished runs, None if there are none; and why others have not finished.

    Raises:
      JaxflError: if there is no such part, or a table cannot be written.
      Interrupted: if stopped early, see `jaxfl.runs.interrupt`.
    """
    folder, observer = as_path(folder), terms.observer
    # By folder: settings that differ only in targets share one, and its runs.
    everything = {_folder(study, folder, setting): setting for setting in settings(study)}
    mine = _methods_by_folder(study, everything, part)
    _require_free(folder, everything)
    if not mine:
        observer.said(f"{study.title}: all cells are left to other parts.")
    _warn_of_equal_runs(study, observer)

    def train(place, setting, chosen):
        variants, setup = planned(study, setting)
        named = zip(study.methods, variants, strict=True)
        return compare(
            variants,
            continued(setup, Continuation(data_dir=data_dir)),
            study.repetitions,
            Columns(select=study.select),
            place,
            terms._replace(max_seconds=None),
            only={variant.label for choice, variant in named if choice in chosen},
            beside=True,  # runs of seeds and methods that the file no longer names
        ).failures

    failures, rounds = [], {place: _rounds(study, everything[place], mine[place]) for place in mine}
    with limited(terms.max_seconds), deferred() as request:
        for done, (place, chosen) in enumerate(mine.items(), 1):
            setting = everything[place]
            observer.ahead(sum([*rounds.values()][done - 1 :]))
            where = f"setting {done} of {len(mine)}{': ' * bool(setting)}{setting_name(setting)}"
            observer.said(f"{study.title}: {where}")
            about = place  # runs, which another process may finish meanwhile
            try:
                if stop := request.made:
                    raise Interrupted("", stop)
                sentences = train(place, setting, chosen)
            except Interrupted as stopped:
                raise Interrupted(
                    f"The study in {folder} has stopped in {where}{reason(stopped.code)}; repeat the "
                    f"command, with --run-dir {shlex.quote(str(folder))}, to continue.",
                    stopped.code,
                ) from None
            except JaxflError as error:  # it ends this setting; the others go on
                about, sentences = None, [str(error)]
            failures += [
                (about, f"{setting_name(setting)}: {sentence}" if setting else sentence)
                for sentence in sentences
            ]
    with in_turn(folder):
        frame = finished(study, folder)
        complete = {place for place in mine if _is_complete(study, frame, everything[place], mine[place])}
        failures = [sentence for about, sentence in failures if about not in complete]
        if frame:
            return _written(study, frame, folder, pictures), failures
    if store.holds(folder, store.STUDY):
        observer.warned(f"{folder / store.STUDY} and the files beside it are from runs with other options.")
    return None, failures


def finished(study: Study, folder: Path) -> Frame:
    """Return the finished runs that were begun as the study plans them, without their metrics.

    Those that are damaged, or lack the validation rows to select by, are left out: `compare` has said so.
    """
    frame = []
    for setting in settings(study):
        variants, setup = planned(study, setting)
        method = {variant.label: choice for variant, choice in zip(variants, study.methods, strict=True)}
        try:
            setup = provided(setup, variants)
            runs = plan(_folder(study, folder, setting), variants, setup, study.repetitions)
        except JaxflError:  # it has ended this setting
            continue
        for run, entry in runs.items():
            case = method[entry.variant.label], in_words(setting)
            draw = entry.setup.run.seed, entry.setup.partition.partition_seed
            with contextlib.suppress(JaxflError):
                if is_begun(run, entry) and store.holds(run, store.RESULT):
                    found = finished_run(run, draw, *case, setup.run.target, study.select)
                    frame.append(found._replace(metrics=[]))
    return alike_in_data(frame)


def _methods_by_folder(study: Study, everything: Mapping[Path, Any], part: str) -> dict[Path, set[str]]:
    """Return the methods that a part trains, by the folder of their setting, see `run`."""
    mine = {}
    for choice, place in take_part([*itertools.product(study.methods, everything)], part):
        mine.setdefault(place, set()).add(choice)
    return {place: mine[place] for place in everything if place in mine}


def _is_complete(study: Study, frame: Frame, setting: Mapping[str, Any], chosen: Collection[str]) -> bool:
    """Return whether all runs of some methods in a setting have finished, also those of another process."""
    there = Counter(run.method for run in frame if run.setting == in_words(setting))
    return all(there[choice] == study.seeds * study.partition_seeds for choice in chosen)


def _require_free(folder: Path, places: Collection[Path]) -> None:
    """Refuse a folder that holds anything, unless the study has begun there."""
    try:
        store.check_free(folder)
    except JaxflError:  # the study may have begun, in another part at this moment
        begun = store.holds(folder, store.STUDY) or _has_settings(folder)
        if not begun and not any(place.exists() for place in places):
            raise


def _warn_of_equal_runs(study: Study, observer: Observer) -> None:
    """Name a method that an axis does not change, whose runs would be computed for each of its values."""
    for choice, axis in without_axis(study)[:1]:
        observer.warned(
            f"{choice} has no option that differs along the axis {axis}, so its runs are the same, and all "
            "are computed; to save them write methods with their options, "
            f'methods = ["NAME,{setting_name({axis: study.axes[axis][0]})}", ...], in place of the axis.'
        )


def _rounds(study: Study, setting: Mapping[str, Any], chosen: Collection[str]) -> int:
    """Return how many rounds the runs of some methods in a setting have."""
    _, setup = planned(study, setting)
    return setup.run.rounds * len(chosen) * study.seeds * study.partition_seeds


def _written(study: Study, frame: Frame, folder: Path, pictures: str) -> Table:
    """Write the table of a study's finished runs, and its picture."""
    table = tabulate(study, frame)
    files.write_texts(folder, written(table, "study") | {"runs.csv": as_runs(study, frame)})
    from jaxfl.results import charts  # here: other commands need not wait for it

    if len(study.show) > 1:
        by_measure = tabulate(study._replace(columns=SHOW), frame)
        draw = partial(charts.draw_panels, by_measure, study.title)
    else:
        shown = without_tuned(study)
        form = charts.draw_grid if (len(shown.methods), len(shown.axes)) == (1, 2) else charts.draw_table
        draw = partial(form, table, study.title, measures_of(study, frame)[0].title)
    files.write_pictures(folder, {f"study.{pictures}": draw})
    return table


def _folder(study: Study, folder: Path, setting: Mapping[str, Any]) -> Path:
    """Return the folder of a setting, also if it began when the file had its axes in another order.

    Settings that differ only in their targets have the same runs, unless these stop there.
    """
    stops = {**study.options, **options_of(setting)}.get("stop_at_target", False)
    options = [sorted(options_of({axis: value}).items()) for axis, value in setting.items()]
    words = (setting_name({n: v for n, v in changed if stops or n != "target"}) for changed in options)
    words = [*filter(None, words)] or ["runs"]
    usual, parts = store.file_name(",".join(words)), [*map(store.file_name, words)]
    there = sorted(os.listdir(folder)) if folder.is_dir() and not (folder / usual).exists() else ()
    return folder / next((other for other in there if _is_reordered(other, usual, parts)), usual)


def _is_reordered(other: str, usual: str, parts: Collection[str]) -> bool:
    """Return whether a name has the parts of the usual one in another order.

    Parts are of axes, not of options: a partition's ``alpha`` is not that of a method.
    """
    rest = f"-{other}"
    for part in sorted(parts, key=len, reverse=True):  # a shorter one may be within a longer one
        rest = rest.replace(f"-{part}", "", 1)
    return not rest and len(other) == len(usual)


@files.reads
def _has_settings(folder: Path) -> bool:
    """Return whether a folder holds comparisons named after settings of a study, such as ``lr=0.1``."""
    return any(folder.glob(f"*=*/*/seed-*/{store.CONFIG}"))
