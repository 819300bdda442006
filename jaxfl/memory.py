"""Device memory: how many clients fit side by side, and what to say where it ran out."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import jax

from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError
from jaxfl.processes import by_first

USABLE = 0.9  # share of what is free: the device's allocator loses some to gaps


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """What a compiled program holds at once on a device: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes  # donated: an argument and a result in one place
    )


@by_first
def available(federation: Federation) -> int | None:
    """Bytes on a device for a run's programs and the federation; None where devices do not tell (a CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()[: federation.devices]]
    if not all("bytes_limit" in of_device for of_device in stats):
        return None
    free = min(of_device["bytes_limit"] - of_device["bytes_in_use"] for of_device in stats)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(federation))  # in use by now, and an argument
    return int(USABLE * (free + held))


def as_many_as_fit(federation: Federation, needed: Callable[[Federation], int], limit: int) -> Federation:
    """Halve the clients that run side by side until they fit.

    Args:
      federation: with as many `clients_at_once` as one would like.
      needed: the bytes that some programs hold at once with such a federation, see `peak_bytes`; where the
        compiler finds them too large, it may raise.
      limit: the bytes that there are, see `available`.

    Returns:
      The same federation with as many clients at once as fit; with one where nothing fits.
    """

    def fits():
        try:
            return needed(federation) <= limit
        except jax.errors.JaxRuntimeError as error:
            if not _out_of_memory(error):
                raise
            return False

    while federation.clients_at_once > 1 and not fits():
        federation = dataclasses.replace(federation, clients_at_once=-(-federation.clients_at_once // 2))
    return federation


def enough(steps: Iterable, federation: Federation) -> Iterator:
    """The same steps; out of memory in one of them becomes one sentence with the knob to turn.

    Raises:
      JaxflError: if a device's memory is exhausted.
    """
    try:
        yield from steps
    except jax.errors.JaxRuntimeError as error:
        if not _out_of_memory(error):
            raise
        at_once = federation.clients_at_once
        advice = "lower --batch-size, --eval-every or --devices (each holds the data set and the state)"
        if at_once > 1:
            advice = f"start again with --clients-at-once {at_once // 2}"
        raise JaxflError(f"A device's memory ran out with --clients-at-once {at_once}; {advice}.") from error


def _out_of_memory(error: jax.errors.JaxRuntimeError) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)
