"""Initial weights from elsewhere: of `--init-from` a run's final models, or the arrays of a file.

What fits is kept with the new run, as named arrays (see `jaxfl.models.named`): a resume asks nobody else.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxfl.config.setup import Setup
from jaxfl.core.engine import traced
from jaxfl.core.final_weights import final_weights
from jaxfl.data import npz
from jaxfl.errors import JaxflError
from jaxfl.machine.processes import agree, on_first_process
from jaxfl.models.named import Arrays, ClientWeights, by_architecture, fit, named
from jaxfl.runs import checkpoint, store
from jaxfl.runs.config import restore
from jaxfl.runs.observer import Observer
from jaxfl.runs.prepare import Data, prepare


def start_from(data: Data, setup: Setup, saved: Path | None, observer: Observer) -> Data:
    """The data whose federation starts from the weights that `--init-from` names; the same without it.

    Args:
      data: of the run.
      setup: its options.
      saved: folder of a run that has begun with them and keeps them.
      observer: is told which architecture starts from where, and which blocks start fresh.

    Raises:
      JaxflError: if there are no such weights, they are damaged or not finite, or no block takes them.
    """
    if not setup.run.init_from:
        return data
    if saved:
        given, whose = _arrays(saved / store.INITIAL), ""
    else:
        places = setup.run.init_from
        given, whose = _first_of([_arrays(Path(place)) for place in places]), " and ".join(places)
    starts, sentences, fresh = [], [], []
    for model, group in zip(data.federation.models, data.federation.groups, strict=True):
        ids = np.asarray(group.id).tolist()
        arrays = _of_architecture(given, model.name)
        models, misfits = fit(arrays or Arrays({}, {}, []), model, ids)
        starts.append(models)
        if arrays is None:
            sentences.append(f"{model.name} starts fresh: {whose} has {', '.join(given)} alone.")
        else:
            sentences.append(_sentence(model.name, whose, arrays, models, misfits, ids))
        fresh.append(bool(misfits))
    if not any(models.shared.params for models in starts):
        raise JaxflError(f"--init-from: nothing fits. {' '.join(sentences)}")
    agree("initial weights", starts)
    if not saved:
        for sentence, warns in zip(sentences, fresh, strict=True):
            (observer.warned if warns else observer.said)(sentence)
    federation = dataclasses.replace(data.federation, initial=tuple(starts))
    return data._replace(federation=federation, starts=tuple(sentences))


def kept(data: Data) -> dict[str, np.ndarray]:
    """What a run keeps of its initial weights, as named arrays; nothing where all are fresh."""
    federation, arrays = data.federation, {}
    for model, group, models in zip(
        federation.models, federation.groups, federation.initial or (), strict=bool(federation.initial)
    ):
        arrays |= named(model.name, models, np.asarray(group.id).tolist())
    return arrays


def final_arrays(folder: Path) -> dict[str, np.ndarray]:
    """What the clients of a run deploy after its newest checkpoint, as named arrays.

    All processes compute it together.

    Raises:
      JaxflError: if it has no checkpoint that can be read, or its data or its method are not at hand.
    """
    config = store.read_config(folder)
    setup, variant = restore(folder, config)
    federation = prepare(setup.replace(devices=None, clients_at_once=None), folder).federation
    key, hyper = jax.random.key(setup.run.seed), traced(variant.config)

    def like():
        return jax.eval_shape(variant.programs.init, key, federation, hyper)

    written, mark = len(store.read_metrics(folder)), store.fingerprint(config)
    done, state = checkpoint.newest(folder, written, like, mark)
    if not done:
        raise JaxflError("it has no checkpoint yet; wait for its first one, or name another run.")
    models = final_weights(variant.algorithm, federation, state, key, done, setup.run.rounds)
    arrays = {}
    for model, group, of_group in zip(federation.models, federation.groups, models, strict=True):
        arrays |= named(model.name, of_group, np.asarray(group.id).tolist())
    return arrays


def _arrays(place: Path) -> dict[str, Arrays]:
    """What a run or a file holds, by architecture."""
    try:
        if on_first_process(place.is_dir)():
            return by_architecture(final_arrays(place))
        if place.suffix == ".npz":
            return by_architecture(on_first_process(npz.read)(place, required=()))
        raise JaxflError("it is neither the folder of a run nor an .npz file of arrays.")
    except JaxflError as error:
        raise JaxflError(f"--init-from {place}: {error}") from error


def _first_of(found: Sequence[dict[str, Arrays]]) -> dict[str, Arrays]:
    """All architectures, each from the first place that has it."""
    return {name: arrays for place in reversed(found) for name, arrays in place.items()}


def _of_architecture(given: dict[str, Arrays], name: str) -> Arrays | None:
    """The arrays of an architecture: by its name, by the name without options if that is one's alone."""
    base, _, _ = name.partition(",")
    alike = [arrays for other, arrays in given.items() if other.partition(",")[0] == base]
    if name in given:
        return given[name]
    return alike[0] if len(alike) == 1 else given.get("")


def _sentence(
    name: str, whose: str, arrays: Arrays, models: ClientWeights, misfits: dict[str, str], ids: Sequence[int]
) -> str:
    """What an architecture starts from, and what of it starts fresh."""
    fresh = ", ".join(f"{block} ({why})" for block, why in misfits.items())
    if not models.shared.params:
        return f"{name} starts fresh: {fresh}."
    own = len(set(ids) & set(arrays.id)) if jax.tree.leaves(models.own) else 0
    of_clients = f", {own} of {len(ids)} clients from models of their own" if own else ""
    return f"{name} starts from {whose}{of_clients}" + (f"; fresh are {fresh}." if fresh else ".")
