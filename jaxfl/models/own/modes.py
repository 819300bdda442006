"""The training flag of a module's `__call__`, by the names that libraries have for it."""

from typing import Any

from jaxfl.config.own_code import require_call
from jaxfl.models.own.functions import accepted

NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False, "inference": False}


def modes(call, train: bool) -> dict[str, Any]:
    """Return the training flag under the name that a function has for it; nothing if it has none."""
    return accepted(call, {name: positive == train for name, positive in NAMES.items()})


def require_modes(kind: type, *arguments: str, **options: Any) -> None:
    """Raise `JaxflError` if a class of modules cannot be called like this.

    Raises:
      JaxflError: naming its file and line, its parameters and those that it may have.
    """
    options = modes(kind.__call__, True) | options
    require_call(f"{kind.__name__}.__call__", kind.__call__, "self", "x", *arguments, **options)
