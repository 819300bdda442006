"""Checkpoints of an algorithm's state, the only module that uses Orbax.

A state is stored as a flat dict of named arrays, so its container types may change between versions. With
several processes, all save and load, because Orbax keeps them in step. Each writes its shard of what is
divided among them; the first one writes everything else.
"""

import hashlib
import math
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.folder.store import CHECKPOINTS
from jaxfl.machine.files import reads, replacing, unwritable, writes
from jaxfl.machine.packages import quiet
from jaxfl.machine.processes import ends_all

ORBAX = threading.Lock()  # several threads of a process may train, and break each other's checkpoints
SUMS = "SHA256SUMS"  # digests of a checkpoint's files, for `sha256sum -c`


class Damaged(JaxflError):
    """A checkpoint that cannot be read."""


def save(folder: Path, rounds: int, state: Any, fingerprint: str, keep: int) -> None:
    """Write the state after some rounds, and keep only the last `keep` checkpoints.

    The folder appears only when Orbax has completed it. It is marked by the fingerprint of the run's
    configuration.

    Raises:
      JaxflError: if it cannot be written. Of several processes, one that cannot write ends all.
    """
    from orbax.checkpoint import v1 as ocp  # here, so that commands without checkpoints do not wait for it

    path = folder / CHECKPOINTS / str(rounds)
    where: Any = path.absolute()  # Orbax annotates its own type of path
    try:
        with ORBAX, quiet():
            leaves = _named(jax.tree.map(_on_host, state))
            ocp.save(where, leaves, custom_metadata={"fingerprint": fingerprint})
    except TimeoutError:  # another process did not finish, and says why
        raise
    except (OSError, ValueError) as error:  # ValueError: the array writer found the disk full
        raise ends_all(unwritable(path, error)) from error
    _seal(path)
    trim(folder, rounds, keep)


@reads
def saved(folder: Path, rounds: float = math.inf) -> list[int]:
    """Return the rounds up to `rounds` that have a checkpoint, in ascending order."""
    found = [int(path.name) for path in (folder / CHECKPOINTS).glob("*") if path.name.isdecimal()]
    return sorted(number for number in found if number <= rounds)


@writes
def trim(folder: Path, rounds: int, keep: int) -> None:
    """Keep the last `keep` checkpoints up to round `rounds`; delete all others and incomplete ones."""
    kept = [str(number) for number in saved(folder, rounds)[-keep:]]
    for path in (folder / CHECKPOINTS).glob("*"):
        if path.name not in kept:
            shutil.rmtree(path)


def newest(folder: Path, rounds: int, like: Callable[[], Any], fingerprint: str) -> tuple[int, Any]:
    """Load the newest readable checkpoint of the first `rounds` rounds; warn of unreadable ones.

    `like` makes a pytree of the state's structure, shapes and dtypes.

    Returns:
      The number of rounds done and the state; 0 and None without a checkpoint.

    Raises:
      JaxflError: if there are checkpoints and none can be read, or one belongs to another configuration.
    """
    numbers = saved(folder, rounds)
    if not numbers:
        return 0, None
    like = like()
    for number in reversed(numbers):
        try:
            return number, load(folder, number, like, fingerprint)
        except Damaged as error:
            warnings.warn(f"{error} It is skipped.", stacklevel=2)
    raise JaxflError(
        f"No checkpoint in {folder / CHECKPOINTS} can be read; delete {folder / CHECKPOINTS} and resume "
        f"{folder} to repeat its rounds from the first one."
    )


def load(folder: Path, rounds: int, like: Any, fingerprint: str) -> Any:
    """Return the state after one of the `saved` numbers of rounds, in the form of `like`, in NumPy arrays.

    Raises:
      Damaged: if it cannot be read, or is not what was written.
      JaxflError: if it belongs to another configuration, or to a jaxfl with another form of state.
    """
    from orbax.checkpoint import v1 as ocp

    path: Any = (folder / CHECKPOINTS / str(rounds)).absolute()
    wanted = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in _named(like).items()}
    _check_seal(path)
    try:
        with ORBAX, quiet():
            found: Any = ocp.metadata(path)
            written_by = found.custom_metadata["fingerprint"]
            shapes = {name: (leaf.shape, leaf.dtype) for name, leaf in found.metadata.items()}
            expected = {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}
            other = next((name for name in shapes | expected if shapes.get(name) != expected.get(name)), None)
            leaves = ocp.load(path, wanted) if written_by == fingerprint and other is None else None
    except Exception as error:  # whatever Orbax raises for a damaged folder
        raise Damaged(f"The checkpoint {path} cannot be read ({type(error).__name__}).") from error
    if leaves is None and written_by == fingerprint:
        raise JaxflError(
            f"The checkpoint {path} is from a version of jaxfl whose models or states had other "
            f"shapes, or from JAX with another jax_enable_x64 ({other} differs); use what it was written "
            "with, or repeat the run with `jaxfl run --from`."
        )
    if leaves is None:
        raise JaxflError(
            f"The checkpoint {path} belongs to another configuration than {folder / 'config.json'}; "
            "resume the run that wrote it."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _named(like)])


@writes
def _seal(path: Path) -> None:
    """Write the digests of a checkpoint's files, because Orbax does not notice a changed number."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    sums = "".join(f"{_digest(file)}  {file.relative_to(path)}\n" for file in files)
    with replacing(path / SUMS) as file:
        file.write(sums.encode())


@reads
def _check_seal(path: Path) -> None:
    """Compare a checkpoint's files with their digests; accept a checkpoint without digests.

    Raises:
      Damaged: naming a file that has changed.
    """
    if not (path / SUMS).exists():
        return
    for line in (path / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise Damaged(f"The checkpoint {path} cannot be read ({name} has changed).")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _on_host(leaf: Any) -> Any:
    """Convert an array to NumPy, unless this process has only a shard of it."""
    here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
    return np.asarray(leaf) if here else leaf


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
