"""Logs of runs: TensorBoard and Weights & Biases, whose packages are extras, or functions of the user's.

Each kind of log is a function that finds its package and returns another. That one, given a run's folder and
configuration, opens the run's log: a context manager that yields ``write(record)``, for every line of
metrics.jsonl. A function of the user's own is ``(folder, record)``.
"""

import contextlib
import copy
import math
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxfl.config import choices
from jaxfl.config.own_code import own_code, require_call
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.records import Config, Round
from jaxfl.machine.packages import optional
from jaxfl.machine.processes import on_first_process
from jaxfl.results.measures import COSTS, PER_CLASS, columns
from jaxfl.results.target import stops

Write = Callable[[Round], None]
Open = Callable[[Path, Config], contextlib.AbstractContextManager[Write]]


class Log(contextlib.ExitStack):
    """A writer of the metrics of runs as they come; as a context manager it closes open logs.

    Args:
      kinds: names in `KINDS`, or functions of the user's own, also as ``my.py:function``.

    Raises:
      JaxflError: if a kind is unknown, its package is missing, nobody is logged in to its service, or a
        function takes other arguments.
    """

    def __init__(self, kinds: Sequence[str | Callable]):
        super().__init__()
        self.kinds = [(_name(kind), _opens(kind)) for kind in dict.fromkeys(kinds)]
        self.logs: dict[Path, list[Generator[None, list[Round], None]]] = {}

    @on_first_process
    def __call__(self, folder: Path, new: list[Round]) -> None:
        """Log a run's newest records, which are in its folder already; the last round closes its logs."""
        if not self.kinds:
            return
        if folder not in self.logs:
            config = store.read_config(folder)
            new = store.read_metrics(folder)  # with earlier records of a resumed run
            self.logs[folder] = [_log(name, open_, folder, config) for name, open_ in self.kinds]
            for log in self.logs[folder]:
                self.callback(log.close)
                next(log, None)
        for log in self.logs[folder]:
            with contextlib.suppress(StopIteration):  # it has ended
                log.send(new)


def _name(kind: str | Callable) -> str:
    return kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)


def _opens(kind: str | Callable) -> Open:
    found = choices.lookup("log", KINDS, kind) if isinstance(kind, str) else kind
    if found in KINDS.values():
        return found()
    require_call("log", found, "folder", "record")

    @contextlib.contextmanager
    def open_(folder: Path, config: Config) -> Iterator[Write]:
        def write(record):
            try:
                with own_code():
                    found(folder, copy.deepcopy(record))  # a copy, which it may change
            except Exception as error:
                if _reason(error) not in told:
                    told.add(_reason(error))
                    warnings.warn(
                        f"The log {_name(kind)} of {folder} has failed for round {record['round']} "
                        f"({_reason(error)}); the run goes on, and the log with its next record.",
                        stacklevel=2,
                    )

        told = set()
        yield write

    return open_


def _log(name: str, open_: Open, folder: Path, config: Config) -> Generator[None, list[Round], None]:
    """Write the records that this generator is sent to a run's log, up to those of the last round.

    An error of a package ends its log with a warning, and not the run.
    """
    metrics = []
    try:
        with open_(folder, config) as write:
            while len(metrics) < config["options"]["rounds"] and not (metrics and stops(config, metrics)):
                new = yield
                for record in new:
                    write(record)
                metrics += new
    except Exception as error:  # whatever its package raises
        warnings.warn(
            f"The log {name} of {folder} has stopped ({_reason(error)}); the run goes on, and its "
            "metrics.jsonl has all that the log lacks.",
            stacklevel=2,
        )


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def scalars(record: Round, config: Config) -> dict[str, float]:
    """Return a round's numbers by name; those of one kind share a prefix, which TensorBoard draws together.

    Accuracies are there if the round was evaluated; ``personal/mlp`` is that of an architecture's clients. So
    are the scores that the run's `config` asks to show, shares as fractions. Seconds are there if a program
    of several rounds ended, for all of them. A loss that is not finite is left out.
    """
    values = {"loss": record["loss"], "bytes/up": record["bytes_up"], "bytes/down": record["bytes_down"]}
    values["seconds/simulated"] = record.get("simulated_seconds")
    values["lost answers"] = len(record["lost"]) if "lost" in record else None
    for moment, key in (("personal", "accuracy"), ("received", "received")):
        if key in record:
            values[f"accuracy/{moment}"] = record[key]["mean"]
            values |= {f"{moment}/{name}": mean for name, mean in record[key]["per_group"].items()}
            if moment == "personal":
                values["accuracy/validation"] = record[key].get("validation")
    for name in config["options"].get("show", ()) if "accuracy" in record else ():
        for what in columns(name, [record]) if name not in COSTS else ():
            key = f"{PER_CLASS}/{what.title.removesuffix(' %')}" if name == PER_CLASS else f"scores/{name}"
            values[key] = what.value(record) / (100 if what.percent else 1)
    values |= {f"seconds/{part}": seconds for part, seconds in record.get("seconds", {}).items()}
    return {name: value for name, value in values.items() if value is not None and not math.isnan(value)}


def _in_words(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else " ".join(map(str, value or ["none"]))


def tensorboard() -> Open:
    """Return a log of event files in the run's ``tensorboard``, for ``tensorboard --logdir runs``."""
    package = optional("tensorboardX", "tensorboard", "--log tensorboard")

    @contextlib.contextmanager
    def open_(folder: Path, config: Config) -> Iterator[Write]:
        log = folder / "tensorboard"
        # A resumed run gets a new log, so that no round is in it twice.
        shutil.rmtree(log, ignore_errors=True)
        with package.SummaryWriter(str(log), flush_secs=5) as events:
            options = {name: _in_words(value) for name, value in config["options"].items()}
            for summary in package.summary.hparams(options, {"accuracy/personal": 0.0}):
                events.file_writer.add_summary(summary)

            def write(record):
                for name, value in scalars(record, config).items():
                    events.add_scalar(name, value, record["round"])

            yield write

    return open_


def wandb() -> Open:
    """Return a log of one W&B run per run, in project WANDB_PROJECT or jaxfl, with files in ``wandb``.

    A resumed run goes on in W&B after the last round that W&B has. In W&B's offline mode it begins another
    complete log with the same id.
    """
    package = optional("wandb", "wandb", "--log wandb")
    try:
        package.login()
    except package.errors.Error as error:
        raise JaxflError(f"--log wandb: {str(error).rstrip('.')}; or set WANDB_MODE=offline.") from None

    @contextlib.contextmanager
    def open_(folder: Path, config: Config) -> Iterator[Write]:
        earlier = sorted((folder / "wandb").glob("*run-*-*"))  # W&B's folders end in the id of their run
        run = package.init(
            project=os.environ.get("WANDB_PROJECT", "jaxfl"),
            dir=str(folder),
            id=earlier[-1].name.rpartition("-")[2] if earlier else None,
            resume="allow",
            reinit="create_new",
            name=f"{config['label']}, seed {config['options']['seed']}",
            group=config["label"],
            config=config["options"] | {"environment": config["environment"]},
            settings={"console": "off", "silent": True},  # the terminal shows the progress of the run
        )
        first, code = run.step, 1

        def write(record):
            if record["round"] >= first:
                run.log(scalars(record, config), step=record["round"])

        try:
            yield write
            code = 0
        finally:
            run.finish(exit_code=code)

    return open_


KINDS: dict[str, Callable[[], Open]] = {"tensorboard": tensorboard, "wandb": wandb}
