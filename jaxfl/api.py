"""The same from Python: options as keyword arguments, named as on the command line."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl import registry
from jaxfl.core.protocol import Method
from jaxfl.errors import JaxflError, nearest
from jaxfl.runs import store
from jaxfl.runs.log import Log
from jaxfl.runs.prepare import Setup, check_setup, for_methods, prepare
from jaxfl.runs.run import choose, start


def run(
    method: str | Method, run_dir: str | Path | None = None, log: str | Sequence[str] = (), **options
) -> dict:
    """Train one method.

    Args:
      method: a name, a choice such as ``"compfl,kd=false"``, or a `Method` of your own; a run of the last
        kind cannot be resumed, unless it is named as ``"path/to/my.py:object"``.
      run_dir: a new folder for the results; by default runs/NAME-DATASET.
      log: where else metrics go: ``"tensorboard"``, ``"wandb"`` or both in a list.
      **options: fields of `jaxfl.runs.prepare.Setup` and of the method's configuration.

    Returns:
      The result, see `jaxfl.runs.result.result`.

    Raises:
      JaxflError: if an option is unknown, of another type or out of range, or something is not at hand.
    """
    follow = Log((log,) if isinstance(log, str) else log)
    choice = method if isinstance(method, str) else None
    found, chosen = registry.method(choice) if choice else (method, {})
    of_setup = {field.name for field in dataclasses.fields(Setup)}
    of_method = {field.name for field in dataclasses.fields(found.config)}
    for name in options:
        if name not in of_setup | of_method:
            near = nearest(name, sorted(of_setup | of_method))
            raise JaxflError(f"{found.name} has no option {name!r}; {near}")
    options = {name: _normal(name, value) for name, value in options.items()}
    setup = Setup(**{name: value for name, value in options.items() if name in of_setup})
    chosen |= {name: value for name, value in options.items() if name in of_method}
    check_setup(setup)
    setup = for_methods(setup, [found])
    ready = choose(choice, found, found.config(**chosen))
    folder = Path(run_dir) if run_dir else store.free_folder(found.name, setup.dataset)
    store.check_free(folder)
    with follow:
        return start(folder, ready, setup, prepare(setup), watch=lambda new: follow(folder, new))


def _normal(name: str, value: Any) -> Any:
    """What Python users write for an option, in the type that the option has."""
    match name, value:
        case _, np.generic():
            return value.item()
        case "models", str():
            return (value,)
        case "models", list():
            return tuple(value)
        case "data_dir", str():
            return Path(value)
        case (("dataset" | "partition" | "public"), Path()):
            return str(value)
    return value
