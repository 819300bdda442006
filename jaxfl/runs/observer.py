"""Who looks on while runs go on: the command shows it, from Python nobody does."""

from collections.abc import Callable
from typing import NamedTuple

from jaxfl.config.setup import Setup
from jaxfl.runs.prepare import Data


def _ignore(*happened) -> None:
    pass


class Observer(NamedTuple):
    """Is told what happens.

    Args:
      prepared: the setup, its data, and how many runs there are.
      said: a sentence on how several runs are run, and why.
      progressed: a run's label, its seed and its newest records, as they are in metrics.jsonl.
    """

    prepared: Callable[[Setup, Data, int], None] = _ignore
    said: Callable[[str], None] = _ignore
    progressed: Callable[[str, int, list[dict]], None] = _ignore


NOBODY = Observer()
