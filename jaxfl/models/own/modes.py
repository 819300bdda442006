"""The training flag of a module's `__call__`, by the names that libraries have for it."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.config.own_code import line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.own.functions import accepted
from jaxfl.models.own.walk import Network, Walk, calls, images, leaves

NAMES = {"train": True, "training": True, "is_training": True, "deterministic": False, "inference": False}


def modes(call, train: bool) -> dict[str, Any]:
    """Return the training flag under the name that a function has for it; nothing if it has none."""
    return accepted(call, {name: positive == train for name, positive in NAMES.items()})


def require_modes(kind: type, *arguments: str, **options: Any) -> None:
    """Refuse a class of modules that cannot be called like this, naming what parameters it may have."""
    options = modes(kind.__call__, True) | options
    require_call(f"{kind.__name__}.__call__", kind.__call__, "self", "x", *arguments, **options)


def require_switch(name: str, network: Network) -> None:
    """Refuse a network whose BatchNorm or dropout does the same in training and in evaluation by mistake.

    Raises:
      JaxflError: if its training flag has a name that jaxfl does not know, or evaluation changes statistics.
    """
    where = line_of(network.kind)
    unknown = [
        parameter.name
        for parameter in inspect.signature(network.kind.__call__).parameters.values()
        if isinstance(parameter.default, bool) and parameter.name not in NAMES
    ]
    noisy = leaves(network).stats or any(made.kind == "Dropout" for made in calls(network))
    if unknown and noisy and _text(network, True) == _text(network, False):
        raise JaxflError(
            f"{where}: {name} has the parameter {unknown[0]}, which stays at its default in training and in "
            f"evaluation; name its training flag {' or '.join(NAMES)}."
        )
    if leaves(network).stats and _changes_statistics(network):
        raise JaxflError(
            f"{where}: {name} changes its BatchNorm statistics in evaluation as well; give __call__ a "
            "parameter train, and BatchNorm use_running_average=not train."
        )


def _text(network: Network, train: bool) -> str:
    """Return what a network computes, to compare."""

    def run(weights, x, key):
        return network.run(weights, x, Walk(), train=train, key=key, mask=None)

    made = jax.make_jaxpr(run)(leaves(network), images(network), jax.random.key(0))
    return re.sub("0x[0-9a-f]+", "", str(made))  # places in memory


def _changes_statistics(network: Network) -> bool:
    def after(weights, x):
        return network.run(weights, x, Walk(), train=False, key=None, mask=None)[1]

    form = images(network)
    traced = jax.make_jaxpr(after)(leaves(network), form).jaxpr
    if {*map(id, traced.outvars)} <= {*map(id, traced.invars)}:
        return False
    # nn.remat and nn.jit return copies, so compare numbers.
    weights = network.draw(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), form.shape).astype(form.dtype)
    same = jax.tree.map(jnp.array_equal, weights.stats, jax.jit(after)(weights, x))
    return not all(jax.tree.leaves(same))
