"""A run's folder, opened from Python: its numbers as arrays, its models, what its method knows of clients."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxfl.data.normalisation import training_moments
from jaxfl.data.partition import Partition
from jaxfl.data.shift import seen
from jaxfl.data.sources import Source
from jaxfl.errors import JaxflError, optional
from jaxfl.runs import store
from jaxfl.runs.config import restore_setup
from jaxfl.runs.deployed import Models
from jaxfl.runs.export import export
from jaxfl.runs.findings import over_rounds
from jaxfl.runs.log import scalars
from jaxfl.runs.prepare import draw_shift, load_source
from jaxfl.runs.variant import Variant

if TYPE_CHECKING:
    import pandas


class Accuracies(NamedTuple):
    """Accuracies of one moment, as fractions, at every evaluation.

    Args:
      rounds: (E,) int, after which rounds, counted from 1.
      mean: (E,), over clients.
      per_client: (E, N), of each client on its own test rows, by its id.
    """

    rounds: np.ndarray
    mean: np.ndarray
    per_client: np.ndarray


@dataclass(frozen=True, eq=False)
class Loaded:
    """A run, finished or still going on, as its folder was when it was opened.

    Attributes:
      folder: of the run.
      config: what config.json says: method, label, options, models, environment.
      metrics: a record per round so far, see `jaxfl.runs.result.records`.
      result: the summary, see `jaxfl.runs.result.result`; None of a run that has not finished.
      variant: the method, where it is an object that cannot be found again by its name.
      changed_code: whether models are made though your own files have changed since.
    """

    folder: Path
    config: dict
    metrics: list[dict]
    result: dict | None
    variant: Variant | None = None
    changed_code: bool = False

    def __repr__(self) -> str:
        """In a line: what it is, how far it has come, and where it lies."""
        options = self.config["options"]
        done = f"{len(self.metrics)} of {options['rounds']} rounds"
        if len(self.personal.mean):
            done += f", accuracy {100 * self.personal.mean[-1]:.1f} %"
        return f"<{self.config['label']}, seed {options['seed']}: {done}; {self.folder}>"

    @property
    def personal(self) -> Accuracies:
        """Of the models that clients deploy."""
        return self._accuracies("accuracy")

    @property
    def received(self) -> Accuracies:
        """Of the models that clients start a round from, before local training."""
        return self._accuracies("received")

    @property
    def loss(self) -> np.ndarray:
        """(R,), of every round the mean training loss; NaN where it is not finite, or nobody answered."""
        return np.array([record["loss"] for record in self.metrics], float)

    @property
    def bytes_up(self) -> np.ndarray:
        """(R,) int, what the clients of each round have sent."""
        return np.array([record["bytes_up"] for record in self.metrics], np.int64)

    @property
    def bytes_down(self) -> np.ndarray:
        """(R,) int, what the clients of each round have received."""
        return np.array([record["bytes_down"] for record in self.metrics], np.int64)

    @property
    def seconds(self) -> dict[str, np.ndarray]:
        """{"compile", "train", "evaluate", "write": (R,)}; rounds up to an evaluation are one, it has theirs.

        "write" is what was written since the evaluation before.
        """
        parts = ("compile", "train", "evaluate", "write")
        timed = [record.get("seconds", {}) for record in self.metrics]
        return {part: np.array([of_round.get(part, 0.0) for of_round in timed], float) for part in parts}

    @property
    def matrices(self) -> dict[str, np.ndarray]:
        """What the method knows about pairs of clients, {name: (N, N)}, after the last checkpoint."""
        return store.newest_about_clients(self.folder, "matrices")

    @property
    def embeddings(self) -> dict[str, np.ndarray]:
        """The vectors by which it describes clients, {architecture: (n, d)}, after the last checkpoint."""
        return store.newest_about_clients(self.folder, "embeddings")

    @property
    def findings(self) -> dict[str, dict[str, np.ndarray] | list]:
        """What the method has found out, round by round; nothing of most methods.

        Returns:
          {panel: {line: (R,)}} of numbers, NaN where there is none, such as FedCMD's score of every layer;
          any other form is a list with an entry per round, such as the networks that pFedClub assembled.
        """
        return over_rounds(self.metrics)

    @functools.cached_property
    def partition(self) -> Partition:
        """Whose rows of the data set are whose, and how each client numbers the classes."""
        return store.read_partition(self.folder)

    @functools.cached_property
    def source(self) -> Source:
        """The data set, loaded when it is asked for: images, labels.

        Raises:
          JaxflError: if it is not at hand.
        """
        return load_source(restore_setup(self.folder, self.config))

    def seen(self, client: int, rows: np.ndarray) -> np.ndarray:
        """Images of the data set as a client sees them, which is as they are unless there is a `--shift`.

        Args:
          client: its id.
          rows: (B,) positions in `source`, at least one.

        Returns:
          (B, H, W, C), in raw units: what ``models[client].predict`` takes.

        Raises:
          JaxflError: if the data set is not at hand, or there is no such client or row.
        """
        setup, clients = restore_setup(self.folder, self.config), len(self.partition.train)
        rows, count = np.asarray(rows), len(self.source.labels)
        if not 0 <= client < clients:
            raise JaxflError(f"There is no client {client}; they go from 0 to {clients - 1}.")
        if (missing := rows[(rows < 0) | (rows >= count)]).size:
            raise JaxflError(f"There is no row {missing[0]}; they go from 0 to {count - 1}.")
        if not setup.data.shift:
            return self.source.images[rows]
        drawn = draw_shift(setup, self.source, clients)
        _, std = training_moments(self.source)
        return seen(drawn, self.source.images, std, client, rows)

    @functools.cached_property
    def models(self) -> Models:
        """What clients deploy after the last checkpoint: ``models[3].predict(images)``."""
        return Models(self.folder, self.variant, self.changed_code)

    def export(self, folder: str | Path, clients: Sequence[int] | None = None) -> list[Path]:
        """Write models as safetensors, with a card that says what they are and how to use them.

        Args:
          folder: new or empty.
          clients: whose models; all by default. One that clients share is written once.

        Returns:
          The files.

        Raises:
          JaxflError: if safetensors is not installed, the folder is not empty, or as `models`.
        """
        return export(self.models, Path(folder), clients)

    def frame(self) -> "pandas.DataFrame":
        """A row per round: loss, bytes, accuracies where evaluated (also per architecture), seconds.

        Raises:
          JaxflError: if pandas is not installed.
        """
        pandas = optional("pandas", "pandas", "A frame")
        index = pandas.Index([record["round"] for record in self.metrics], name="round")
        return pandas.DataFrame([scalars(record) for record in self.metrics], index)

    def client_frame(self) -> "pandas.DataFrame":
        """A row per evaluation and client: round, client, architecture, training rows, personal, received.

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
                "rows": [len(rows) for rows in self.partition.train] * evaluations,
                "personal": personal.per_client.ravel(),
                "received": self.received.per_client.ravel(),
            }
        )

    def _accuracies(self, key: str) -> Accuracies:
        scored, clients = [record for record in self.metrics if key in record], len(self.partition.train)
        return Accuracies(
            np.array([record["round"] for record in scored], int),
            np.array([record[key]["mean"] for record in scored], float),
            np.array([record[key]["per_client"] for record in scored], float).reshape(-1, clients),
        )


def load(folder: Path, changed_code: bool = False) -> Loaded:
    """Open the folder of a run, finished or still going on.

    Raises:
      JaxflError: if the folder holds no run, or its files are damaged.
    """
    config = store.read_config(folder)
    if not store.holds(folder, store.RESULT):
        return Loaded(folder, config, store.read_metrics(folder), None, changed_code=changed_code)
    result, metrics = store.read_finished(folder)
    return Loaded(folder, config, metrics, result, changed_code=changed_code)
