"""The models that clients of a run deploy, which predict on images as the data set has them."""

import functools
from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.core.deploy import alone, deployed
from jaxfl.data.absent import NotAtHand
from jaxfl.data.federation import Federation
from jaxfl.data.partition import Partition
from jaxfl.deployed.client_model import Deployed, Images
from jaxfl.errors import JaxflError
from jaxfl.folder import code, store
from jaxfl.folder.config import restore, restore_setup
from jaxfl.folder.records import Config, Round
from jaxfl.folder.variant import Variant
from jaxfl.runs.engine_job import at_rest, saved_state
from jaxfl.runs.observer import ONLY_WARNINGS
from jaxfl.runs.prepare import prepare, prepare_without_data
from jaxfl.runs.recorded_data import images_of, recorded_moments


class Opened(NamedTuple):
    """A run's checkpoint, and what is needed to interpret it."""

    config: Config
    variant: Variant
    setup: Setup
    federation: Federation  # the clients on one device, perhaps without data
    partition: Partition
    images: Images  # their shape, type and normalisation
    state: Any  # state of the method
    record: Round  # metrics of the last round before the checkpoint


class Models(Sequence[Deployed]):
    """The models of all clients of a run by client id, each made on request.

    The data set must be available only for a method that fits what clients deploy to their images.
    """

    def __init__(self, folder: Path, variant: Variant | None, changed_code: bool, rounds: int | None = None):
        """See `jaxfl.deployed.load.Loaded`."""
        self.folder, self._variant, self._changed_code, self._rounds = folder, variant, changed_code, rounds
        self._clients = len(store.read_partition(folder).train)
        self._data = False  # whether to read the data set

    @functools.cached_property
    def opened(self) -> Opened:
        """The checkpoint from which the models are made."""
        return opened(self.folder, self._variant, self._changed_code, self._data, self._rounds)

    def __len__(self) -> int:
        return self._clients

    def __iter__(self) -> Iterator[Deployed]:
        return (self[client] for client in range(len(self)))

    @overload
    def __getitem__(self, client: int) -> Deployed: ...
    @overload
    def __getitem__(self, client: slice) -> list[Deployed]: ...
    def __getitem__(self, client):
        """Return a client's model.

        Raises:
          JaxflError: if there is no such client, the run has no readable checkpoint, the user's own code has
            changed, or the data set is needed and not available.
        """
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        client = self.number(client)
        try:
            return self._deployed(client)
        except NotAtHand:
            self._data = True
            vars(self).pop("opened", None)
            return self._deployed(client)

    def number(self, client: Any) -> int:
        """Return a client's number from 0, given that or a negative one from the end, such as -1.

        Raises:
          JaxflError: if there is no such client.
        """
        clients = range(len(self))
        try:
            return clients[index(client)]
        except (IndexError, TypeError):
            raise JaxflError(
                f"There is no client {client!r}; {self.folder} has clients 0 to {clients[-1]}."
            ) from None

    def _deployed(self, client: int) -> Deployed:
        run = self.opened
        last, rounds = run.record["round"] - 1, run.setup.run.rounds
        key = jax.random.key(run.setup.run.seed)
        predictor = deployed(run.variant.algorithm, run.state, run.federation, key, last, rounds, client)
        _, g = alone(run.federation, client, last, rounds)
        relabel, accuracy = run.partition.relabel[client], run.record["accuracy"]["per_client"][client]
        target = recorded_moments(run.config["data"]).target
        return Deployed(client, run.federation.models[g], run.images, relabel, accuracy, predictor, target)


def opened(
    folder: Path, variant: Variant | None, changed_code: bool, data: bool, rounds: int | None = None
) -> Opened:
    """Read a run's checkpoint."""
    config, metrics = store.read_config(folder), store.read_metrics(folder)
    then = code.latest(folder, config, metrics)
    if not changed_code:
        code.refuse_changed(folder, then)
    if not code.same_package(then):
        ONLY_WARNINGS.warned(
            f"jaxfl has changed since {folder} was computed; its models may predict differently."
        )
    setup = restore_setup(folder, config, changed_code)
    if variant is None:
        setup, variant = restore(folder, config, changed_code)
    partition = store.read_partition(folder)
    if data:
        try:
            made = prepare(setup.replace(devices=1), folder)
        except JaxflError as error:
            raise JaxflError(f"Models of {variant.label} need the data set: {error}") from error
        federation, described = made.federation, images_of(made.source, made.federation)
    else:
        described = config["data"]
        federation = prepare_without_data(setup, described, partition, folder)

    done, state = saved_state(folder, config, variant, setup, federation, rounds)
    if not done:
        raise JaxflError(
            f"{folder} has no checkpoint yet; its models are available after the first evaluation."
        )
    images = Images(
        tuple(described["shape"]),
        np.asarray(federation.mean).dtype if setup.data.shift else np.dtype(described["dtype"]),
        np.asarray(federation.mean),
        np.asarray(federation.std),
        bool(setup.data.shift),
        described.get("vocabulary", 0),
    )
    state = at_rest(variant, setup, federation, state)
    return Opened(config, variant, setup, federation, partition, images, state, metrics[done - 1])
