"""Several processes that run one command together, each with some of the devices.

All compute the same programs on one mesh (JAX's own SPMD) and hold the same data, and each holds a part of
what clients have. Work that only one of them may do, such as writing the run's folder, is done
`on_first_process`: process 0 tells the others how it ended.

They trust each other and the network between them: nothing is encrypted or authenticated, and what process 0
tells is unpickled.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxfl.errors import JaxflError

BLOCK = 1 << 20  # bytes sent at a time: all blocks have one shape, so one program sends everything
SHUTDOWN = 100  # seconds that the first process to end waits for the last one
STOPS = (signal.SIGINT, signal.SIGTERM)  # signals that ask a run to end
GRACE = 2  # seconds that process 0 outlives an error: its end stops the service that keeps the others alive

_only_here = contextvars.ContextVar("only_here", default=False)  # whether process 0 does something alone


@dataclasses.dataclass(frozen=True)
class Processes:
    """Several processes that share the clients: start the same command once for each."""

    processes: int | Literal["auto"] = 1
    """Number of processes; auto where SLURM, Open MPI or a TPU slice tells all of these options."""
    process: int | None = None
    """Number of this process; only 0 writes and prints results."""
    coordinator: str | None = None
    """HOST:PORT, the machine of process 0 and a free port there."""


class EndsAll(Exception):
    """An error of a single process while the others wait for it: only its end tells them."""


def connect(options: Processes) -> None:
    """Connect to the other processes; to be called before anything is computed.

    This process forks: the parent waits for the child, which goes on.

    Raises:
      JaxflError: if the options do not say who and where, or the others cannot be reached.
    """
    count, number, coordinator = dataclasses.astuple(options)
    if count == 1 and number is None and coordinator is None:
        return
    known = {}
    if count != "auto":
        host, _, port = (coordinator or "").rpartition(":")
        if number is None or not (host and port.isdecimal() and 0 <= number < count):
            given = {"processes": count, "process": number, "coordinator": coordinator}
            words = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
            raise JaxflError(
                f"{words} is incomplete or wrong; N processes need --processes N and --coordinator "
                "HOST:PORT, the same for all, and --process, a different number from 0 to N - 1 for each."
            )
        known = {"coordinator_address": coordinator, "num_processes": count, "process_id": number}
        known["cluster_detection_method"] = "deactivate"
    elif number is not None or coordinator is not None:
        raise JaxflError("--processes auto finds --process and --coordinator automatically; leave them out.")
    _stand_by()
    # No Python runs before the others are there, and JAX's own handler of SIGTERM is not to stay.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPS}
    try:
        jax.distributed.initialize(**known, shutdown_timeout_seconds=SHUTDOWN)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise JaxflError(
            f"The processes do not find each other ({reason}); start all of them, and where --processes "
            "auto does not work, with --coordinator HOST:PORT --processes N --process I."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        devices = jax.device_count()
    except RuntimeError as error:  # on CPUs each listens at the address of its machine's own name
        reason = str(error).partition("\n")[0]
        raise JaxflError(
            f"The processes cannot exchange arrays ({reason}); on CPUs the name of each machine, here "
            f"{socket.gethostname()}, must have an address, which /etc/hosts can give it."
        ) from error
    if devices != jax.process_count() * jax.local_device_count():
        raise JaxflError(
            f"Process {jax.process_index()} has {jax.local_device_count()} of {devices} devices; "
            f"give all {jax.process_count()} processes the same number."
        )


def _stand_by() -> None:
    """Go on in a child; its parent says in a sentence how it ended if JAX's runtime aborts it.

    The runtime aborts all processes when process 0 is gone, and one that waits for the others in vain; no
    Python runs any more then.
    """
    alive, held = os.pipe()
    child = os.fork()
    if not child:
        os.close(held)
        # End of file: the parent, which others take for this process, is gone.
        threading.Thread(target=lambda: os.read(alive, 1) or os._exit(1), daemon=True).start()
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child gets it, too
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in STOPS:  # before it had met the others
        os._exit(128 - code)
    if code < 0:
        by = "JAX's runtime" if -code == signal.SIGABRT else signal.Signals(-code).name
        print(f"jaxfl: {_gone(f'this one was ended by {by}')}", file=sys.stderr, flush=True)
    os._exit(2 if code < 0 else code)


def _gone(how: str) -> str:
    return (
        f"The processes of this run have not found each other, or some have ended ({how}); start all of "
        "them again, with `jaxfl resume RUN` where a run had begun."
    )


@contextlib.contextmanager
def explained_loss() -> Iterator[None]:
    """Turn the loss of another process, or an `EndsAll`, into one sentence.

    Raises:
      JaxflError: if something cannot be done together with the others.
    """
    try:
        yield
    except EndsAll as error:
        raise JaxflError(str(error)) from error
    # Jitted functions raise either of the first two, Orbax the third.
    except (jax.errors.JaxRuntimeError, ValueError, TimeoutError) as error:
        of_runtime = not isinstance(error, ValueError) or "Gloo" in str(error)
        if not (of_runtime and jax.distributed.is_initialized()):
            raise
        raise JaxflError(_gone(str(error).partition("\n")[0])) from error


def leave(code: int) -> NoReturn:
    """Exit; a process that failed does not wait for the others, which may wait for it."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        if _may_host():
            time.sleep(GRACE)
        os._exit(code)
    sys.exit(code)


def _may_host() -> bool:
    """Return whether the service by which the processes know of each other may be this process's."""
    try:
        return jax.process_index() == 0
    except RuntimeError:  # it has no devices
        return True


def on_first_process(f: Callable) -> Callable:
    """Let only process 0 run a function; all get what it returns or the `JaxflError` that it raises.

    All processes call it, in the same order. Its result can be pickled.
    """

    @functools.wraps(f)
    def everywhere(*args, **kwargs):
        if _alone():
            return f(*args, **kwargs)
        value, error = pickle.loads(
            _broadcast(_outcome(f, args, kwargs) if jax.process_index() == 0 else b"")
        )
        if error is not None:
            raise error
        return value

    return everywhere


def agree(what: str, tree: Any) -> None:
    """Go on if all processes have the same tree; all must ask at the same moment.

    Args:
      what: what they have, in words.
      tree: arrays that each holds in full, and leaves whose repr says what they are.

    Raises:
      JaxflError: in all processes, naming those that have something else than process 0.
    """
    if _alone():
        return
    digests = multihost_utils.process_allgather(np.frombuffer(digest(tree), np.uint8))
    others = [str(process) for process, digest in enumerate(digests) if (digest != digests[0]).any()]
    if others:
        whose = f"Process {others[0]} has" if len(others) == 1 else f"Processes {', '.join(others)} have"
        raise JaxflError(
            f"{whose} other {what} than process 0; start all with the same command, on similar machines that "
            "see the same files."
        )


def greatest(number: int) -> int:
    """Return the greatest number of any process; all must ask at the same moment."""
    return number if _alone() else int(multihost_utils.process_allgather(np.int32(number)).max())


def is_first() -> bool:
    """Return whether this is process 0, or the only one."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def ends_all(error: JaxflError) -> Exception:
    """Return what to raise for an error of this process only, while others wait for it in a library."""
    return error if _alone() else EndsAll(str(error))


def _alone() -> bool:
    return not jax.distributed.is_initialized() or _only_here.get()


def digest(tree: Any) -> bytes:
    """Return a digest of the bits of a tree's arrays and of the repr of its other leaves."""
    bits = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray):
            bits.update(f"{path} {leaf!r}".encode())
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        bits.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        bits.update(np.ascontiguousarray(leaf).tobytes())
    return bits.digest()


def _outcome(f, args, kwargs) -> bytes:
    """Return a function's result, or the error that it raises, pickled."""
    before = _only_here.set(True)
    try:
        return pickle.dumps((f(*args, **kwargs), None))
    except JaxflError as error:
        return pickle.dumps((None, error))
    finally:
        _only_here.reset(before)


def _broadcast(message: bytes) -> bytes:
    """Return the message of process 0, in every process; zeros may follow it."""
    blocks = int(multihost_utils.broadcast_one_to_all(np.int32(-(-len(message) // BLOCK))))
    padded = np.frombuffer(message.ljust(blocks * BLOCK, b"\0"), np.uint8).reshape(blocks, BLOCK)
    return b"".join(multihost_utils.broadcast_one_to_all(block).tobytes() for block in padded)
