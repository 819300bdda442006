"""The environment of a result: versions, the device, the commit."""

import contextlib
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp

PACKAGES = (
    "jaxfl",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "networkx",
    "scikit-learn",
)


def versions() -> dict[str, str]:
    """Return the versions of jaxfl, of what it builds on, and of Python."""
    return {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}


def environment() -> dict:
    """Return versions and the device, as a run's folder records them."""
    device = jax.devices()[0]
    return versions() | {
        "device": f"{device.platform} {device.device_kind}",
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "float": str(jnp.result_type(float)),
        "git": _revision(),
    }


def _revision() -> str | None:
    """Return the commit of the checkout that jaxfl runs from, marked if changed since; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        command = ["git", "--no-optional-locks", "-C", root, *describe]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
