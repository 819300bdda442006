"""Options of single commands, by subject; they are not part of what a run tries."""

import dataclasses
from pathlib import Path
from typing import Literal

from jaxfl.config.options import within


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The folder of the results."""

    run_dir: Path | None = None
    """The folder of all that is written: a new one, or for compare that of the comparison to continue; by
    default runs/NAME-DATASET."""


@dataclasses.dataclass(frozen=True)
class Logs:
    """Further places for metrics during the run."""

    log: tuple[str, ...] = ()
    """tensorboard: event files in the run's folder; wandb: Weights & Biases, with WANDB_MODE=offline in the
    run's folder too; my.py:mine, a function of your own (folder, record) that gets every round's record; or
    several of them."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """A trace of where the time goes."""

    profile: Path | None = None
    """Folder for a trace by jax.profiler of the second eval_every rounds, or of the only ones."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """A limit on the time."""

    max_seconds: float | None = within("(0, inf)", None)
    """Begin no rounds that would end later than this many seconds from now, judging by earlier rounds (the
    first eval_every rounds begin in any case); save, say how to go on, and exit with code 75."""


@dataclasses.dataclass(frozen=True)
class ChangedCode:
    """Whether to go on after your own code has changed."""

    changed_code: bool = False
    """Go on although your own Python files have changed; results say from which round."""


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Repetitions with other seeds."""

    seeds: int = within("[1, 100000]", 1)  # a larger number is a slip
    """Repeat with seed, seed + 1, ..."""
    partition_seeds: int = within("[1, 100000]", 1)
    """Repeat all of it with partition_seed, partition_seed + 1, ...: other divisions of the data."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of the table."""

    hide: tuple[
        Literal[
            "architectures",
            "received",
            "lost",
            "newcomers",
            "wire",
            "megabytes",
            "simulated-seconds",
            "targets",
        ],
        ...,
    ] = ()
    """Usual columns to leave out."""
    tune: tuple[str, ...] = ()
    """Options, such as lr: of the rows that differ only in these, the one that is best on validation rows
    (--validation-fraction), by the mean over seeds, stands for the method."""
    select: Literal["last", "validation"] = "last"
    """Evaluation that the accuracies are of: the last one, or the one with the best accuracy on validation
    rows (--validation-fraction)."""
    against: str | None = None
    """A method, named as in the table or in the command: a further column says how much more accurate the
    others are, seed by seed, with the 95 % interval of the mean difference."""


@dataclasses.dataclass(frozen=True)
class View(Columns):
    """What a table of finished runs shows."""

    show: tuple[str, ...] = ()
    """Further scores, also drawn over the rounds in metrics.png: lowest, macro-f1, per-class, auc, loss,
    confusion, ...; `jaxfl list scores` has all. Those of every row's answer, such as auc, are there if the
    runs have computed them."""
    target: tuple[float, ...] = ()
    """Accuracies, such as 0.6 0.7: further columns say after how many rounds, megabytes and simulated seconds
    each was reached."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of the runs that this command trains."""

    part: str = "1/1"
    """One of several parts, for machines that share --run-dir: 2/8 is every eighth method from the second on,
    with all its seeds; in a study every eighth cell: all settings of one method, then those of the next."""


@dataclasses.dataclass(frozen=True)
class StudyFolders:
    """The folders of the study's data and results, and its picture."""

    run_dir: Path | None = None
    """A folder for all settings, new or of the same study; by default runs/FOLDER-NAME (FOLDER/NAME.toml)."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data; its own default if not given."""
    pictures: Literal["png", "pdf", "svg"] = "png"
    """Format of the study's picture: png, or pdf and svg, which have no pixels."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """How the run goes on."""

    rounds: int | None = within("[1, 1000000]", None)
    """Rounds of the whole run; by default as many as it was begun for."""
    devices: int | None = within("[1, inf)", None)
    """Devices that share the clients in the rounds to come; by default as many as so far. With another
    number, sums are in another order: results agree up to rounding."""
    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data from now on, on another machine for example."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Where the data are."""

    data_dir: Path | None = None
    """Where tensorflow-datasets keeps its data, if not where the run found them."""


@dataclasses.dataclass(frozen=True)
class Repetition:
    """What differs from the repeated run."""

    seed: int | None = within("[0, 4294967295]", None)
    """Seed of initial weights, client sampling and mini-batches; by default the run's. Partition and options
    stay."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation whose models are meant."""

    round: int | Literal["best"] | None = None
    """A round with a checkpoint, by default the last; best: the one with the best accuracy on validation rows
    (--validation-fraction). A run keeps its last --keep-checkpoints."""


@dataclasses.dataclass(frozen=True)
class Export:
    """The models to write, and their folder."""

    out: Path | None = None
    """A new or empty folder."""
    client: tuple[int, ...] = ()
    """Clients whose models are written, by number; by default all. A shared model is written once."""


@dataclasses.dataclass(frozen=True)
class Formats:
    """Formats of other programs."""

    format: tuple[Literal["json", "fl-bench", "pfllib"], ...] = ()
    """Also write partition.json, FL-bench's partition.pkl, or a folder pfllib/ with the data of every client
    in the form of PFLlib."""


@dataclasses.dataclass(frozen=True)
class Flower:
    """The app's folder and its initial weights."""

    out: Path | None = None
    """A new or empty folder."""
    after: int | None = None
    """Rounds of the run that are done: those of one of its checkpoints, by default the newest; 0 begins again
    from its initial weights."""


@dataclasses.dataclass(frozen=True)
class Output:
    """The folder of the table."""

    out: Path | None = None
    """A folder for the table and the curves; by default the folder of runs that is reported if it is one,
    else a new one, runs/report, runs/report-2, ..."""
    pictures: Literal["png", "pdf", "svg"] = "png"
    """Format of the pictures: png, or pdf and svg, which have no pixels."""
