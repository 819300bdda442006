"""Who looks on while runs go on: the command shows it, from Python nobody does."""

import sys
from collections.abc import Callable
from typing import NamedTuple

from jaxfl.config.setup import Setup
from jaxfl.machine.processes import is_first
from jaxfl.runs.prepare import Data


def _ignore(*happened) -> None:
    pass


def _to_stderr(sentence: str) -> None:
    if is_first():
        print(f"jaxfl: {sentence}", file=sys.stderr, flush=True)


class Observer(NamedTuple):
    """Is told what happens.

    Args:
      prepared: the setup, its data, and how many runs there are.
      said: a sentence about what happens next.
      warned: a sentence that nobody should miss; by default it goes to stderr.
      progressed: a run in words, which no other run has, and its newest records, as they are in
        metrics.jsonl.
    """

    prepared: Callable[[Setup, Data, int], None] = _ignore
    said: Callable[[str], None] = _ignore
    warned: Callable[[str], None] = _to_stderr
    progressed: Callable[[str, list[dict]], None] = _ignore


NOBODY = Observer()
