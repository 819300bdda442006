"""One row for each method of a grid: the one whose runs are best on validation rows, see ``--tune lr``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfl.config import choices
from jaxfl.errors import JaxflError
from jaxfl.results.result import NO_VALIDATION


def apart(label: str, tune: Sequence[str]) -> tuple[str, str]:
    """Return a method's label without the options that are tuned, and these.

    >>> apart("ditto,lam=1,lr=0.1", ["lr"])
    ('ditto,lam=1', 'lr=0.1')
    """
    name, options = choices.split(label) if tune else (label, {})
    tuned = [f"{option}={value}" for option, value in options.items() if option in tune]
    others = {option: value for option, value in options.items() if option not in tune}
    return choices.join(name, others), ",".join(tuned)


def check_tuned(tune: Sequence[str], given: Iterable[str]) -> None:
    """Refuse to tune an option that is none of those given.

    Raises:
      JaxflError: naming it.
    """
    given = {*given}
    for option in tune:
        if option not in given:
            raise JaxflError(
                f"--tune {option}: no row differs in it; name some, as in fedavg,{option}=VALUE."
            )


def best_of(grid: Mapping[Any, tuple[Any, str]], runs: Mapping[Any, Mapping[Any, dict]]) -> dict[Any, Any]:
    """Return which place of a grid is each method's best, and the method.

    Args:
      grid: method and options of each place.
      runs: results of each place; those with the best accuracy on validation rows, their mean, are best.

    Raises:
      JaxflError: if clients have no validation rows.
    """
    shares = {}
    for place, (method, _) in grid.items():
        of_runs = [result["accuracy"]["validation"] for result in runs[place].values()]
        if None in of_runs:
            raise JaxflError(f"--tune: {NO_VALIDATION}")
        shares.setdefault(method, {})[place] = np.mean(of_runs)
    return {max(places, key=places.get): method for method, places in shares.items()}


def notes_on_tuned(chosen: Mapping[str, str]) -> list[str]:
    """Return a note on the options chosen for each method."""
    tuned = [f"{options} for {method}" for method, options in chosen.items() if options]
    return [f"The best on validation rows: {'; '.join(tuned)}."] if tuned else []
