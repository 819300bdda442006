"""Checkpoints of an algorithm's state, by Orbax. The only module that knows it.

A state is stored as a flat dict of named arrays, so its container types may change between versions. Several
processes all save and load, for Orbax keeps them in step; of NumPy arrays it lets the first alone write.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from jaxfl.errors import JaxflError, quiet, writing
from jaxfl.processes import by_first
from jaxfl.runs.store import CHECKPOINTS


def save(folder: Path, rounds: int, state: Any, fingerprint: str) -> None:
    """Write the state after some rounds; Orbax makes the folder appear only when it is complete.

    Args:
      folder: of the run.
      rounds: rounds done.
      state: pytree of arrays.
      fingerprint: of the run's configuration.
    """
    path = folder / CHECKPOINTS / str(rounds)
    with writing(path):
        leaves = _named(jax.device_get(state))
        ocp.save(path.absolute(), leaves, custom_metadata={"fingerprint": fingerprint})
    _drop_older(folder)


@by_first
def _drop_older(folder: Path) -> None:
    for older in saved(folder)[:-2]:  # the last two are kept, should the newest be damaged
        shutil.rmtree(folder / CHECKPOINTS / str(older))


@by_first
def saved(folder: Path) -> list[int]:
    """The numbers of rounds after which there is a checkpoint, ascending."""
    return sorted(int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdigit())


@by_first
def keep(folder: Path, rounds: int) -> None:
    """Drop later checkpoints than the one after `rounds` rounds, and any that is not complete."""
    for path in (folder / CHECKPOINTS).glob("*"):
        if not path.name.isdigit() or int(path.name) > rounds:
            shutil.rmtree(path)


def load(folder: Path, rounds: int, like: Any, fingerprint: str) -> Any:
    """Read a state.

    Args:
      folder: of the run.
      rounds: one of `saved`.
      like: pytree of the same structure, shapes and dtypes.
      fingerprint: of the run's configuration.

    Returns:
      The state, with NumPy leaves.

    Raises:
      JaxflError: if it is damaged, or belongs to another configuration.
    """
    path = (folder / CHECKPOINTS / str(rounds)).absolute()
    wanted = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _named(like).items()}
    try:
        with quiet():
            found = ocp.metadata(path)
            written_by = found.custom_metadata["fingerprint"]
            shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in found.metadata.items()}
            same = shapes == {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
            leaves = ocp.load(path, wanted) if written_by == fingerprint and same else None
    except Exception as error:  # whatever Orbax meets in a damaged folder
        raise JaxflError(
            f"The checkpoint {path} is damaged ({type(error).__name__}); delete this folder to resume "
            "from the one before."
        ) from error
    if leaves is None:
        raise JaxflError(
            f"The checkpoint {path} belongs to another configuration than {folder / 'config.json'}; "
            "resume the run that wrote it."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _named(like)])


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
