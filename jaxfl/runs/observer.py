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
    """Callbacks for progress reports."""

    prepared: Callable[[Setup, Data, int], None] = _ignore  # gets the setup, its data, the number of runs
    said: Callable[[str], None] = _ignore  # gets a sentence about what happens next
    warned: Callable[[str], None] = _to_stderr  # gets a sentence that nobody should miss
    progressed: Callable[[str, list[Round]], None] = _ignore
    """Gets a unique name of a run and its newest records, as in metrics.jsonl."""
    kept: Callable[[str, list[Round]], None] = _ignore
    """Gets the same for a run that had finished before, with all its records."""
    ahead: Callable[[int], None] = _ignore
    """Gets, at the beginning of each setting of a study, the rounds of all runs from there on."""


ONLY_WARNINGS = Observer()


class Terms(NamedTuple):
    """On what terms a command computes its runs, whatever these try."""

    log: Sequence[str | Callable] = ()  # further destinations of the metrics, see `jaxfl.runs.log.Log`
    changed_code: bool = False  # whether to go on although the user's own files have changed
    max_seconds: float | None = None
    """Time limit in seconds; the rounds done are saved, see `jaxfl.runs.interrupt.Interrupted`."""
    observer: Observer = ONLY_WARNINGS  # callbacks for progress reports


USUAL = Terms()
