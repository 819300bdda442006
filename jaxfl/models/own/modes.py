"""What a module's `__call__` is told besides its input, by the names that libraries have for it."""

from typing import Any

from jaxfl.config.own_code import require_call
from jaxfl.models.own.functions import accepted

NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False, "inference": False}


def modes(call, train: bool) -> dict[str, Any]:
    """Whether it trains, under the name for which a function has a parameter; nothing if it has none."""
    return accepted(call, {name: positive == train for name, positive in NAMES.items()})


def require_modes(kind: type, *arguments: str, **options: Any) -> None:
    """Refuse a class of modules that cannot be called like this.

    Raises:
      JaxflError: naming its file and line, its parameters and those that it may have.
    """
    options = modes(kind.__call__, True) | options
    require_call(f"{kind.__name__}.__call__", kind.__call__, "self", "x", *arguments, **options)
