"""Initial weights from `--init-from`: a run's final models, or the arrays of a file; or `--initial own`.

What fits is kept with the new run, as named arrays (see `jaxfl.models.named`), which a resume reads.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.config.values import as_path
from jaxfl.core.deploy import final_weights
from jaxfl.data import npz, saved_partition
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.errors import JaxflError
from jaxfl.folder import code, store
from jaxfl.folder.config import restore
from jaxfl.machine import files
from jaxfl.machine.processes import agree, on_first_process
from jaxfl.models.model import Model
from jaxfl.models.named import Arrays, ClientWeights, by_architecture, fit, named
from jaxfl.runs.engine_job import at_rest, saved_state
from jaxfl.runs.observer import ONLY_WARNINGS, Observer
from jaxfl.runs.prepare import Data, prepare


class Given(NamedTuple):
    """The name of an architecture, its arrays, and the run or file that holds them."""

    name: str
    arrays: Arrays
    place: Path


def start_from(data: Data, setup: Setup, saved: Path | None, observer: Observer) -> Data:
    """Return the data with a federation that starts from the weights of `--init-from`; see `started`."""
    federation, sentences = started(data.federation, setup, saved, observer)
    for place in () if saved else map(as_path, setup.run.init_from):
        if not files.reads(Path.is_dir)(place):
            continue
        if not _numbered_alike(data.partition.relabel, place):
            observer.warned(
                f"--init-from {place}: its clients number their classes otherwise than these; outputs of "
                "heads that are taken mean other classes."
            )
        words = on_first_process(saved_partition.words)(place / store.PARTITION)
        if len(words) == data.source.vocabulary and words != [*data.source.words]:
            observer.warned(
                f"--init-from {place}: its text has other words; embeddings and heads that are taken mean "
                "other tokens."
            )
    return data._replace(federation=federation, starts=sentences)


def _numbered_alike(ours: np.ndarray, run: Path) -> bool:
    """Return whether clients number classes as those of a run do: (N, classes) -> outputs, see `Partition`.

    If all clients of either number alike, their number may differ, and so may the data set.
    """
    theirs = on_first_process(npz.read)(run / store.PARTITION, required=("relabel",))["relabel"]
    if np.array_equal(ours, theirs):
        return True
    unified = all((of_all == of_all[:1]).all() for of_all in (ours, theirs))
    return unified and (ours.shape[1] != theirs.shape[1] or np.array_equal(ours[0], theirs[0]))


def started(
    federation: Federation, setup: Setup, saved: Path | None, observer: Observer
) -> tuple[Federation, tuple[str, ...]]:
    """Return the federation with the initial weights that the setup asks for, and the sentences on them.

    The run `saved` began with these weights and keeps them. Otherwise the observer is told which architecture
    starts from where, and which blocks start fresh.

    Raises:
      JaxflError: if there are no such weights, they are damaged or not finite, no block takes them, or both
        options ask for others.
    """
    apart = setup.run.initial == "own"
    if not setup.run.init_from:
        return dataclasses.replace(federation, apart=apart), ()
    if apart:
        raise JaxflError("--initial own draws what --init-from gives; leave one of them out.")
    places = [saved / store.INITIAL] if saved else [*map(as_path, setup.run.init_from)]
    given = [Given(name, array, place) for place in places for name, array in _arrays(place).items()]
    starts, sentences, tell = [], [], []
    for model, group in zip(federation.models, federation.groups, strict=True):
        ids = np.asarray(group.id).tolist()
        found, weights, misfits = _fitted(given, model, ids)
        starts.append(weights)
        sentences.append(_sentence(model.name, given, found, weights, misfits))
        tell.append(observer.warned if misfits else observer.said)
    if not any(weights.shared.params for weights in starts):
        raise JaxflError(f"--init-from: nothing fits. {' '.join(sentences)}")
    agree("initial weights", starts)
    if not saved:
        for say, sentence in zip(tell, sentences, strict=True):
            say(sentence)
    return dataclasses.replace(federation, initial=tuple(starts)), tuple(sentences)


def initial_arrays(data: Data) -> dict[str, np.ndarray]:
    """Return the initial weights that a run keeps, as named arrays; none if all are fresh."""
    return _as_arrays(data.federation, data.federation.initial) if data.federation.initial else {}


def final_arrays(folder: Path) -> dict[str, np.ndarray]:
    """Return the weights that clients of a run deploy after its newest checkpoint, as named arrays.

    All processes compute them together.

    Raises:
      JaxflError: if the run has no readable checkpoint, or its data or its method are not available.
    """
    config = store.read_config(folder)
    if changed := code.changed(code.latest(folder, config, store.read_metrics(folder))):
        ONLY_WARNINGS.warned(f"{changed[0]} has changed since {folder} was computed; its weights may differ.")
    setup, variant = restore(folder, config)
    federation = prepare(setup.replace(devices=None, clients_at_once=None), folder).federation
    done, state = saved_state(folder, config, variant, setup, federation)
    if not done:
        raise JaxflError(f"{folder} has no checkpoint yet; wait for its first one, or name another run.")
    key, rounds = jax.random.key(setup.run.seed), setup.run.rounds
    state = at_rest(variant, setup, federation, state)
    return _as_arrays(federation, final_weights(variant.algorithm, federation, state, key, done, rounds))


def _as_arrays(federation: Federation, weights: PerGroup) -> dict[str, np.ndarray]:
    """Return weights as named arrays: per group `ClientWeights`."""
    arrays = {}
    for group, of_group in zip(federation.groups, weights, strict=True):
        arrays |= named(group.model.name, of_group, np.asarray(group.id).tolist())
    return arrays


def _arrays(place: Path) -> dict[str, Arrays]:
    try:
        if files.reads(Path.is_dir)(place):
            return by_architecture(final_arrays(place))
        if place.suffix == ".npz":
            return by_architecture(on_first_process(npz.read)(place, required=()))
        raise JaxflError("it is neither the folder of a run nor an .npz file of arrays.")
    except JaxflError as error:
        raise JaxflError(f"--init-from {place}: {error}") from error


def _fitted(
    given: list[Given], model: Model, ids: list[int]
) -> tuple[Given | None, ClientWeights, dict[str, str]]:
    """Return what an architecture is given, and what of it fits, see `fit`.

    An architecture that is alone in its run has a name without options, and arrays of a file may have no
    name. So the first choice is one with the same name of which a block fits. Otherwise it is one whose name
    differs only in options or is missing: first one that fits wholly, then one of which a block fits.
    """
    base, _, _ = model.name.partition(",")
    alike = [one for one in given if one.name.partition(",")[0] == base]
    alike += [one for one in given if not one.name]
    fitted = [(one, *fit(one.arrays, model, ids)) for one in alike]
    same = [found for found in fitted if found[0].name == model.name]
    whole = [found for found in fitted if not found[2]]

    def partly(candidates):
        return [found for found in candidates if found[1].shared.params]

    only = fitted if len(fitted) == 1 else []
    for found in partly(same) + whole + partly(fitted) + same + only:
        return found
    return None, *fit(Arrays({}, {}, []), model, ids)


def _sentence(
    name: str, given: list[Given], found: Given | None, weights: ClientWeights, misfits: dict[str, str]
) -> str:
    """Say what an architecture starts from, and which blocks start fresh."""
    fresh = ", ".join(f"{block} ({why})" for block, why in misfits.items())
    if found is None:
        places = " and ".join(dict.fromkeys(str(one.place) for one in given))
        names = (
            ", ".join(dict.fromkeys(one.name or "arrays of no architecture" for one in given)) or "nothing"
        )
        return f"{name} starts fresh: {places} has only {names}."
    if not weights.shared.params:
        return f"{name} starts fresh: {found.place} does not fit in {fresh}."
    own = ", clients from models of their own" if jax.tree.leaves(weights.own) else ""
    return f"{name} starts from {found.place}{own}" + (f"; these start fresh: {fresh}." if fresh else ".")
