"""Entries that several architectures share: a leaf of one is a place in a leaf that others have, too.

The place is the whole leaf if networks begin with the same layers, or a slice of it if one network is a
narrower form of another. So the holders of an entry e are known before anything runs:

    e <- sum_i a_i e_i / sum_i a_i       over the clients i of all architectures that hold e, with weights a_i

A leaf is named by its path in a tuple of all architectures' weights: ("1", "params", "conv1", "conv",
"kernel"). A shared leaf has its path in the first architecture that has it, or in the widest one. A tree of
shared leaves has None in the place of all others.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfl.core import tree
from jaxfl.core.client_map import cohort_rows
from jaxfl.core.protocol import Algorithm
from jaxfl.data.federation import PerGroup
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.sharing import Averaging
from jaxfl.models.model import Model
from jaxfl.models.slices import cut

Leaf = tuple[str, ...]


class Place(NamedTuple):
    """Where a leaf is: ``shared[leaf][index]``."""

    leaf: Leaf
    index: Any = ...


Places = dict[Leaf, Place]  # of shared leaves only; all others stay where they are

# ---- which entries are shared


class Layer(NamedTuple):
    """A block that has leaves; BatchNorm is part of the layer that it follows."""

    block: str
    kind: tuple  # kind of module, and the shapes of its leaves by name. Layers of the same kind are alike

    def __str__(self):
        sizes = (f"{path[-1]} {'x'.join(map(str, shape))}" for path, shape in self.kind[1:])
        return f"{self.block} ({', '.join(sizes)})"


@functools.cache
def layers(model: Model) -> tuple[Layer, ...]:
    """Return the layers of a network, in order."""
    weights, found = model.form, []
    for block, module in model.blocks:
        leaves = tree.by_path((weights.params[block], weights.stats[block]))
        if leaves:
            name = getattr(module, "kind", type(module).__name__)  # own blocks say what they are
            kind = name, *((path, leaf.shape) for path, leaf in leaves.items())
            found.append(Layer(block, kind))
    return tuple(found)


def in_common(*networks: Sequence[Layer]) -> int:
    """Return how many layers some networks have in common, from the first on."""
    levels = zip(*networks, strict=False)
    alike = itertools.takewhile(lambda level: len({layer.kind for layer in level}) == 1, levels)
    return len(list(alike))


def beginning(networks: dict[Model, tuple[Layer, ...]]) -> int:
    """Return how many layers all architectures have in common, from the first on.

    Raises:
      JaxflError: if their first ones differ.
    """
    count = in_common(*networks.values())
    if not count:
        first = (
            f"{model.name} with {found[0] if found else 'its head'}" for model, found in networks.items()
        )
        raise JaxflError(
            f"The method shares the first layers of all architectures, but these differ: {'; '.join(first)}; "
            "choose --models that begin alike, or other options of the method."
        )
    return count


def whole_layers(models: Sequence[Model], owner: Callable[[int, int], int | None]) -> Places:
    """Return the places of layers that are shared as a whole.

    Args:
      models: the architectures.
      owner: ``(g, l) -> architecture`` that names layer l of architecture g; None if it is not shared.
    """
    places = {}
    for g, model in enumerate(models):
        blocks = {layer.block: number for number, layer in enumerate(layers(model))}
        for collection, block, *rest in tree.by_path(model.form):
            first = owner(g, blocks[block])
            if first is not None:
                same = layers(models[first])[blocks[block]].block
                places[str(g), collection, block, *rest] = Place((str(first), collection, same, *rest))
    return places


@functools.cache
def slices(models: tuple[Model, ...]) -> Places:
    """Return the places of all leaves in the widest network whose blocks and leaves have the same names.

    Raises:
      JaxflError: if a network is no slice of the widest.
    """
    alike = collections.defaultdict(list)
    paths = [list(tree.by_path(model.form)) for model in models]
    for g, (model, names) in enumerate(zip(models, paths, strict=True)):
        alike[model.names, tuple(names)].append(g)
    places = {}
    for (_, names), members in alike.items():
        widest = max(members, key=lambda g: models[g].size)
        for g in members:
            for name, index in zip(names, cut(models[widest], models[g]), strict=True):
                places[str(g), *name] = Place((str(widest), *name), index)
    return places


# ---- to and from the clients


def shared_leaves(weights: PerGroup, places: Places) -> PerGroup:
    """Return the leaves of all architectures' weights that places refer to."""
    leaves = {place.leaf for place in places.values()}
    return tree.split(weights, lambda path: path in leaves)[0]


def hand_out(shared: PerGroup, places: Places, own: PerGroup) -> PerGroup:
    """Return the weights of all architectures, with their shared leaves filled in.

    Args:
      shared: the shared leaves.
      places: places of the shared leaves.
      own: leaves in the form of all architectures' weights; those without a place stay.
    """
    of_name = tree.by_path(shared)

    def of_leaf(path, leaf):
        place = places.get(tree.names(path))
        return leaf if place is None else of_name[place.leaf][place.index]

    return jax.tree.map_with_path(of_leaf, own)


def add_up(parts: PerGroup, places: Places, form: PerGroup) -> PerGroup:
    """Sum over architectures, entry by entry, in the form of the shared leaves."""
    sums = tree.by_path(jax.tree.map(jnp.zeros_like, form))
    for path, part in tree.by_path(parts).items():
        if place := places.get(path):
            sums[place.leaf] = sums[place.leaf].at[place.index].add(part)
    return jax.tree.map_with_path(lambda path, _: sums[tree.names(path)], form)


def mean(models: PerGroup, weights: PerGroup, places: Places, old: PerGroup) -> PerGroup:
    """Return the mean of every entry over the clients that hold it.

    Args:
      models: per group the clients' models (k_g, ...).
      weights: per group the clients' weights (k_g,), or a tree of these for parts of the model; (k_g, c) has
        a weight for each entry of a leaf's last axis.
      places: which entries are shared.
      old: the shared leaves, for entries that no client holds.

    Returns:
      The new shared leaves.
    """
    weights = tuple(map(jax.tree.broadcast, weights, models))

    def of_leaf(leaf, weight):
        axes = "k,k...->..." if weight.ndim == 1 else "kc,k...c->...c"
        return jnp.einsum(axes, weight, leaf, precision="highest")

    def count(leaf, weight):
        return jnp.broadcast_to(weight.sum(0), leaf.shape[1:])

    sums, counts = (add_up(jax.tree.map(f, models, weights), places, old) for f in (of_leaf, count))
    return tree.mean_of_holders(sums, counts, old, least=1e-30)  # weights may be shares


def scalars_of_several(form: PerGroup, places: Places, clients: PerGroup) -> PerGroup:
    """Count the scalars of a model whose places at least two clients hold.

    Args:
      form: per group the weights of one client.
      places: places of leaves that are shared as a whole.
      clients: per group () the number of its clients.

    Returns:
      Per group () int32.
    """
    holders, counts = collections.Counter(), [jnp.int32(0) for _ in form]
    for (g, *_), place in places.items():
        holders[place.leaf] += clients[int(g)]
    for path, leaf in tree.by_path(form).items():
        if place := places.get(path):
            counts[int(path[0])] += jnp.where(holders[place.leaf] >= 2, jnp.int32(leaf.size), 0)
    return tuple(counts)


# ---- methods of `jaxfl.mechanisms.sharing` whose clients share first layers


def first_layers(config: Averaging, method: Callable[..., Algorithm]) -> Algorithm:
    """Build a method whose clients share the layers with which all architectures begin.

    The extractors are compared; no head is shared.

    Args:
      config: the method's options.
      method: ``(keep=...) -> Algorithm``, of the mechanism `sharing`.

    Raises:
      JaxflError: at `init`, if the architectures begin with different layers.
    """
    plain = method()

    def for_architectures(federation) -> tuple[Algorithm, Places]:
        """Return the method for these architectures, and the places that they share."""
        bodies = {model: layers(model)[:-1] for model in federation.models}
        count = beginning(bodies)
        places = whole_layers(federation.models, lambda g, number: 0 if number < count else None)
        shared = {model: {layer.block for layer in body[:count]} for model, body in bodies.items()}
        return method(keep=lambda model: lambda path: path[1] not in shared[model]), places

    def init(key, federation, hyper):
        algorithm, places = for_architectures(federation)
        state = algorithm.init(key, federation, hyper)
        return state._replace(shared=hand_out(state.shared, places, state.shared))

    def step(key, state, federation, cohort):
        algorithm, places = for_architectures(federation)
        after, info = algorithm.step(key, state, federation, cohort)
        means = jax.tree.map(lambda leaf: leaf[None], after.shared)  # of each architecture
        weights = tuple(config.weights(n).sum()[None] for n in cohort_rows(federation, cohort))
        shared = mean(means, weights, places, shared_leaves(state.shared, places))
        return after._replace(shared=hand_out(shared, places, after.shared)), info

    # What clients use is in the state; the mean is one of means.
    return plain._replace(init=init, step=step, wire=("rows",))
