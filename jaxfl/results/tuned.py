"""One row for each method of a grid: the one whose runs are best on validation rows, see ``--tune lr``."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxfl.config import choices
from jaxfl.config.values import text
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.results.frame import Frame, by_case, words
from jaxfl.results.result import NO_VALIDATION
from jaxfl.tasks import task_of


def label_without(label: str, tune: Sequence[str]) -> str:
    """Return a method's label without the options that are tuned.

    >>> label_without("ditto,lam=1,lr=0.1", ["lr"])
    'ditto,lam=1'
    """
    name, options = choices.split(label) if tune else (label, {})
    return choices.join(name, {option: value for option, value in options.items() if option not in tune})


def differing(tune: Sequence[str], labels: Iterable[str]) -> tuple[str, ...]:
    """Return which options among those to tune some labels have."""
    given = {option for label in labels for option in choices.split(label)[1]} if tune else {}
    return tuple(option for option in tune if option in given)


def check_tuned(tune: Sequence[str], given: Iterable[str]) -> None:
    """Refuse to tune an option that is none of those given."""
    given = {*given}
    for option in tune:
        if option not in given:
            raise JaxflError(
                f"--tune {option}: no row differs in it; name some, as in fedavg,{option}=VALUE."
            )


def best(frame: Frame, tune: Sequence[str]) -> tuple[Frame, list[str]]:
    """Keep of each method in each setting, but for what is tuned, the runs best on validation rows.

    Options of methods may be tuned, and axes of settings.

    Returns:
      Those with the largest mean over their seeds, named without what is tuned; and a note on what was best.
      Who lacks seeds that others of its method have finished is not chosen.

    Raises:
      JaxflError: if clients have no validation rows.
    """
    if not tune:
        return frame, []
    cases, grids = by_case(frame), {}
    for (method, setting), runs in cases.items():
        scores = [run.result["accuracy"] for run in runs.values()]
        shares = [score["validation"] for score in scores]
        if None in shares:
            raise JaxflError(f"--tune: {NO_VALIDATION}")
        others = tuple((axis, value) for axis, value in setting if axis not in tune)
        grid = grids.setdefault((label_without(method, tune), others), {})
        named = {option: f"{option}={value}" for option, value in choices.split(method)[1].items()}
        tried = {option: each for option, each in {**named, **dict(setting)}.items() if option in tune}
        gain = task_of(scores[0]).gain(float(np.mean(np.array(shares, float))))
        grid[method, setting] = (len(runs), gain), tried
    kept, notes = {}, []
    for shown, grid in grids.items():
        case = max(grid, key=lambda place: grid[place][0])
        kept[case] = dict(zip(("method", "setting"), shown, strict=True))
        tried = grid[case][1]
        tuned = [option for option in tune if any(option in of for _, of in grid.values())]
        if lacking := [option for option in tuned if option not in tried]:  # which has its default
            options = store.read_config(next(iter(cases[case].values())).folder)["options"]
            tried |= {option: f"{option}={text(options[option])}" for option in lacking}
        notes += [f"{','.join(tried.values())} for {words(shown)}"] if tried else []
    stay = [
        run._replace(**kept[case]) for case, runs in cases.items() if case in kept for run in runs.values()
    ]
    return stay, [f"The best on validation rows: {'; '.join(notes)}."] if notes else []
