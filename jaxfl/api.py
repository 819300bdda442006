"""The same from Python: options as keyword arguments, named as on the command line."""

import dataclasses
from pathlib import Path

from jaxfl import registry
from jaxfl.errors import JaxflError
from jaxfl.experiment import Setup, prepare
from jaxfl.runs import store
from jaxfl.runs.run import choose, start
from jaxfl.types import Method


def run(method: str | Method, run_dir: str | Path | None = None, **options) -> dict:
    """Train one method.

    Args:
      method: a name, a choice such as ``"compfl,kd=false"``, or a `Method` of your own.
      run_dir: a new folder for the results; by default runs/NAME-DATASET.
      **options: fields of `jaxfl.experiment.Setup` and of the method's configuration.

    Returns:
      The result, see `jaxfl.runs.result.result`.

    Raises:
      JaxflError: if an option is unknown or out of range, or something is not at hand.
    """
    choice = method if isinstance(method, str) else method.name
    found, chosen = registry.method(method) if isinstance(method, str) else (method, {})
    of_setup = {field.name for field in dataclasses.fields(Setup)}
    of_method = {field.name for field in dataclasses.fields(found.config)}
    for name in options:
        if name not in of_setup | of_method:
            near = registry.nearest(name, sorted(of_setup | of_method))
            raise JaxflError(f"{found.name} has no option {name!r}; {near}")
    setup = Setup(**{name: value for name, value in options.items() if name in of_setup})
    chosen |= {name: value for name, value in options.items() if name in of_method}
    ready = choose(choice, choice, found, found.config(**chosen))
    folder = Path(run_dir) if run_dir else store.free_folder(found.name, setup.dataset)
    return start(folder, ready, setup, prepare(setup), watch=lambda new: None)
