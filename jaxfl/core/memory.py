"""Device memory: how many clients or runs fit side by side, and the error when it runs out."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator

import jax
import psutil

from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError

USABLE = 0.9  # share of what is free: the device's allocator loses some to gaps
HOST_SHARE = 0.5  # of the memory that the machine has left: CPU devices share it with whatever else runs


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes a compiled program holds at once on a device: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    assert memory is not None  # known of all that this process compiled
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes  # donated: an argument and a result in the same memory
    )


def available(federation: Federation) -> int | None:
    """Return the bytes on a device for a run's programs and the federation; None if not reported (a CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()[: federation.devices]]
    if not all("bytes_limit" in of_device for of_device in stats):
        return None
    free = min(of_device["bytes_limit"] - of_device["bytes_in_use"] for of_device in stats)
    arrays = (leaf for leaf in jax.tree.leaves(federation) if isinstance(leaf, jax.Array))
    held = sum(leaf.nbytes for leaf in arrays)  # already in use, and counted as an argument too
    return int(USABLE * (free + held))


def available_to_several(federation: Federation) -> int:
    """Return the bytes on a device for a program of several runs; for a CPU, a share of the machine's."""
    on_device = available(federation)
    if on_device is None:
        return int(HOST_SHARE * psutil.virtual_memory().available / federation.devices)
    return on_device


def warn_if_short(compiled: jax.stages.Compiled) -> None:
    """Warn of a program that needs more memory than a machine has left, whose system may then end it."""
    held = compiled.memory_analysis()
    if held is None or jax.local_devices()[0].memory_stats():  # they say when their own memory runs out
        return
    placed = jax.tree.leaves(compiled.output_shardings)
    devices = {device for where in placed for device in where.addressable_devices}
    needed = held.output_size_in_bytes - held.alias_size_in_bytes + len(devices) * held.temp_size_in_bytes
    free = psutil.virtual_memory().available
    if needed > free:
        warnings.warn(
            f"The next program needs some {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: the "
            "system may end this process. Smaller batches, fewer --devices or fewer public images need less.",
            stacklevel=2,
        )


def most_that_fit(number: int, needed: Callable[[int], int], limit: int) -> int:
    """Halve a number of clients or runs until its memory fits; return it, or 1 if nothing fits.

    Each trial compiles, a minute for a large network on a GPU. Numbers that cannot fit are skipped: bytes
    fall at most in proportion to the number.

    Args:
      number: of clients or runs wanted at once.
      needed: returns the bytes that the programs hold with this number, see `peak_bytes`. It may raise if the
        compiler finds them too large.
      limit: the available bytes, see `available`.
    """
    while number > 1:
        of_one = 0.0
        try:
            held = needed(number)
            if held <= limit:
                break
            of_one = held / number
        except jax.errors.JaxRuntimeError as error:
            if not _out_of_memory(error):
                raise
        number = -(-number // 2)
        while number > 1 and of_one * number > limit:
            number = -(-number // 2)
    return number


def as_many_as_fit(federation: Federation, needed: Callable[[Federation], int], limit: int) -> Federation:
    """Return the federation with as many clients side by side as fit, see `most_that_fit`."""

    def with_so_many(number):
        return dataclasses.replace(federation, clients_at_once=number)

    return with_so_many(
        most_that_fit(federation.clients_at_once, lambda number: needed(with_so_many(number)), limit)
    )


@contextlib.contextmanager
def explained(federation: Federation | None = None) -> Iterator[None]:
    """Turn an out-of-memory error into one sentence that names the option to change.

    There is no federation yet while it is put on the devices.

    Raises:
      JaxflError: if a device's memory is exhausted.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _out_of_memory(error):
            raise
        raise JaxflError(f"A device's memory ran out {_advice(federation)}.") from error


def _advice(federation: Federation | None) -> str:
    if federation is None:
        return (
            "while the data were put on it; end other programs that use it, or take fewer or smaller images"
        )
    at_once = federation.clients_at_once
    if at_once > 1:
        return f"with --clients-at-once {at_once}; start again with --clients-at-once {at_once // 2}"
    advice = (
        "lower --batch-size or --eval-every, change --devices (all hold the data set), or keep clients' "
        "state on the host (--client-state host)"
    )
    return f"with --clients-at-once {at_once}; {advice}"


# XLA says the second or third when it tries the kernels of a program for a GPU, and none has room.
REFUSALS = ("RESOURCE_EXHAUSTED", "Autotuning failed", "All configs failed during profiling")


def _out_of_memory(error: Exception) -> bool:
    return any(words in str(error) for words in REFUSALS)
