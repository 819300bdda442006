"""Run folders opened from Python: metrics as arrays, models, and what the method knows about clients."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.partition import Partition
from jaxfl.data.shift import seen
from jaxfl.data.sources import Source
from jaxfl.deployed.export import export
from jaxfl.deployed.models import Models
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.config import restore_setup
from jaxfl.folder.records import Config, Result, Round
from jaxfl.folder.variant import Variant
from jaxfl.machine.packages import optional
from jaxfl.results.result import best, findings
from jaxfl.runs.log import scalars
from jaxfl.runs.prepare import draw_shift, same_source
from jaxfl.runs.recorded_data import recorded_moments
from jaxfl.tasks import task_of

if TYPE_CHECKING:
    import pandas


class Accuracies(NamedTuple):
    """Accuracies of one moment, as fractions, at every evaluation; of another task its score, such as RMSE.

    Args:
      rounds: (E,) int, rounds of the evaluations, counted from 1.
      mean: (E,), mean over clients.
      per_client: (E, N), accuracy of each client on its own test rows, by client id.
    """

    rounds: np.ndarray
    mean: np.ndarray
    per_client: np.ndarray


@dataclass(frozen=True, eq=False)
class Loaded:
    """A run, finished or still going on, as its folder was when it was opened.

    Attributes:
      folder: the run's folder.
      config: content of config.json: method, label, options, models, environment.
      metrics: a record per round so far, see `jaxfl.results.result.records`.
      result: the summary, see `jaxfl.results.result.result`; None for an unfinished run.
      variant: the method, if it is an object that cannot be found again by its name.
      changed_code: whether to make models although your own files have changed since.
      round: the round whose models, matrices and embeddings are meant, by default that of the last
        checkpoint; "best" is that of the best accuracy on validation rows.
    """

    folder: Path
    config: Config
    metrics: list[Round]
    result: Result | None
    variant: Variant | None = None
    changed_code: bool = False
    round: int | Literal["best"] | None = None

    def __repr__(self) -> str:
        """Return a line of text with label, seed, progress and folder."""
        options = self.config["options"]
        done = f"{len(self.metrics)} of {options['rounds']} rounds"
        if len(self.personal.mean):
            done += f", {task_of(self.config['data']).text(self.personal.mean[-1])}"
        if self.round is not None:
            done += f", models of round {self.round}"
        return f"<{self.config['label']}, seed {options['seed']}: {done}; {self.folder}>"

    def __getstate__(self) -> dict:
        """Return the content of a pickle: not the data set and the models, which are loaded again if used."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def personal(self) -> Accuracies:
        """Accuracies of the models that clients deploy."""
        return self._accuracies("accuracy")

    @property
    def received(self) -> Accuracies:
        """Accuracies of the models from which clients start a round, before local training."""
        return self._accuracies("received")

    @property
    def loss(self) -> np.ndarray:
        """Mean training loss of every round, (R,); NaN where it is not finite, or no client answered."""
        return np.array([record["loss"] for record in self.metrics], float)

    @property
    def bytes_up(self) -> np.ndarray:
        """Bytes that the clients of each round sent, (R,) int."""
        return np.array([record["bytes_up"] for record in self.metrics], np.int64)

    @property
    def bytes_down(self) -> np.ndarray:
        """Bytes that the clients of each round received, (R,) int."""
        return np.array([record["bytes_down"] for record in self.metrics], np.int64)

    @property
    def seconds(self) -> dict[str, np.ndarray]:
        """Seconds by round, {"compile", "train", "evaluate", "write": (R,)}.

        The round of an evaluation has those of all rounds since the last one; "write" is the time spent
        writing since then.
        """
        parts = ("compile", "train", "evaluate", "write")
        timed = [record.get("seconds", {}) for record in self.metrics]
        return {part: np.array([of_round.get(part, 0.0) for of_round in timed], float) for part in parts}

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """The method's matrices of pairs of clients, {name: (N, N)}, after the last checkpoint or `round`."""
        return store.read_about_clients(self.folder, "matrices", self._round)

    @property
    def embeddings(self) -> dict[str, np.ndarray]:
        """The method's vectors of clients, {architecture: (n, d)}, after the last checkpoint or `round`."""
        return store.read_about_clients(self.folder, "embeddings", self._round)

    @property
    def findings(self) -> dict[str, dict[str, np.ndarray] | list]:
        """The method's findings, round by round; most methods have none.

        Returns:
          {panel: {line: (R,)}} of numbers, NaN where there is none, such as FedCMD's score of every layer;
          any other form is a list with an entry per round, such as the networks that pFedClub assembled.
        """
        return findings(self.metrics)

    @functools.cached_property
    def partition(self) -> Partition:
        """Each client's rows of the data set, and its numbering of the classes."""
        return store.read_partition(self.folder)

    @functools.cached_property
    def source(self) -> Source:
        """The data set with images and labels, loaded on first use.

        Raises:
          JaxflError: if it is not available, or has other labels or images than when the run was begun.
        """
        return same_source(restore_setup(self.folder, self.config, self.changed_code), self.folder)

    def seen(self, client: int, rows: np.ndarray) -> np.ndarray:
        """Return images of the data set as a client sees them: unchanged, unless there is a `--shift`.

        Args:
          client: id of the client; -1 is the last one.
          rows: (B,) int, positions in `source`.

        Returns:
          (B, H, W, C), in raw units: what ``models[client].predict`` takes.

        Raises:
          JaxflError: if the data set is not available, or there is no such client or row.
        """
        setup, client = restore_setup(self.folder, self.config, self.changed_code), self.models.number(client)
        rows, count = np.asarray(rows), len(self.source.labels)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise JaxflError("rows must be a list of whole numbers, at least one: positions in run.source.")
        if (missing := rows[(rows < 0) | (rows >= count)]).size:
            raise JaxflError(f"There is no row {missing[0]}; they go from 0 to {count - 1}.")
        if not setup.data.shift:
            return self.source.images[rows]
        drawn = draw_shift(setup, self.source, len(self.models))
        std = recorded_moments(self.config["data"]).std
        return seen(drawn, self.source.images, std, client, rows)

    @functools.cached_property
    def models(self) -> Models:
        """The models that clients deploy after the last checkpoint or `round`: ``models[3].predict(images)``.

        They are made when they are asked for, which fails if there is no checkpoint of that round.
        """
        return Models(self.folder, self.variant, self.changed_code, self._round)

    def export(self, folder: str | Path, clients: Sequence[int] | None = None) -> list[Path]:
        """Write models as safetensors, with a card that says what they are and how to use them.

        Args:
          folder: new or empty folder; a first ``~`` is the home.
          clients: ids of the clients; all by default. A model that clients share is written once.

        Returns:
          The paths of the files.

        Raises:
          JaxflError: if safetensors is not installed, the folder is not empty, or as in `models`; and if only
            images of the data set tell whether the network predicts alone, and they are not available.
        """

        def own(client):
            return self.seen(client, self.partition.test[client][:8])

        return export(self.models, as_path(folder), clients, own)

    def frame(self) -> "pandas.DataFrame":
        """Return a row per round: loss, bytes, accuracies if evaluated (also per architecture), seconds.

        It has the scores of `show`, too, and the run's options in ``frame.attrs``.

        Raises:
          JaxflError: if pandas is not installed.
        """
        pandas = optional("pandas", "pandas", "A frame")
        index = pandas.Index([record["round"] for record in self.metrics], name="round")
        frame = pandas.DataFrame([scalars(record, self.config) for record in self.metrics], index)
        frame.attrs.update(self.config["options"])
        return frame

    def client_frame(self) -> "pandas.DataFrame":
        """Return a row per evaluation and client, with its numbers of training and test rows, and accuracies.

        Raises:
          JaxflError: if pandas is not installed.
        """
        pandas = optional("pandas", "pandas", "A frame")
        personal, clients = self.personal, len(self.partition.train)
        of_clients = [model["name"] for model in self.config["models"] for _ in range(model["clients"])]
        evaluations = len(personal.rounds)
        return pandas.DataFrame(
            {
                "round": np.repeat(personal.rounds, clients),
                "client": np.tile(np.arange(clients), evaluations),
                "architecture": of_clients * evaluations,
                "train_rows": [len(rows) for rows in self.partition.train] * evaluations,
                "test_rows": [len(rows) for rows in self.partition.test] * evaluations,
                "personal": personal.per_client.ravel(),
                "received": self.received.per_client.ravel(),
            }
        )

    @property
    def _round(self) -> Any:
        """The number of the round that is meant; None for that of the last checkpoint."""
        chosen = self.round == "best" and self.metrics
        return best(self.config["label"], self.metrics)["round"] if chosen else self.round

    def _accuracies(self, key: str) -> Accuracies:
        scored = [record for record in self.metrics if key in record]
        clients = sum(model["clients"] for model in self.config["models"])
        return Accuracies(
            np.array([record["round"] for record in scored], int),
            np.array([record[key]["mean"] for record in scored], float),
            np.array([record[key]["per_client"] for record in scored], float).reshape(-1, clients),
        )


def load(folder: Path, changed_code: bool = False, round: int | Literal["best"] | None = None) -> Loaded:
    """Open the folder of a run, finished or still going on; see `Loaded`.

    Raises:
      JaxflError: if the folder holds no run, or its files are damaged.
    """
    folder = folder.absolute()  # the working directory may change before all of it is read
    config, how = store.read_config(folder), {"changed_code": changed_code, "round": round}
    if not store.holds(folder, store.RESULT):
        return Loaded(folder, config, store.read_metrics(folder), None, **how)
    result, metrics = store.read_finished(folder)
    return Loaded(folder, config, metrics, result, **how)
