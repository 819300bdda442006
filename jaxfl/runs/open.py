"""The folder of a run, made for its first round or opened at its newest checkpoint."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxfl.config.setup import Setup
from jaxfl.config.values import as_path
from jaxfl.folder import checkpoint, code, store
from jaxfl.folder.config import described
from jaxfl.folder.moved_paths import moved
from jaxfl.folder.records import Config
from jaxfl.folder.variant import Variant
from jaxfl.machine.environment import environment
from jaxfl.machine.processes import agree
from jaxfl.runs.engine_job import saved_state
from jaxfl.runs.init_from import initial_arrays
from jaxfl.runs.loop import Run
from jaxfl.runs.prepare import Data
from jaxfl.runs.recorded_data import images_of


def begin(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Make the folder of a new run, with data from `fit_to_machine`; `watch` gets its metrics as they come.

    Raises:
      JaxflError: if the folder is not free or cannot be written.
    """
    chosen, federation = described(variant, setup), data.federation
    # A resume computes as this machine does.
    chosen["options"] |= {"clients_at_once": federation.clients_at_once, "devices": federation.devices}
    now = code.present(chosen)
    agree("code", now)
    config: Config = {
        **chosen,
        "models": [
            {"name": model.name, "clients": count, "parameters": model.size, "note": model.note}
            for model, count in data.models
        ],
        "data": images_of(data.source, data.federation, data.others),
        "starts": list(data.starts),
        "environment": environment() | {"folder": str(folder.resolve())},
        "code": now,
    }
    store.begin(folder, config, data.partition, data.source, federation.links, initial_arrays(data))
    return Run(folder, config, variant, setup.machine, now, watch, [], new=True)


def reopen(folder: Path, variant: Variant, setup: Setup, data: Data, watch: Callable) -> Run:
    """Reopen a run at its newest checkpoint, with data from `prepare` with its partition.

    Raises:
      JaxflError: if there are checkpoints and none can be read, or one belongs to another configuration.
    """
    config = store.read_config(folder)
    done, state = saved_state(folder, config, variant, setup, data.federation)
    now = code.present(moved(folder, config, code=True))
    agree("checkpoints", done)
    agree("code", now)
    metrics = store.trim(folder, done)
    taken_over = None if code.same(code.latest(folder, config, metrics), now) else done
    place = setup.machine.data_dir and str(as_path(setup.machine.data_dir).absolute())
    for option, now_ in (("devices", data.federation.devices), ("data_dir", place)):
        if now_ != config["options"].get(option):
            config = store.change(folder, option, now_)
    checkpoint.trim(folder, done, setup.machine.keep_checkpoints)
    state = jax.device_get(state)  # a run of several waits, while the device has other work
    return Run(folder, config, variant, setup.machine, now, watch, metrics, state, taken_over=taken_over)
