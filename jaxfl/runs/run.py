"""One run, from configuration to result: simulate, write down, save."""

import dataclasses
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxfl import registry
from jaxfl.cohorts import draw_cohorts
from jaxfl.data import partition as partitions
from jaxfl.engine import Programs, programs, simulate, traced
from jaxfl.errors import JaxflError
from jaxfl.experiment import Data, Setup, prepare
from jaxfl.options import check
from jaxfl.runs import checkpoint, store
from jaxfl.runs.plot import draw_curves
from jaxfl.runs.result import records, result
from jaxfl.types import Method


class Chosen(NamedTuple):
    """A method with its options, ready to run.

    Args:
      choice: as the user named it: ``fedper`` or ``path/to/my.py:my_method``.
      label: in tables: the name, and what was chosen otherwise than by default.
      method: the method.
      config: its options.
      programs: its compiled programs, shared by runs with other seeds.
    """

    choice: str
    label: str
    method: Method
    config: Any
    programs: Programs


def choose(choice: str, label: str, method: Method, config: Any) -> Chosen:
    """Check a method's options and prepare its programs."""
    check(method.name, config)
    return Chosen(choice, label, method, config, programs(method.build(config)))


def start(folder: Path, chosen: Chosen, setup: Setup, data: Data, watch: Callable) -> dict:
    """Begin a new run in a new folder and run it to its end.

    Args:
      folder: must not exist, or be empty.
      chosen: the method.
      setup: the options of the run.
      data: from `prepare` with the same setup.
      watch: called with the metrics of every round as they come.

    Returns:
      The result, see `jaxfl.runs.result.result`.

    Raises:
      JaxflError: if the folder is not free, or the loss is no longer finite. What was computed before
        stays in the folder.
    """
    store.create(folder)
    config = {
        "method": chosen.choice,
        "label": chosen.label,
        "options": _plain(setup) | _plain(chosen.config),
        "environment": environment(),
    }
    partitions.save(data.partition, folder / store.PARTITION)
    store.write_json(folder / store.CONFIG, config)
    return _continue(folder, config, chosen, setup, data, watch, done=0)


def resume(folder: Path, watch: Callable) -> dict:
    """Continue a run from the last checkpoint up to which its metrics are complete.

    A finished run returns its result at once.

    Raises:
      JaxflError: if the folder holds no run, or a checkpoint is damaged or foreign.
    """
    config = store.read_config(folder)
    if (folder / store.RESULT).exists():
        return store.read_json(folder / store.RESULT)
    setup, chosen = restore(folder, config)
    data = prepare(setup, folder / store.PARTITION)
    written = len(store.read_metrics(folder))
    done = max((rounds for rounds in checkpoint.saved(folder) if rounds <= written), default=0)
    return _continue(folder, config, chosen, setup, data, watch, done)


def restore(folder: Path, config: dict) -> tuple[Setup, Chosen]:
    """The setup and the method that a run's configuration describes."""
    method, _ = registry.method(config["method"])
    options = dict(config["options"])
    try:
        setup = Setup(**{field.name: options.pop(field.name) for field in dataclasses.fields(Setup)})
        chosen = choose(config["method"], config["label"], method, method.config(**options))
    except (KeyError, TypeError) as error:
        raise JaxflError(
            f"{folder / store.CONFIG} does not fit this version of jaxfl ({error}); the run was made by "
            f"jaxfl {config['environment']['jaxfl']}."
        ) from None
    data_dir = Path(setup.data_dir) if setup.data_dir else None
    return dataclasses.replace(setup, data_dir=data_dir, models=tuple(setup.models)), chosen


def _continue(folder, config, chosen, setup, data, watch, done) -> dict:
    mark = store.fingerprint(config)
    key = jax.random.key(setup.seed)
    counts = [count for _, count in data.models]
    cohorts = draw_cohorts(counts, setup.participation, setup.rounds, setup.seed)
    metrics = store.keep_metrics(folder, done)
    checkpoint.keep(folder, done)
    state = None
    if done:
        like = jax.eval_shape(chosen.programs.init, key, data.federation, traced(chosen.config))
        state = checkpoint.load(folder, done, like, mark)
    compiled = chosen.programs.seconds
    for chunk in simulate(
        chosen.programs,
        data.federation,
        chosen.config,
        cohorts,
        key,
        eval_every=setup.eval_every,
        start=done,
        state=state,
    ):
        new = records(chunk, data.federation, cohorts, chosen.programs.seconds - compiled)
        compiled = chosen.programs.seconds
        store.append_metrics(folder, new)
        metrics += new
        watch(new)
        if chunk.diverged:
            round_, client = chunk.diverged
            raise JaxflError(
                f"{chosen.label}: the loss of client {client} is no longer finite in round {round_ + 1}; "
                f"lower --lr (now {chosen.config.lr}); what came before is in {folder}."
            )
        rounds = new[-1]["round"]
        if rounds == setup.rounds or rounds % (setup.checkpoint_every or setup.eval_every) == 0:
            checkpoint.save(folder, rounds, chunk.state, mark)
    summary = result(config, metrics, chosen.programs.compilations)
    draw_curves({chosen.label: [metrics]}, folder / "curves.png")
    store.write_json(folder / store.RESULT, summary)
    return summary


def environment() -> dict:
    """Versions and the device, as a run's folder records them."""
    packages = ("jaxfl", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    device = jax.devices()[0]
    return {name: version(name) for name in packages} | {
        "python": platform.python_version(),
        "device": f"{device.platform} {device.device_kind}",
        "devices": jax.device_count(),
    }


def _plain(config: Any) -> dict:
    """A dataclass as JSON values."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }
