"""Where arrays lie: in full on every device, or divided among them.

Nothing here changes what is computed. JAX's programs take arrays as they lie, and move what they need.
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
ADDRESS = 64  # bytes, of which the address of an array that JAX takes as it lies is a multiple


def mesh_of(devices: int) -> Mesh | None:
    """So many devices along one axis, of every process equally many; None for a single one.

    Raises:
      JaxflError: if JAX has fewer, or they are not equally many of each process.
    """
    processes = jax.process_count()
    if devices % processes:
        raise JaxflError(
            f"{devices} devices are not equally many of {processes} processes; give --devices a multiple of "
            f"{processes}."
        )
    if devices > jax.device_count():
        raise JaxflError(
            f"The clients are to be shared by {devices} devices, but JAX has {jax.device_count()} "
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
    """How an array of a state lies: that of clients divided, every other one in full.

    An array is one of clients if its first axis is as long as there are clients, and there is another one.
    It is divided along the longest axis after the first which makes equal parts: each device then holds a
    part of what every client has, so clients are looked up, written back and mixed where they lie, and there
    may be any number of them. Where no such axis makes equal parts the first one is taken, if it does. An
    array of the server that has this form by chance is divided as well, which costs a little time.

    Args:
      mesh: the devices.
      shape: of the array.
      clients: how many there are, of each architecture and in all.
      leading: axes in front of these, such as one of runs.

    >>> mesh = jax.make_mesh((1,), (AXIS,))
    >>> tuple(divided(mesh, (7, 400, 120), clients={7, 10}).spec)
    (None, 'clients')
    >>> tuple(divided(mesh, (400, 120), clients={7, 10}).spec)  # of the server
    ()
    """
    of_one = range(leading + 1, len(shape))
    even = [axis for axis in range(leading, len(shape)) if shape[axis] % mesh.size == 0]
    if not (of_one and even and shape[leading] in clients):
        return NamedSharding(mesh, PartitionSpec())
    along = max(even, key=lambda axis: (axis in of_one, shape[axis]))  # after the clients, then longest
    return NamedSharding(mesh, PartitionSpec(*[None] * along, AXIS))


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array to be filled, of which all devices of a CPU share the memory once it is `put` there.

    JAX takes an array of the host as it lies where its address suits the vectors of the CPU; others, and its
    own, it copies to every device. Nobody may write to it any more then. Its dtype is one that JAX has.
    """
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ADDRESS, np.uint8)
    start = -memory.ctypes.data % ADDRESS
    return memory[start : start + size].view(dtype).reshape(shape)


def put(leaf, where: NamedSharding) -> jax.Array:
    """An array at its place; every process has all of it, or it is spread over the devices of all already."""
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    if not of_process(leaf):
        there = leaf.sharding.is_equivalent_to(where, leaf.ndim)
        return leaf if there else _program(_same, where)(leaf)
    # To devices of several processes `jax.device_put` would gather on each what every process has.
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.make_array_from_callback(leaf.shape, where, lambda part: leaf[part])
    data = put(jax.random.key_data(leaf), where)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def repeated(leaves: list, times: int, where: tuple[NamedSharding | None, ...]) -> tuple[jax.Array, ...]:
    """Arrays so many times along a new first axis, (times, ...); a device makes its own part alone."""
    return _program(_repeated, where, times)(leaves)


def _same(leaf):
    return leaf


def _repeated(times: int, leaves: list) -> tuple:
    return tuple(jnp.broadcast_to(leaf, (times, *leaf.shape)) for leaf in leaves)


@cache
def _program(f: Callable, where: NamedSharding | tuple[NamedSharding | None, ...], *first) -> Callable:
    return jax.jit(partial(f, *first), out_shardings=where)


def of_process(leaf) -> bool:
    """Whether an array is one process's own, rather than spread over the devices of several."""
    return getattr(leaf, "is_fully_addressable", True)
