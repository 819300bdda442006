"""A federation: one data set on the device, and index matrices of every client's rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfl.config.options import static
from jaxfl.data.normalisation import normalised
from jaxfl.data.partition import counts_of
from jaxfl.data.shift import Shift
from jaxfl.errors import JaxflError, beyond_cohort
from jaxfl.machine import placement
from jaxfl.machine.processes import agree
from jaxfl.models.model import Model
from jaxfl.tasks import Task

PerGroup = tuple
"""A tuple with one entry per architecture, in the order of the groups of a `Federation`."""
NOBODY = np.iinfo(np.int32).max  # an id that no client has


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Client:
    """One client's data, as row numbers; with a leading axis on every leaf, all clients of a group."""

    id: jax.Array  # () int32, the client's number in the federation
    rows: jax.Array  # (m,) int32 training rows, padded
    size: jax.Array  # () int32, how many of them are real; 0 for an absent client
    validation_rows: jax.Array  # (v,) int32
    validation_size: jax.Array  # () int32
    test_rows: jax.Array  # (t,) int32
    test_size: jax.Array  # () int32
    relabel: jax.Array  # (classes,) int32, class -> the client's output; -1: not on this client
    class_counts: jax.Array  # (outputs,) int32, training rows per output; all of them for each of other tasks
    newcomer: jax.Array  # () bool, whether it takes part in no round and joins at the end; true without rows
    model: Model = static()
    federation: Any = None  # a `Federation`, of a client in a client map: its rows are of these images


class Batch(NamedTuple):
    """A mini-batch of one client; rows where `mask` is False are padding."""

    x: jax.Array  # (B, H, W, C) float, normalised
    y: jax.Array  # (B,) int32, the client's own outputs; or what else its network is to put out, (B, ...)
    mask: jax.Array  # (B,) bool
    position: jax.Array  # (B,) int32, places in the client's list of rows


class Alone(NamedTuple):
    """One group of several: its number, and N, the number of clients of all groups."""

    number: int
    clients: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Federation:
    """All clients and their data.

    Attributes:
      images: (N, H, W, C), uint8 or float, stored once for all clients.
      labels: (N,) int32, or (N, ...), see `Task.form`; targets are float, standardised by `target`.
      mean, std: (1, 1, 1, C) float, moments of the images that clients train on, in raw units.
      groups: per architecture, a `Client` with a leading axis (n_g, ...) on every leaf.
      training_rows: (groups,) float, training rows of all clients of each group except newcomers.
      public: (P,) int32, rows of `images` that everybody sees.
      links: (N, N) bool, which clients are linked, by their ids; (0, 0) without a graph.
      clients_at_once: number of clients of a group that run side by side on a device, in the client map.
      mesh: the devices that share the clients of a round, along one axis; None for a single device.
      unified: whether an output means the same on all clients.
      labelled: whether the labels of public images mean what the clients' do.
      shift: how clients see images, if they see them differently; then rows are those of `Shift`, and labels
        are (V,).
      initial: per architecture `ClientWeights`, the initial weights of some of its blocks; others are drawn.
        None if all are. A leaf that each client has of its own is in `own`, its mean in `shared`.
      target: (k,) float, mean and standard deviation of the targets that clients train on; None for classes.
      vocabulary: number of different tokens, if the rows are tokens; else 0.
      apart: whether initial weights that clients keep are drawn for each of them, see
        `jaxfl.core.initial_weights`.
      alone: of one group of several, see `only`.
      all_newcomers: in a window (`jaxfl.core.window`), whose `groups` hold only some of the clients, per
        group (n_g,) bool, which of all clients are newcomers. None if `groups` hold all of them.
      wire: what happens to messages, a `jaxfl.mechanisms.wire.setup.Wire`; None for nothing.
      trigger: what changes all images where a backdoor is tried out; None elsewhere.
    """

    images: jax.Array
    labels: jax.Array
    mean: jax.Array
    std: jax.Array
    groups: PerGroup
    training_rows: jax.Array
    public: jax.Array
    links: jax.Array
    clients_at_once: int = static(default=1)
    mesh: Mesh | None = static(default=None)
    unified: bool = static(default=True)
    labelled: bool = static(default=True)
    shift: Shift | None = None
    initial: PerGroup | None = None
    target: tuple[jax.Array, jax.Array] | None = None
    vocabulary: int = static(default=0)
    apart: bool = static(default=False)
    alone: Alone | None = static(default=None)
    all_newcomers: PerGroup | None = None
    wire: Any = None
    trigger: Any = None

    @property
    def clients(self) -> int:
        """N, the number of clients, of all groups also where this holds one of them."""
        return self.alone.clients if self.alone else sum(map(len, self.newcomers))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the groups, which keys fold."""
        return (self.alone.number,) if self.alone else tuple(range(len(self.groups)))

    def only(self, g: int) -> "Federation":
        """Return the federation of one group, see `jaxfl.mechanisms.each_architecture`."""
        return dataclasses.replace(
            self,
            groups=(self.groups[g],),
            training_rows=self.training_rows[g : g + 1],
            initial=self.initial and (self.initial[g],),
            all_newcomers=self.all_newcomers and (self.all_newcomers[g],),
            alone=Alone(g, self.clients),
        )

    @property
    def group(self) -> Client:
        """The clients of the only group.

        Raises:
          JaxflError: if the method is not one of `each_architecture`.
        """
        if not self.alone:
            raise JaxflError(
                "Only a method of one architecture has a group; return fl.each_architecture(...)."
            )
        return self.groups[0]

    def require_all(self) -> None:
        """Raise `JaxflError` if this federation holds only a window of the clients."""
        if self.all_newcomers is not None:
            raise beyond_cohort("The method needs all clients")

    @property
    def newcomers(self) -> PerGroup:
        """Per group (n_g,) bool, by their ids: which of all its clients take part in no round."""
        return self.all_newcomers or tuple(group.newcomer for group in self.groups)

    @property
    def counted(self) -> np.ndarray:
        """Whose scores count, (N,) bool in the order of groups: neither newcomers nor attackers."""
        ids = np.concatenate([np.asarray(group.id) for group in self.groups])
        return ~(np.concatenate(self.newcomers) | self.attackers[ids])

    @property
    def attackers(self) -> np.ndarray:
        """Which clients are attackers, (N,) bool by id."""
        return np.zeros(self.clients, bool) if self.wire is None else np.asarray(self.wire.attackers)

    @property
    def participants(self) -> jax.Array:
        """Number of clients of each group that are not newcomers, (groups,) float."""
        return jnp.stack([(~apart).sum(dtype=jnp.int32) for apart in self.newcomers]).astype(float)

    @property
    def devices(self) -> int:
        """Number of devices that share the clients."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def task(self) -> Task:
        """What the outputs of all networks are for."""
        return self.groups[0].model.task

    def rows_per_class(self) -> np.ndarray:
        """Return training rows per client and class of the data set, (N, classes), in the order of groups.

        What `Task.strata` says stands for classes in other tasks.
        """
        of_rows, held = self.task.strata(np.asarray(self.labels)), []
        for group in self.groups:
            for rows, size in zip(np.asarray(group.rows), np.asarray(group.size), strict=True):
                held.append(of_rows[rows[:size]])
        return counts_of(held, self.groups[0].relabel.shape[1])

    def replicate(self, tree, known: bool = False):
        """Put arrays on all devices, in full on each.

        Raises:
          JaxflError: if processes have different arrays, unless it is `known` that they have the same.
        """
        return self._put(tree, self._in_full, known)

    def place(self, state, runs: bool = False, known: bool = False):
        """Put a method's state where it is kept between rounds.

        Arrays with an entry per client are sharded, all others are replicated, see
        `jaxfl.machine.placement.divided`. The state of several `runs` has a leading axis for them.

        Raises:
          JaxflError: if processes have different states, unless it is `known` that they have the same.
        """
        return self._put(state, lambda leaf: self._placed(leaf, runs), known)

    def keep_replicated(self, tree):
        """Constrain arrays within a program to be in full on all devices."""
        return self._keep(tree, self._in_full)

    def keep_placed(self, state, runs: bool = False):
        """Constrain a state within a program to be where `place` puts it."""
        return self._keep(state, lambda leaf: self._placed(leaf, runs))

    def of_each(self, tree, g: int):
        """Repeat a tree for each client of a group, leaves (n_g, ...), where `place` puts it.

        Raises:
          JaxflError: if the processes of the mesh have different trees.
        """
        clients = len(self.groups[g].id)
        leaves, structure = jax.tree.flatten(tree)
        if self.mesh and leaves and not any(isinstance(leaf, Tracer) for leaf in leaves):
            agree("initial weights", leaves)

        def where(leaf):
            return self.mesh and self._placed(jax.ShapeDtypeStruct((clients, *leaf.shape), leaf.dtype))

        return structure.unflatten(placement.repeated(leaves, clients, tuple(map(where, leaves))))

    def fetch(self, tree):
        """Return arrays as NumPy arrays, all of them on every process."""

        def of_leaf(leaf):  # each alone: no device holds all leaves in full
            return jax.device_get(leaf if placement.of_process(leaf) else self.replicate(leaf, known=True))

        return jax.tree.map(of_leaf, tree)

    def form(self, state, runs: bool = False):
        """Return shapes, dtypes and shardings of a state's arrays, or of a tree with their shapes."""

        def of_leaf(leaf):
            where = self.mesh and self._placed(leaf, runs)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree.map(of_leaf, state)

    def _in_full(self, leaf) -> NamedSharding:
        assert self.mesh
        return NamedSharding(self.mesh, PartitionSpec())

    def _placed(self, leaf, runs: bool = False) -> NamedSharding:
        assert self.mesh
        of_groups = [len(group.id) for group in self.groups]
        clients = {sum(of_groups), *of_groups}
        return placement.divided(self.mesh, leaf.shape, clients, leading=int(runs))

    def _put(self, tree, where: Callable, known: bool):
        if self.mesh is None:
            return jax.device_put(tree)
        own = list(filter(placement.of_process, jax.tree.leaves(tree)))
        if own and not known and jax.process_count() > 1:
            agree("data", own)
        return jax.tree.map(lambda leaf: placement.put(leaf, where(leaf)), tree)

    def _keep(self, tree, where: Callable):
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, jax.tree.map(where, tree))

    @property
    def models(self) -> tuple[Model, ...]:
        """The architecture of each group."""
        return tuple(group.model for group in self.groups)

    @property
    def validates(self) -> bool:
        """Whether clients have validation rows."""
        return self.groups[0].validation_rows.shape[-1] > 0

    def seen(self, rows):
        """Return images of rows (B,) -> (B, H, W, C) as their clients see them, in raw units."""
        seen = self.images[rows] if self.shift is None else self.shift.look(self.images, rows, self.std)
        return seen if self.trigger is None else self.trigger.stamped(seen)

    def inputs(self, rows, transform: Callable = lambda images: images):
        """Return normalised images of rows (B,) -> (B, H, W, C); `transform` changes them before."""
        return normalised(transform(self.seen(rows)), self.mean, self.std)

    def batch(self, client: Client, position, mask, transform: Callable = lambda images: images) -> Batch:
        """Return the training rows at positions (B,) of a client's list, of which `mask` (B,) are real."""
        rows = client.rows[position]
        return Batch(self.inputs(rows, transform), self.outputs(client, rows), mask, position)

    def outputs(self, client: Client, rows) -> jax.Array:
        """Return what the client's network is to put out for rows (B,): outputs (B,) int32, or targets."""
        return self.task.aim(self.labels[rows], client.relabel)
