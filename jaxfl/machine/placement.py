"""Placement of arrays: in full on every device, or divided among them.

Nothing here changes what is computed. JAX's programs take arrays where they are, and move what they need.
"""

import math
from collections.abc import Callable, Collection
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxfl.errors import JaxflError

AXIS = "clients"  # of the mesh
ADDRESS = 64  # bytes; JAX takes an array in place if its address is a multiple of this
FEW = 2**20  # numbers: so many are no load for a device, and taking them apart is compiled for every array


def mesh_of(devices: int) -> Mesh | None:
    """Return a mesh of devices along one axis, equally many of every process; None for a single one.

    Raises:
      JaxflError: if JAX has fewer, or the processes would not have equally many.
    """
    processes = jax.process_count()
    if devices % processes:
        raise JaxflError(
            f"{devices} devices cannot be divided equally among {processes} processes; give --devices a "
            f"multiple of {processes}."
        )
    if devices > jax.device_count():
        raise JaxflError(
            f"The clients should be shared by {devices} devices, but JAX has {jax.device_count()} "
            f"({jax.default_backend()}); give JAX as many, on CPUs with JAX_NUM_CPU_DEVICES="
            f"{devices // processes}, or begin or resume a run with fewer --devices."
        )
    if devices == 1:
        return None
    of_each = [jax.local_devices(process)[: devices // processes] for process in range(processes)]
    chosen = [device for of_process in of_each for device in of_process]
    # Not `jax.make_mesh`, which looks for a grid of them and finds none for, say, five of a TPU's eight.
    return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))


def divided(mesh: Mesh, shape: tuple[int, ...], clients: Collection[int], leading: int = 0) -> NamedSharding:
    """Return the placement of an array of a state: clients' arrays are divided, all others are in full.

    An array belongs to clients if its first axis is as long as there are clients and it has another axis.
    From `FEW` numbers on it is divided along the longest axis after the first that makes equal parts. Each
    device then holds a part of what every client has, so clients are looked up, written back and mixed in
    place, and there may be any number of them. If no such axis makes equal parts, the first one is taken, if
    it does. An array of the server that has this form by chance is divided, too, which costs a little time.

    There are so many clients of each architecture and in all, and so many `leading` axes in front of these,
    such as one of runs. They do not count for `FEW`, so that runs together have the bits of each alone.

    >>> mesh = jax.make_mesh((1,), (AXIS,))
    >>> tuple(divided(mesh, (70, 400, 120), clients={70, 100}).spec)
    (None, 'clients')
    >>> tuple(divided(mesh, (4000, 1200), clients={70, 100}).spec)  # of the server
    ()
    """
    of_one = range(leading + 1, len(shape))
    even = [axis for axis in range(leading, len(shape)) if shape[axis] % mesh.size == 0]
    if math.prod(shape[leading:]) < FEW or not (of_one and even and shape[leading] in clients):
        return NamedSharding(mesh, PartitionSpec())
    along = max(even, key=lambda axis: (axis in of_one, shape[axis]))  # after the clients, then longest
    return NamedSharding(mesh, PartitionSpec(*[None] * along, AXIS))


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array to be filled, whose memory all devices of a CPU share once it is `put` there.

    JAX takes a host array in place if its address suits the CPU's vectors; it copies others, and its own, to
    every device. Do not write to the array after `put`. Its dtype is one that JAX has.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ADDRESS, np.uint8)
    start = -memory.ctypes.data % ADDRESS
    return memory[start : start + size].view(dtype).reshape(shape)


def put(leaf, where: NamedSharding) -> jax.Array:
    """Put an array in its place; every process has all of it, or it is already spread over all devices."""
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    if not of_process(leaf):
        in_place = leaf.sharding.is_equivalent_to(where, leaf.ndim)
        return leaf if in_place else _program(_same, where)(leaf)
    # To devices of several processes `jax.device_put` would gather on each what every process has.
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.make_array_from_callback(leaf.shape, where, lambda part: leaf[part])
    data = put(jax.random.key_data(leaf), where)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def repeated(leaves: list, times: int, where: tuple[NamedSharding | None, ...]) -> tuple[jax.Array, ...]:
    """Repeat arrays along a new first axis, (times, ...); a device makes only its own part."""
    divided = next(filter(None, where), None)
    # Said, because the compiler would divide some leaves, each by a program of its own, and join them again.
    in_full = divided and NamedSharding(divided.mesh, PartitionSpec())
    return _program(_repeated, where, in_full, times)(leaves)


def _same(leaf):
    return leaf


def _repeated(times: int, leaves: list) -> tuple:
    return tuple(jnp.broadcast_to(leaf, (times, *leaf.shape)) for leaf in leaves)


@cache
def _program(
    f: Callable, where: NamedSharding | tuple, given: NamedSharding | None = None, *first
) -> Callable:
    return jax.jit(partial(f, *first), in_shardings=given, out_shardings=where)


def of_process(leaf) -> bool:
    """Return whether an array is one process's own, rather than spread over the devices of several."""
    return getattr(leaf, "is_fully_addressable", True)
