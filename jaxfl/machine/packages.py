"""Packages of others: those that are extras, and their logs."""

import contextlib
import importlib
import logging
from types import ModuleType

from jaxfl.errors import JaxflError


def optional(package: str, extra: str, what: str) -> ModuleType:
    """Import a package that an extra of jaxfl brings.

    `what` needs it; this begins the sentence of the error.

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
