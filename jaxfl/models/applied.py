"""The weights with which a prediction applies the blocks of a model, however it combines them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.models.model import Model


def applied_weights(model: Model, predict: Callable[[Model, jax.Array], Any]) -> dict[str, dict]:
    """Return what `applied` finds, in a form for people to read.

    Returns:
      {block: {layer: NumPy arrays}}, parameters and BatchNorm's statistics side by side. A block that is
      applied with several weights has an entry for each: ``classifier``, ``classifier-2``.

    Raises:
      JaxflError: as `applied`, or if a layer has a parameter and a statistic of the same name.
    """
    return {
        block if number == 1 else f"{block}-{number}": _merged(block, *jax.tree.map(np.asarray, weights))
        for block, of_block in applied(model, predict).items()
        for number, weights in enumerate(of_block, 1)
    }


def applied(model: Model, predict: Callable[[Model, jax.Array], Any]) -> dict[str, list[tuple[dict, dict]]]:
    """Record the weights with which a prediction applies the blocks of a model, without computing it.

    Args:
      model: model whose blocks are recorded.
      predict: ``(model, x (1, H, W, C)) -> anything``; it applies the model that it is given, or parts of it.

    Returns:
      {block: pairs (parameters, statistics)}, each different pair once, in order of first use.

    Raises:
      JaxflError: if several networks are applied side by side by `jax.vmap`.
    """
    noted = {}

    @dataclasses.dataclass(frozen=True)
    class Noting(Model):
        """The model, recording instead of computing; its outputs are zeros."""

        def apply_with_taps(self, params, stats, x, depths, *, train, key=None, mask=None):
            for name in self.names:
                weights, known = (params[name], stats.get(name, {})), noted.setdefault(name, [])
                if not any(_same(weights, other) for other in known):
                    known.append(weights)
            if depths:
                return super().apply_with_taps(params, stats, x, depths, train=train, key=key, mask=mask)
            output = jnp.zeros((len(x), *self.output), jnp.result_type(float))
            return output, {name: stats.get(name, {}) for name in self.names}, ()

    noting = Noting(*(getattr(model, field.name) for field in dataclasses.fields(model)))
    try:
        with jax.disable_jit():  # then loops are Python's, and weights are concrete arrays
            x = model.examples()
            predict(noting, jnp.zeros(x.shape, x.dtype))
        jax.tree.map(np.asarray, noted)
    except jax.errors.TracerArrayConversionError:
        raise JaxflError(
            "The method predicts with several networks at once (jax.vmap), whose weights cannot be told "
            "apart; use the models only to predict."
        ) from None
    return noted


def _merged(where: str, one: dict, other: dict) -> dict:
    both = dict(one)
    for name, entry in other.items():
        mine = both.get(name, {})
        if not (isinstance(mine, dict) and isinstance(entry, dict) or name not in both):
            raise JaxflError(f"{where} has a parameter and a statistic {name!r}; rename one of them.")
        both[name] = _merged(f"{where}/{name}", mine, entry) if isinstance(entry, dict) else entry
    return both


def _same(one: Any, other: Any) -> bool:
    leaves, structure = jax.tree.flatten(one)
    others, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(map(np.array_equal, leaves, others))
