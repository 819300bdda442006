"""Clients' weights as named arrays, as in files, and the blocks of a network that they fit.

The names are

    lenet5/params/conv1/conv/kernel                    of the architecture lenet5
    lenet5/stats/conv1/norm/mean                       its running statistics of BatchNorm
    lenet5/clients/params/classifier/kernel  (n, ...)  what its clients have of their own
    lenet5/clients/id                        (n,)      whose these are
    params/conv1/conv/kernel                           of every architecture that has no arrays of its own
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights

LEAF = r"(?P<clients>clients/)?(?P<path>(?:params|stats)/[^/]+/.+|(?<=clients/)id)"
NAME = re.compile(rf"(?:(?P<architecture>.+?)/)??{LEAF}")
Path = tuple[str, ...]  # ("params", block, ..., leaf)


class ClientWeights(NamedTuple):
    """The weights of an architecture's clients, or of some of its blocks."""

    shared: Weights  # weights common to all clients, or their mean
    own: Weights  # weights of each client, (n_g, ...)


class Arrays(NamedTuple):
    """Weights of an architecture's clients in a file."""

    shared: dict[Path, np.ndarray]  # by path, common to all clients
    own: dict[Path, np.ndarray]  # by path, (n, ...), one entry per client
    id: list[int]  # ids of the clients, (n,)


def named(architecture: str, models: ClientWeights, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return weights of the clients `ids` as named arrays; the inverse is `by_architecture`."""
    shared = {f"{architecture}/{'/'.join(path)}": leaf for path, leaf in _leaves(models.shared).items()}
    own = {f"{architecture}/clients/{'/'.join(path)}": leaf for path, leaf in _leaves(models.own).items()}
    return shared | own | ({f"{architecture}/clients/id": np.asarray(ids)} if own else {})


def by_architecture(arrays: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
    """Return named arrays by architecture; "" has those that name none.

    Raises:
      JaxflError: naming the first array whose name is not that of a leaf, that is not made of finite numbers,
        or that does not have one entry per client.
    """
    found = {}
    for name, array in arrays.items():
        parts = NAME.fullmatch(name)
        if not parts:
            raise JaxflError(
                f"{name!r} is not the name of a leaf; name arrays like params/conv1/conv/kernel."
            )
        if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
            raise JaxflError(
                f"{name} has values that are not finite numbers; do not start from a run that diverged."
            )
        of_one = found.setdefault(parts["architecture"] or "", Arrays({}, {}, []))
        if parts["path"] == "id":
            of_one.id.extend(array.astype(int).ravel().tolist())
        else:
            of_part = of_one.own if parts["clients"] else of_one.shared
            of_part[tuple(parts["path"].split("/"))] = array
    for architecture, (_, own, ids) in found.items():
        for path, array in own.items():
            if array.shape[:1] != (len(ids),) or not ids:
                raise JaxflError(
                    f"{'/'.join(filter(None, [architecture, 'clients', *path]))} is of shape {array.shape}, "
                    f"but clients/id names {len(ids)} clients; give it an entry for each."
                )
    return found


def fit(arrays: Arrays, model: Model, ids: Sequence[int]) -> tuple[ClientWeights, dict[str, str]]:
    """Return the blocks of a network that arrays fit, for clients `ids`.

    A client whose id the arrays do not have gets the mean over those that they have.

    Returns:
      These blocks, and {block: reason} for the others that have leaves.
    """
    wanted = _leaves(model.form)
    shared = {path: array.mean(0) for path, array in arrays.own.items()} | arrays.shared
    misfits = {}
    for block in model.names:
        found, leaves = (
            {path: leaf.shape for path, leaf in of_all.items() if path[1] == block}
            for of_all in (shared, wanted)
        )
        if leaves and found != leaves:
            misfits[block] = _misfit(found, leaves)
    fitting = {path: leaf for path, leaf in wanted.items() if path[1] not in misfits}
    row = {client: place for place, client in enumerate(arrays.id)}
    # A single client's model is everybody's, unless that client is all there is here, too.
    known = (len(row) > 1 or [*row] == [*ids]) and not row.keys().isdisjoint(ids)
    own = {
        path: np.stack([array[row[client]] if client in row else shared[path] for client in ids])
        for path, array in arrays.own.items()
        # A method's own blocks are not checked here.
        if known and (path in fitting or path[1] not in model.names)
    }
    taken = {path: shared[path].astype(leaf.dtype) for path, leaf in fitting.items()}
    dtypes = {path: fitting[path].dtype if path in fitting else np.float32 for path in own}
    return ClientWeights(
        _weights(taken), _weights({path: leaf.astype(dtypes[path]) for path, leaf in own.items()})
    ), misfits


def _misfit(found: dict[Path, tuple], wanted: dict[Path, tuple]) -> str:
    """Describe how the leaves of two blocks, given as {path: shape}, differ."""
    if not found:
        return "not there"
    for path in sorted(found | wanted):
        sizes = ["x".join(map(str, leaves[path])) if path in leaves else None for leaves in (found, wanted)]
        leaf = "/".join(path[2:])
        match sizes:
            case [None, _]:
                return f"without {leaf} there"
            case [_, None]:
                return f"with {leaf} there"
            case [found_size, wanted_size] if found_size != wanted_size:
                return f"{leaf} is {found_size} there, {wanted_size} here"
    raise AssertionError("they are alike")


def _leaves(weights: Weights) -> dict[Path, Any]:
    """Return all leaves except None by their paths."""
    leaves = flatten_dict(weights._asdict())
    return {path: leaf for path, leaf in leaves.items() if leaf is not None}


def _weights(leaves: dict[Path, Any]) -> Weights:
    """Invert `_leaves`."""
    return Weights(**({"params": {}, "stats": {}} | unflatten_dict(leaves)))
