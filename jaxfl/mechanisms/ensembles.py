"""Ensembles: what clients' models say together, which teaches in many methods."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxfl.core.client_map import per_group
from jaxfl.core.protocol import Predictor
from jaxfl.data.federation import PerGroup
from jaxfl.models.model import Model


def teachers(
    models: Sequence[Model], weights: PerGroup, mix: Callable, common: tuple, *own: PerGroup
) -> PerGroup:
    """Return ensembles of a round's models as predictors of its clients, for `Info.teacher`.

    An image takes as many predictions as there are models; these run one after another.

    Args:
      models: per group, the architecture of its members.
      weights: per group (k_g, ...), the members, in all groups K.
      mix: ``(task, logits (K, B, outputs), *common, *own) -> scores (B, outputs)``.
      common: arrays that all clients' ensembles have in common.
      *own: per group (k_g, ...), arrays in which they differ; without any all clients have one teacher.
    """

    def predict(model, shared, own, x):
        weights, common = shared

        def logits(model, members):
            return jax.lax.map(lambda w: model.apply(w.params, w.stats, x, train=False)[0], members)

        return mix(model.task, jnp.concatenate(per_group(logits, models, weights)), *common, *own)

    of_groups = tuple(zip(*own, strict=True)) or ((),) * len(models)
    return per_group(lambda own: Predictor((weights, common), own, predict), of_groups)
