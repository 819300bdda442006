"""Ownership of a run folder: its writer holds a lock on a file in it, which ends with the process.

Readers need no lock. Of several processes of one run, the first holds the lock for all. Beside the lock the
owner writes who it is.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from jaxfl.errors import JaxflError
from jaxfl.folder.store import LOCK, OWNER, TURN
from jaxfl.machine.files import reads, writes
from jaxfl.machine.processes import is_first

PATIENCE = 0.1  # seconds: `is_owned` locks the file for a moment

_taken: dict[Path, os.stat_result] = {}  # the locked files, by folder, in all processes of a run


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run folder within the block; make it if needed, and remove it again if it stays empty.

    An enclosing block may own it already.

    Raises:
      JaxflError: if another process owns it, or it cannot be written.
    """
    if folder in _taken and reads(_is_there)(folder, _taken[folder]):
        yield
        return
    lock = FileLock(folder / LOCK, timeout=PATIENCE, thread_local=False)
    file, made = _take(folder, lock)
    _taken[folder] = file
    try:
        yield
    finally:
        _taken.pop(folder, None)
        if is_first():
            # Removed while it is locked: a process that has opened it meanwhile finds it gone. A folder that
            # was removed with it may have another owner by now.
            if _is_there(folder, file):
                with contextlib.suppress(OSError):  # the disk is read-only by now: unlocked, it owns nothing
                    (folder / OWNER).unlink(missing_ok=True)
                    (folder / LOCK).unlink()
            lock.release()
            for path in made:
                with contextlib.suppress(OSError):  # it holds a run, or went with one
                    path.rmdir()


@contextlib.contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Let one process after another summarise the runs in a folder: the last one sees all of them.

    Nobody waits where there is no folder yet, or where files cannot be locked.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            if is_first():
                held.enter_context(FileLock(folder / TURN))
                held.callback((folder / TURN).unlink, missing_ok=True)
        yield


@writes
def require_owned(folder: Path) -> None:
    """Refuse to write on in a folder that somebody has removed, and perhaps made anew, within `owned`."""
    if not _is_there(folder, _taken[folder]):
        raise JaxflError(
            f"{folder} has been removed while it was run, and perhaps made anew by another process; this one "
            "writes nothing more there."
        )


def is_owned(folder: Path) -> bool:
    """Return whether a process is working on a run, as far as this machine can tell; write nothing.

    The file is locked for a moment; other callers may do so at the same time.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


@writes
def _take(folder: Path, lock: FileLock) -> tuple[os.stat_result, list[Path]]:
    """Lock a folder; return the file, and the folders made for it, the innermost first."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
            break
        except FileNotFoundError:  # the owner before has just removed the folder, which stayed empty
            continue
        except Timeout:
            raise JaxflError(f"{_owner(folder)} works in {folder}; wait for it, or end it first.") from None
    now = {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    (folder / OWNER).write_text(json.dumps(now))
    return (folder / LOCK).stat(), made


def _is_there(folder: Path, file: os.stat_result) -> bool:
    """Return whether a locked file is still the one in the folder."""
    return (folder / LOCK).exists() and os.path.samestat(file, (folder / LOCK).stat())


def _owner(folder: Path) -> str:
    """Return what the owner has written about itself, in words."""
    with contextlib.suppress(KeyError, OSError, TypeError, ValueError):  # it is just about to
        owner = json.loads((folder / OWNER).read_text())
        return "Process {process} on {host} (since {since})".format(**owner)
    return "Another process"
