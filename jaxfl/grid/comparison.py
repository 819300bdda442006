"""The outcome of a comparison: its table, its runs, and why some have not finished."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfl.deployed.load import Loaded
from jaxfl.deployed.load import load as open_run
from jaxfl.errors import JaxflError, nearest
from jaxfl.folder import several_runs
from jaxfl.results.paired import matching_label
from jaxfl.results.report import table_of
from jaxfl.results.table import Table


class Begun(dict[tuple, Loaded]):
    """Runs by label, seed and, if there are several, partition seed: ``runs["ditto,lam=1.0", 0]``.

    Numbers in a label may be written differently: ``runs["ditto,lam=1", 0]`` is the same run.
    """

    def __missing__(self, key):
        """Find the run whose label is written differently.

        Raises:
          JaxflError: if there is none, naming a similar label.
        """
        label, *draw = key if isinstance(key, tuple) and key else (key,)
        known = list(dict.fromkeys(label for label, *_ in self))
        found = matching_label(str(label), known)
        if found is None:
            raise JaxflError(f"There is no run of {label!r} here; {nearest(str(label), known)}")
        if (found, *draw) in self:
            return self[found, *draw]
        draws = "; ".join(", ".join(map(repr, own)) for own in self if own[0] == found)
        raise JaxflError(f"There is no run {key!r} here; those of {found} are {draws}.")


class Comparison(NamedTuple):
    """The outcome of a comparison.

    Args:
      folder: folder of all its runs, and of table.csv, table.md, table.tex and pictures.
      table: table of the finished runs, None if there are none.
      runs: all begun runs, by label and seed (and partition seed, if there are several), see `Begun`.
      failures: why runs have not finished: a sentence for each method and reason, with the seeds if other
        runs of the method did not end so. For an opened folder, the failures when the comparison last ended;
        none while it goes on, or if it was stopped.
    """

    folder: Path
    table: Table | None
    runs: Begun
    failures: list[str]

    def __repr__(self) -> str:
        """Return a line of text, with the table below."""
        return "\n".join([f"Comparison in {self.folder}, {len(self.runs)} runs", str(self.table or "")])

    def against(self, label: str) -> Table:
        """Return the table with a column that says how much more accurate the others are than one method.

        Args:
          label: label of that method in the table.

        Raises:
          JaxflError: if it is in no row of the table.
        """
        table = table_of(self.folder, str(label))
        if table is None:
            raise JaxflError(f"No run in {self.folder} has finished: there is nothing to compare.")
        return table


def load(folder: Path, changed_code: bool = False, round: Any = None) -> Comparison:
    """Open the folder of a comparison, ended or still going on; nothing is written.

    The other arguments are those of `Loaded`.

    Raises:
      JaxflError: if a run in it is damaged.
    """
    opened = [open_run(run, changed_code, round) for run in several_runs.runs_in(folder)]
    return Comparison(folder, table_of(folder), by_label(opened), several_runs.end_of(folder)["failures"])


def by_label(opened: Sequence[Loaded]) -> Begun:
    """Index runs by label, seed and, if there are several, partition seed."""
    several = len({run.config["options"]["partition_seed"] for run in opened}) > 1
    drawn = ("seed", "partition_seed") if several else ("seed",)
    return Begun(
        ((run.config["label"], *(run.config["options"][name] for name in drawn)), run) for run in opened
    )
