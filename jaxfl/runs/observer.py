"""Observers of runs in progress: callbacks for progress and warnings, such as those of the progress bar."""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxfl.config.setup import Setup
from jaxfl.folder.records import Round
from jaxfl.machine.processes import is_first
from jaxfl.runs.prepare import Data


def _ignore(*happened) -> None:
    pass


def _to_stderr(sentence: str) -> None:
    if is_first():
        print(f"jaxfl: {sentence}", file=sys.stderr, flush=True)


class Observer(NamedTuple):
    """Callbacks for progress reports.

    Args:
      prepared: called with the setup, its data, and the number of runs.
      said: called with a sentence about what happens next.
      warned: called with a sentence that nobody should miss; by default it goes to stderr.
      progressed: called with a unique name of a run and its newest records, as in metrics.jsonl.
      kept: called with the same for a run that had finished before, with all its records.
      ahead: called at the beginning of each setting of a study with the rounds of all runs from there on.
    """

    prepared: Callable[[Setup, Data, int], None] = _ignore
    said: Callable[[str], None] = _ignore
    warned: Callable[[str], None] = _to_stderr
    progressed: Callable[[str, list[Round]], None] = _ignore
    kept: Callable[[str, list[Round]], None] = _ignore
    ahead: Callable[[int], None] = _ignore


ONLY_WARNINGS = Observer()


class Terms(NamedTuple):
    """On what terms a command computes its runs, whatever these try."""

    log: Sequence[str | Callable] = ()  # further destinations of the metrics, see `jaxfl.runs.log.Log`
    changed_code: bool = False  # whether to go on although the user's own files have changed
    max_seconds: float | None = None
    """Time limit in seconds; the rounds done are saved, see `jaxfl.runs.interrupt.Interrupted`."""
    observer: Observer = ONLY_WARNINGS  # callbacks for progress reports


USUAL = Terms()
