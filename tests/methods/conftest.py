"""Keep the programs of these tests out of the shared cache: no other tests need them."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def unshared_programs():
    """Write no programs to the cache of the session's processes: it takes a twentieth of the time."""
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
