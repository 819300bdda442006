"""Networks of the user's own as models: Flax Linen, Flax NNX, Equinox, or plain functions.

`functions.py` is the base: a block is a function that draws weights and one that applies them. `chain.py`
divides a network that is written as one module into such blocks, by watching it call its layers; the three
libraries differ only in how that is done. `pretrained.py` names the arrays of such a network. NNX and Equinox
are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxfl.models.own.functions import from_functions
from jaxfl.models.own.linen import from_linen
from jaxfl.models.own.pretrained import named_arrays

if TYPE_CHECKING:
    from jaxfl.models.own.equinox import from_equinox
    from jaxfl.models.own.nnx import from_nnx

__all__ = ["from_equinox", "from_functions", "from_linen", "from_nnx", "named_arrays"]

LATER = {"from_nnx": "jaxfl.models.own.nnx", "from_equinox": "jaxfl.models.own.equinox"}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)
