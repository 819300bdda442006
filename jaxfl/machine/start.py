"""The start of JAX in this process: a device for every core of a CPU, which may wait for each other."""

import contextlib
import os

import jax

MOST_DEVICES = 64  # of a process on a CPU with fewer cores
# Devices wait for each other at the end of a round, and so do processes. XLA would end those of one process
# after 30 to 40 seconds, and several processes after 30 minutes; here they may wait a day, 86,400 seconds.
WAITS = (
    "xla_cpu_collective_call_warn_stuck_timeout_seconds",
    "xla_cpu_collective_call_terminate_timeout_seconds",
    "xla_cpu_collective_timeout_seconds",
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds",
    "xla_gpu_first_collective_call_terminate_timeout_seconds",
    "xla_gpu_executable_warn_stuck_timeout",
    "xla_gpu_executable_terminate_timeout",
)


def start(devices: int) -> None:
    """Let JAX start with so many devices on a CPU; if it has started or the user has chosen, with its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = getattr(jax.config, "jax_num_cpu_devices", -1) != -1
    if not chosen and "host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):  # it has started
            jax.config.update("jax_num_cpu_devices", devices)
    waits = [f"--{wait}=86400" for wait in WAITS if wait not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *waits]).strip()


def cpu_devices(asked: int | None = None, before: int | None = None, processes: int = 1) -> int:
    """Return how many devices a process needs on a CPU, so that clients train on all cores at the same time.

    The user may ask for a number of all processes' devices. A run that goes on or is repeated has as many as
    `before`, unless told another.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    devices = before if asked is None else asked
    # Many more than cores wait for each other without end; the setup says that there are not so many.
    most = max(cores, MOST_DEVICES)
    return cores if devices is None else min(most, max(1, devices // max(1, processes)))
