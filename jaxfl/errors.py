"""The one exception that jaxfl raises on purpose, and the parts that several of its messages share."""

import contextlib
import difflib
import errno
import gc
import importlib
import logging
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


class JaxflError(Exception):
    """An error that the user can mend. The message is one sentence: what is wrong, where, what to do.

    The command line prints the message and exits with code 2; from Python it is raised as it is.
    """


def without_traceback(error: JaxflError) -> JaxflError:
    """Return an error to be told later without its traceback, which would keep arrays in memory."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    gc.collect()  # some of them are in a cycle
    return error


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence: what the user may have meant, with a prefix, or the known names."""
    known = [prefix + entry for entry in known if not entry.startswith("_")]
    close = difflib.get_close_matches(prefix + name, known, n=1, cutoff=0.65)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(known) > 40:
        return f"none of the {len(known)} known names is similar."
    return f"choose from {', '.join(known)}." if known else "there are none."


def beyond_cohort(what: str) -> JaxflError:
    """Return the error about something that needs all clients, not only a cohort: `jaxfl.core.host_state`."""
    return JaxflError(
        f"{what}, but --client-state host keeps only a cohort in memory; leave out --client-state host."
    )


@contextlib.contextmanager
def writing(where: str | Path):
    """Turn a failed write into one sentence that names `where`."""
    try:
        yield
    except OSError as error:
        raise unwritable(where, error) from error


def unwritable(where: str | Path, error: Exception) -> JaxflError:
    """Return the error about a failed write."""
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    closed = {errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EEXIST}
    room = "" if getattr(error, "errno", None) in closed else "free some space or "
    return JaxflError(f"{where} cannot be written ({reason}); {room}choose another place.")


def unreadable(where: str | Path, error: OSError) -> JaxflError:
    """Return the error about a failed read."""
    return JaxflError(f"{where} cannot be read ({error.strerror or error}); check its permissions.")


def read_text(path: Path) -> str:
    """Return the content of a text file.

    Raises:
      JaxflError: if it cannot be read, or is no text.
    """
    try:
        return path.read_text()
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise JaxflError(f"{path} is not a text file: {error}.") from error


def optional(package: str, extra: str, what: str) -> ModuleType:
    """Import a package that is an extra.

    Args:
      package: name of the package.
      extra: extra of jaxfl that brings it.
      what: what needs it, the beginning of a sentence.

    Raises:
      JaxflError: if it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise JaxflError(
            f"{what} needs the package {name}, which is not installed; pip install '.[{extra}]' in a clone "
            "of jaxfl."
        ) from None


@contextlib.contextmanager
def quiet():
    """Silence libraries' logs about a problem that our message says in one sentence."""
    loggers = [logging.getLogger(name) for name in ("absl", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
