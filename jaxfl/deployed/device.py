"""Single clients of a run: what devices of a real federation begin with, and their own data."""

import functools
from pathlib import Path

import jax
import numpy as np

from jaxfl.core.engine import initial_state
from jaxfl.core.host_state import all_of
from jaxfl.core.node import Arrays, Node, of_client, sent_to_all
from jaxfl.core.protocol import Averaged
from jaxfl.data.one_client import Own, of_one_client
from jaxfl.deployed.load import load
from jaxfl.deployed.models import Opened, opened
from jaxfl.errors import JaxflError
from jaxfl.runs.init_from import started
from jaxfl.runs.observer import ONLY_WARNINGS


def opened_at(folder: Path, after: int | None = None) -> tuple[Opened, Averaged]:
    """Open a run with the state from which an app goes on with it, and what the app's server averages.

    `after` is the number of rounds done: that of a checkpoint, by default the newest one, or 0.

    Raises:
      JaxflError: if there is no such state, the run has several architectures, or its method needs more than
        a server that averages.
    """
    run = opened(folder, None, changed_code=False, data=False, rounds=after or None)
    run = run._replace(state=all_of(run.state))
    algorithm, label, models = run.variant.algorithm, run.variant.label, run.federation.models
    if len(models) > 1:
        raise JaxflError(
            f"{folder} has {len(models)} architectures ({', '.join(model.name for model in models)}), and a "
            f"server that only averages has one; repeat the run with --models {models[0].choice}."
        )
    if algorithm.averaged is None or algorithm.host or algorithm.prepare:
        raise JaxflError(
            f"{label} needs more than a server that averages what clients send: its server does something "
            "else, or it or a client keeps more than weights; choose fedavg, fedprox, fedper or fedrep."
        )
    if run.federation.wire is not None:
        raise JaxflError(
            f"{folder} has something on the wire (--privacy, --compress, --attack or --aggregate), which is "
            "simulated only; repeat the run without."
        )
    if not sent_to_all(algorithm.averaged, run.state):
        raise JaxflError(f"{label} sends nothing; choose a method whose clients share something.")
    if after == 0:
        federation, _ = started(run.federation, run.setup, folder, ONLY_WARNINGS)
        key = jax.random.key(run.setup.run.seed)
        run = run._replace(state=initial_state(run.variant.programs, federation, run.variant.config, key))
    return run, algorithm.averaged


# Every node of a process begins with the same run.
_of_process, _loaded = functools.lru_cache(maxsize=1)(opened_at), functools.lru_cache(maxsize=1)(load)


def sent_first(folder: Path, after: int) -> Arrays:
    """Return what the server sends first; arguments and errors are those of `opened_at`."""
    run, averaged = _of_process(folder, after)
    return sent_to_all(averaged, run.state)


def node(folder: Path, client: int, after: int, own: Own | None = None) -> Node:
    """Return a single client of a run after some rounds, see `opened_at`.

    Its id in the run decides its mini-batches and what it keeps at first. By default its `own` images are
    those that it has in the run.

    Raises:
      JaxflError: as in `opened_at`, or if there is no such client, the images differ in shape or type from
        the run's, or the run's data set is needed and not available.
    """
    run, averaged = _of_process(folder, after)
    ids = np.asarray(run.federation.groups[0].id).tolist()
    if client not in ids:
        raise JaxflError(f"There is no client {client}; {folder} has clients 0 to {len(ids) - 1}.")
    own = Own(*map(np.asarray, own or _in_the_run(folder, run, client)))
    shape, dtype = run.images.shape, run.images.dtype
    for images in (own.images, own.test_images):
        if images.shape[1:] != shape or images.dtype != dtype:
            raise JaxflError(
                f"Client {client} has images {images.shape} of {images.dtype}; those of {folder} are "
                f"({', '.join(map(str, ('n', *shape)))}) of {dtype}."
            )
    state = of_client(averaged, run.state, ids.index(client))
    federation, key = of_one_client(own, run.federation, client), jax.random.key(run.setup.run.seed)
    return Node(run.variant.programs, averaged, federation, state, key, run.setup.run.schedule)


def _in_the_run(folder: Path, run: Opened, client: int) -> Own:
    loaded, train, test = _loaded(folder), run.partition.train[client], run.partition.test[client]
    labels = loaded.source.labels
    return Own(loaded.seen(client, train), labels[train], loaded.seen(client, test), labels[test])
