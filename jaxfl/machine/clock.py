"""A simulated wall clock: how long a round would take on the clients' own devices.

In a synchronous round everybody waits for the slowest client. A client computes its training's operations and
sends and receives its bytes, one after the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxfl.errors import JaxflError, nearest


class Device(NamedTuple):
    """What a client computes with.

    Args:
      flops_per_s: floating-point operations per second that training reaches.
      bytes_per_s: of its connection, up and down alike.
    """

    flops_per_s: float
    bytes_per_s: float


def profile(texts: Sequence[str], architectures: Sequence[str]) -> dict[str, Device] | None:
    """The device of each architecture's clients.

    Args:
      texts: ``architecture=FLOPS:BYTES`` for every architecture, such as ``lenet5=1e9:1e6``; or none at all.
      architectures: their names.

    Returns:
      {architecture: device}, None without texts.

    Raises:
      JaxflError: if an architecture is unknown or missing, or a number is not positive.
    """
    if not texts:
        return None
    devices = {}
    for text in texts:
        name, _, speeds = text.rpartition("=")
        if name not in architectures:
            known = nearest(name, architectures)
            raise JaxflError(f"--device-profile {text!r}: there is no architecture {name!r}; {known}")
        try:
            devices[name] = Device(*map(float, speeds.split(":")))
        except (TypeError, ValueError):
            devices[name] = Device(0, 0)
        if not min(devices[name]) > 0:
            raise JaxflError(
                f"--device-profile {text!r} is not architecture=FLOPS:BYTES with two positive numbers, both "
                f"per second; write for example {name}=1e9:1e6."
            )
    missing = [name for name in architectures if name not in devices]
    if missing:
        raise JaxflError(
            f"--device-profile says nothing of {', '.join(missing)}; add {missing[0]}=FLOPS:BYTES."
        )
    return devices


def seconds(device: Device, flops: float, moved: int) -> float:
    """How long a client takes for its training and for the bytes that it sends and receives."""
    return flops / device.flops_per_s + moved / device.bytes_per_s
