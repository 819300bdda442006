"""Profiles of a run: a trace of its device during one chunk of rounds."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxfl.core.engine import Chunk
from jaxfl.machine.files import writes
from jaxfl.machine.processes import on_first_process


def profiled(chunks: Iterator[dict[int, Chunk]], folder: Path, at: int) -> Iterator[dict[int, Chunk]]:
    """Yield the same chunks; number `at`, from 0, is traced into a folder, including its evaluation.

    The first one compiles, so a later one shows the steady state. The trace is for TensorBoard's profile
    plugin, XProf or Perfetto.

    Raises:
      JaxflError: if the folder cannot be written.
    """
    _make_folder(folder)
    yield from itertools.islice(chunks, at)
    on_first_process(jax.profiler.start_trace)(folder)
    try:
        traced = list(itertools.islice(chunks, 1))
    finally:
        on_first_process(jax.profiler.stop_trace)()
    yield from traced
    yield from chunks


@writes
def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
