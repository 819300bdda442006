"""Ownership of a run folder: its writer holds a lock on a file in it, which ends with the process.

Readers need no lock. Of several processes of one run, the first holds the lock for all. On a file system
without locks the content of the file decides: which process holds it, on which machine, since when.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from jaxfl.errors import JaxflError
from jaxfl.folder.store import OWNER, TURN
from jaxfl.machine.files import writes
from jaxfl.machine.processes import is_first

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


_descriptors: dict[Path, int] = {}  # of the locks that this process holds, by folder


class _Held(NamedTuple):
    """A lock: its file's descriptor, and the folders made for it, the innermost first."""

    descriptor: int
    made: list[Path]


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder within the block; make it if needed, and remove it again if it stays empty.

    Args:
      folder: folder of a run, or for a new one; an enclosing block may own it already.

    Raises:
      JaxflError: if another process owns it, or it cannot be written.
    """
    if folder in _descriptors and _is_there(_descriptors[folder], folder / OWNER):
        yield
        return
    held = _take(folder)
    _descriptors[folder] = held.descriptor
    try:
        yield
    finally:
        _descriptors.pop(folder, None)
        if is_first():
            # Removed while it is locked: a process that has opened it meanwhile finds it gone. A folder that
            # was removed with it may have another owner by now.
            if _is_there(held.descriptor, folder / OWNER):
                with contextlib.suppress(OSError):  # the disk is read-only by now: unlocked, it owns nothing
                    (folder / OWNER).unlink()
            os.close(held.descriptor)
            for path in held.made:
                with contextlib.suppress(OSError):  # it holds a run, or went with one
                    path.rmdir()


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Let one process after another summarise the runs in a folder: the last one sees all of them.

    Nobody waits where there is no folder yet, or where files cannot be locked.
    """
    path = folder / TURN
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            while is_first():
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # on NFS: a lock on the server
                if _is_there(descriptor, path):  # the one before has removed its file
                    held.callback(path.unlink, missing_ok=True)
                    break
        yield


@writes
def require_owned(folder: Path) -> None:
    """Refuse to write on in a folder that somebody has removed, and perhaps made anew, within `owned`.

    Raises:
      JaxflError: naming it.
    """
    if not _is_there(_descriptors[folder], folder / OWNER):
        raise JaxflError(
            f"{folder} has been removed while it was run, and perhaps made anew by another process; this one "
            "writes nothing more there."
        )


def is_owned(folder: Path) -> bool:
    """Return whether a process is working on a run, as far as this machine can tell; write nothing.

    The file is locked for a moment; other callers may do so at the same time.
    """
    try:
        descriptor = os.open(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        owner = _written(descriptor)
        return error.errno not in NO_LOCKS or (owner is not None and not _gone(owner))
    finally:
        os.close(descriptor)


@writes
def _take(folder: Path) -> _Held:
    path = folder / OWNER
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path)
            if _is_there(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
                return _Held(descriptor, made)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_there(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _lock(descriptor: int, path: Path) -> None:
    """Lock an open file, or refuse it with the name of its owner."""
    note = ""
    try:
        for patience in (0.01, 0.02, 0.04, 0):  # `is_owned` locks the file for a moment
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # on NFS: a lock on the server
                return
            except BlockingIOError:
                if not patience:
                    raise
                time.sleep(patience)
    except BlockingIOError:
        owner = _written(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        owner = _written(descriptor)
        if not owner or _gone(owner):
            return
        note = f" (files cannot be locked there: if that process is gone, delete {path})"
    who = "Process {process} on {host} (since {since})".format(**owner) if owner else "Another process"
    raise JaxflError(f"{who} works in {path.parent}; wait for it, or end it first{note}.")


def _this_process() -> dict:
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"process": os.getpid(), "host": socket.gethostname(), "since": now, "born": _born(os.getpid())}


def _written(descriptor: int) -> dict | None:
    """Return what the owner has written about itself; None if it is just about to."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return owner if _this_process().keys() <= owner.keys() else None
    except (AttributeError, ValueError):
        return None


def _gone(owner: dict) -> bool:
    """Return whether a process of this machine has ended; False on another machine, where it is unknown."""
    return owner["host"] == socket.gethostname() and _born(owner["process"]) != owner["born"]


def _born(process: int) -> float | None:
    """Return when a process began, which differs for a later one of the same id; None if there is none."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).create_time()
    return None
