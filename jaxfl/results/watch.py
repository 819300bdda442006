"""The progress of runs of any process, going on or ended, read only from their folders."""

import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.owner import is_owned
from jaxfl.folder.records import Accuracy
from jaxfl.machine.files import below
from jaxfl.tasks import CLASSES, task_of

EVERY = 1.0  # seconds between two updates
PATIENCE = 60.0  # seconds without news that are normal: a program may be compiling


class Progress(NamedTuple):
    """The progress of a run."""

    label: str  # label of its method
    seed: int  # seed of the run
    rounds: tuple[int, int]  # number of rounds done and planned
    score: str
    """Mean over clients at the last evaluation, in percent or with its title; "-" before the first one."""
    loss: float | None  # loss of the last round, None before the first one or if it is not finite
    bytes_up: int  # bytes sent so far by all clients
    bytes_down: int  # bytes received so far by all clients
    speed: float | None  # rounds per second between the last two evaluations, without compilation
    news: float  # when its files last changed, in seconds since the epoch
    busy: float  # seconds that the rounds between the last two evaluations took, compilation included
    finished: bool  # whether its result exists
    owned: bool  # whether a process is working on it

    def state(self, now: float) -> str:
        """Return finished, stopped, running, or ``silent since 90 s`` after thrice its last rounds' time."""
        if self.finished:
            return "finished"
        if not self.owned:
            return "stopped"
        silent = now - self.news
        return "running" if silent <= max(PATIENCE, 3 * self.busy) else f"silent since {_span(silent)}"

    def left(self, now: float) -> float | None:
        """Return the seconds that the remaining rounds take at the last ones' speed, None if unknown."""
        done, planned = self.rounds
        if self.finished or not self.owned or self.speed is None:
            return None
        return max(0.0, (planned - done) / self.speed - (now - self.news))


def watch(folders: list[Path], out: Console, clock: Callable[[], float] = time.time) -> None:
    """Show a line per run; on a terminal in place, first what goes on, until all of them have ended.

    A run has ended when no process is working on it, a comparison when its folder says so (a table may be a
    report's). A folder of other runs never ends, because others may begin in it. Anything but a terminal gets
    the table once.

    Raises:
      JaxflError: if a folder holds no run.
    """
    if out.is_terminal:
        first = _table(folders, clock(), out, running_first=True)
        with Live(first, console=out, auto_refresh=False, transient=True) as live:
            while not all(map(_ended, folders)):
                time.sleep(EVERY)
                live.update(_table(folders, clock(), out, running_first=True), refresh=True)
    out.print(_table(folders, clock(), out))


def progress(run: Path) -> Progress:
    """Return the progress of a run, from its configuration, its metrics and whether there is a result."""
    news, owned = _last_change(run), is_owned(run)  # asked first: its owner leaves when the result is there
    return _progress(run, news, (run / store.RESULT).exists(), owned)


@functools.lru_cache(maxsize=256)  # the files are read again when they have changed
def _progress(run: Path, news: float, finished: bool, owned: bool) -> Progress:
    config, metrics = store.read_config(run), store.read_metrics(run)
    scored = [record for record in metrics if "accuracy" in record]
    ends = [0, *(record["round"] for record in metrics if "seconds" in record)]
    last = metrics[ends[-1] - 1] if len(ends) > 1 else {}
    seconds, together = last.get("seconds"), last.get("together", 1)
    # Runs in one program wait for one another: each has its part of the seconds of training, and then they
    # are evaluated in turn. Only one of them records the compilation.
    took = together * sum(value for part, value in seconds.items() if part != "compile") if seconds else 0.0
    return Progress(
        label=config["label"],
        seed=config["options"]["seed"],
        rounds=(len(metrics), config["options"]["rounds"]),
        score=_in_words(scored[-1]["accuracy"]) if scored else "-",
        loss=metrics[-1]["loss"] if metrics else None,
        bytes_up=sum(record["bytes_up"] for record in metrics),
        bytes_down=sum(record["bytes_down"] for record in metrics),
        speed=(ends[-1] - ends[-2]) / max(took, 1e-9) if seconds else None,
        news=news,
        busy=took + seconds["compile"] if seconds else 0.0,
        finished=finished,
        owned=owned,
    )


def _in_words(scores: Accuracy) -> str:
    task, mean = task_of(scores), scores["mean"]
    return f"{100 * mean:.1f}" if task is CLASSES else task.text(mean)


def _runs(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run, else all runs below it in the order in which they began."""
    if (folder / store.CONFIG).exists():
        return [folder]
    found = [path for path in below(folder, store.PARTITION) if (path.parent / store.CONFIG).exists()]
    found = sorted((path for path in found if path.exists()), key=lambda path: path.stat().st_mtime)
    if not found:
        raise JaxflError(f"There is no run in {folder}; name the folder of a run or of a comparison.")
    return [path.parent for path in found]


def _ended(folder: Path) -> bool:
    if (folder / store.CONFIG).exists():
        return (folder / store.RESULT).exists() or not is_owned(folder)
    return (folder / store.END).exists()


def _last_change(run: Path) -> float:
    files = (run / name for name in (store.CONFIG, store.METRICS, store.RESULT))
    return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)


def _table(folders: list[Path], now: float, out: Console, *, running_first: bool = False) -> Group:
    """Return a line per run, and what is damaged."""
    found, notes = {}, []
    for run in (run for folder in folders for run in _runs(folder)):
        try:
            found[run] = progress(run)
        except JaxflError as error:  # of this run; the others are shown
            notes.append(str(error))
    if running_first:
        found = dict(sorted(found.items(), key=lambda of_run: not of_run[1].owned))
    return Group(_of_runs(found, now, out.width), *map(Text, notes))


WIDE = 76  # columns of a terminal in which everything fits
NARROW = "seed", "round", "accuracy\n%", "left"


def _of_runs(found: dict[Path, Progress], now: float, width: int) -> Table:
    def columns(of_run):
        left = of_run.left(now)
        values = {
            "seed": str(of_run.seed),
            "round": "{}/{}".format(*of_run.rounds),
            "accuracy\n%": of_run.score,
            "loss": _number(of_run.loss, ".3f"),
            "MB\nup": f"{of_run.bytes_up / 1e6:.2f}",
            "MB\ndown": f"{of_run.bytes_down / 1e6:.2f}",
            "rounds\nper s": _number(of_run.speed, ".3g"),
            "left": "-" if left is None else _span(left),
        }
        return values if width >= WIDE else {title: values[title] for title in NARROW}

    alike = Counter((of_run.label, of_run.seed) for of_run in found.values())
    lines = {run: columns(of_run) for run, of_run in found.items()}
    titles = next(iter(lines.values()), NARROW)
    numbers = (Column(title, justify="right", no_wrap=True) for title in titles)
    table = Table(
        Column("method", overflow="fold"),
        *numbers,
        Column("state", overflow="fold"),
        box=SIMPLE_HEAD,
        padding=0,
    )
    for run, of_run in found.items():
        alone = alike[of_run.label, of_run.seed] == 1
        label = of_run.label if alone else f"{of_run.label} in {run}"
        table.add_row(label, *lines[run].values(), of_run.state(now))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _span(seconds: float) -> str:
    """Return a duration as ``59 s``, ``12 min`` or ``3.3 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
