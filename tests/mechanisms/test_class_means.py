"""Class means over clients."""

import jax.numpy as jnp
import numpy as np
from conftest import assert_same

from jaxfl.mechanisms.class_means import ClassMeans, over_clients


def test_a_class_that_no_client_has_in_a_round_keeps_its_mean():
    """The class remains known, with as many rows as before."""
    before = ClassMeans(jnp.array([[1.0, 2], [3, 4], [5, 6]]), jnp.array([7.0, 8, 0]))
    now = ClassMeans(
        jnp.array([[[9.0, 9], [0, 0], [0, 0]], [[6, 0], [0, 0], [0, 0]]]), jnp.array([[1.0, 0, 0], [2, 0, 0]])
    )
    for uniform, mean, rows in (False, [7, 3], 3), (True, [7.5, 4.5], 2):
        found = over_clients((now,), before, uniform)
        assert_same(
            found, ClassMeans(np.float32([mean, [3, 4], [5, 6]]), np.float32([rows, 8, 0])), tolerance=1e-6
        )
        assert found.known.tolist() == [True, True, False]
