"""A simulated wall clock: how long a round would take on the clients' own devices.

In a synchronous round everybody waits for the slowest client, or until a deadline. A client receives bytes,
computes its training's operations and sends bytes, one after the other.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfl.errors import JaxflError, nearest


class Device(NamedTuple):
    """The device of a client, or with arrays those of several."""

    flops_per_s: Any  # floating-point operations per second that training reaches
    bytes_per_s: Any  # bytes per second of its connection, the same up and down


class Deadline(NamedTuple):
    """The time that the server waits for clients."""

    seconds: float  # seconds of waiting in every round
    devices: tuple[Device, ...]  # those of the clients, per group with leaves (n_g,)


def profile(texts: Sequence[str], architectures: Mapping[str, Collection[str]]) -> dict[str, Device] | None:
    """Return the device of each architecture's clients, {architecture: device}; None without texts.

    Args:
      texts: ``architecture=FLOPS:BYTES`` for every architecture, such as ``lenet5=1e9:1e6``; or none at all.
      architectures: their names, each with others under which the user may know it.

    Raises:
      JaxflError: if an architecture is unknown or missing, or a number is not positive.
    """
    if not texts:
        return None
    devices = {}
    for text in texts:
        name, _, speeds = text.rpartition("=")
        name = next((known for known, others in architectures.items() if name in others), name)
        if name not in architectures:
            known = nearest(name, architectures)
            raise JaxflError(f"--device-profile {text!r}: there is no architecture {name!r}; {known}")
        if name in devices:
            raise JaxflError(f"--device-profile gives {name} twice; give it once.")
        try:
            devices[name] = Device(*map(float, speeds.split(":")))
        except (TypeError, ValueError):
            devices[name] = Device(0, 0)
        if not all(speed > 0 for speed in devices[name]):  # nor is NaN
            raise JaxflError(
                f"--device-profile {text!r} is not architecture=FLOPS:BYTES with two positive numbers, both "
                f"per second; write for example {name}=1e9:1e6."
            )
    missing = [name for name in architectures if name not in devices]
    if missing:
        raise JaxflError(
            f"--device-profile says nothing about {', '.join(missing)}; add {missing[0]}=FLOPS:BYTES."
        )
    return devices


def of_clients(
    devices: Sequence[Device], sizes: Sequence[int], spread: float, rng: np.random.Generator
) -> tuple[Device, ...]:
    """Return the device of every client: its architecture's, with other speeds.

    Operations and bytes per second are multiplied by exp(spread z), with an own z for each from the standard
    normal distribution, drawn for one client after another. So half of the clients compute slower than the
    profile says. Devices and sizes are those of the architecture groups; per group there are leaves (n_g,).
    """
    factors = np.exp(spread * rng.standard_normal((sum(sizes), len(Device._fields))))
    of_groups = np.split(factors, np.cumsum(sizes)[:-1])
    return tuple(Device(*(own * np.array(device)).T) for device, own in zip(devices, of_groups, strict=True))


def seconds(device: Device, flops: Any, moved: Any) -> Any:
    """Return the seconds that clients take for their operations and for the bytes that are moved."""
    return flops / device.flops_per_s + moved / device.bytes_per_s


def until(seconds: float, device: Device, flops: float, up: int, down: int) -> tuple[float, int, int]:
    """Return how many of its operations, bytes up and bytes down a client gets done in some seconds."""
    down = min(down, int(seconds * device.bytes_per_s))
    seconds -= down / device.bytes_per_s
    flops = min(flops, seconds * device.flops_per_s)
    seconds -= flops / device.flops_per_s
    return flops, min(up, int(seconds * device.bytes_per_s)), down
