"""Compiled programs, and what compiling them has cost."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Program:
    """A jitted function, compiled ahead of time once per shape of its arguments.

    Attributes:
      compilations: how many programs were compiled.
      seconds: how long that took, tracing included.
    """

    def __init__(self, function: Callable, donate: tuple[int, ...] = ()):
        """Nothing is compiled before the first call."""
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._compiled = {}
        self.seconds = 0.0

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return len(self._compiled)

    def compile(self, *args):
        """The executable for arguments of these shapes."""
        leaves, structure = jax.tree.flatten(args)
        signature = structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        if signature not in self._compiled:
            start = time.perf_counter()
            self._compiled[signature] = self._jitted.lower(*args).compile()
            self.seconds += time.perf_counter() - start
        return self._compiled[signature]

    def formula(self, *args) -> Any:
        """What it computes for arguments of these shapes, to compare."""
        traced = self._jitted.trace(*args).jaxpr
        return str(traced.jaxpr), [np.asarray(constant).tobytes() for constant in traced.consts]

    def __call__(self, *args):
        """Run it."""
        return self.compile(*args)(*args)
