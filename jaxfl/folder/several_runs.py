"""Folders of several runs: which runs are there, and what a comparison was asked for and how it ended."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from jaxfl.errors import JaxflError
from jaxfl.folder.records import Command, End
from jaxfl.folder.store import COMMAND, CONFIG, END, PARTITION, RESULT, free_folder, read_config, read_json
from jaxfl.machine.files import as_json, below, reads, write_texts, writes


@reads
def runs_in(folder: Path) -> list[Path]:
    """Return the folders of a comparison's runs, finished or not."""
    return [path.parent for path in sorted(folder.glob(f"*/seed-*/{CONFIG}"))]


def devices_below(folder: Path) -> int | None:
    """Return the most devices that runs in a folder or below have; None if none is known."""
    runs = (path.parent for path in below(folder, CONFIG))
    return max(filter(None, (read_config(run)["options"].get("devices") for run in runs)), default=None)


@reads
def finished_below(folder: Path) -> bool:
    """Return whether any run in a folder or below has finished."""
    return any(below(folder, RESULT))


@reads
def finished_in(folders: list[Path]) -> list[Path]:
    """Return the folders of all finished runs in some folders or below, each once.

    They are in the order of the given folders. Within one, they are in the order in which its comparison
    names the methods, or else in the order in which they began.

    Raises:
      JaxflError: if one of the given folders has none.
    """
    ended, places = {}, {}

    def place(run):
        comparison = run.parent.parent
        if comparison not in places:
            places[comparison] = []
            with contextlib.suppress(JaxflError):  # it may be damaged while results are not
                places[comparison] = read_json(comparison / END, End).get("order", [])
        order, begun = places[comparison], run / PARTITION
        known = order.index(run.parent.name) if run.parent.name in order else len(order)
        return known, begun.stat().st_mtime if begun.exists() else 0.0, run

    for folder in folders:
        found = sorted({path.parent.resolve() for path in below(folder, RESULT)}, key=place)
        if not found:
            raise JaxflError(f"There is no finished run in {folder}.")
        ended |= dict.fromkeys(found)
    return list(ended)


@reads
def unfinished_in(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of runs in some folders or below that have begun, but not finished."""
    begun = {path.parent for folder in folders for path in below(folder, PARTITION)}
    return sorted(run for run in begun if (run / CONFIG).exists() and not (run / RESULT).exists())


def report_folder(folders: list[Path]) -> Path:
    """Return where a report on some folders goes: into the only one, unless it is a run's."""
    return folders[0] if len(folders) == 1 and not (folders[0] / CONFIG).exists() else free_folder("report")


# ---- a comparison's own files


@writes
def keep_command(folder: Path, asked: dict) -> None:
    """Write what a comparison was asked for, which begins or goes on: its last end counts no more."""
    (folder / END).unlink(missing_ok=True)
    write_texts(folder, {COMMAND: as_json(asked).decode()})


@reads
def read_command(folder: Path) -> Command:
    """Return what a comparison was asked for, see `jaxfl.grid.compare.resume`.

    Raises:
      JaxflError: if the folder does not hold that, or the file is damaged.
    """
    return read_json(folder / COMMAND, Command)


@writes
def discard_command(folder: Path) -> None:
    """Remove the folder of a comparison of which no run has begun."""
    (folder / COMMAND).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or it holds something else
        folder.rmdir()


@reads
def end_of(folder: Path) -> End:
    """Return how a comparison last ended; only that nothing has failed while it goes on."""
    return read_json(folder / END, End) if (folder / END).exists() else End(failures=[])
