"""What these tests compile nobody else does."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def unshared_programs():
    """So it is not written into the cache of the session's processes, which takes a twentieth of the time."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
