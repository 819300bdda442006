"""Compiled programs, what compiling them has cost, and which are let go where a process holds too many."""

import gc
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.machine.memory_maps import crowded

_uses = itertools.count()
_programs = weakref.WeakSet()


class Program:
    """A jitted function, compiled ahead of time once per shape of its arguments.

    An executable is kept for the next run, until the process has no room for more: then those that were not
    used for the longest time are let go, and compiled once more if they are asked for again.

    Attributes:
      compilations: how many programs were compiled.
      seconds: how long that took, tracing included.
    """

    def __init__(self, function: Callable, donate: tuple[int, ...] = ()):
        """Nothing is compiled before the first call."""
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._compiled = {}
        self._last_use = next(_uses)
        self.compilations = 0
        self.seconds = 0.0
        _programs.add(self)

    def compile(self, *args):
        """The executable for arguments of these shapes."""
        leaves, structure = jax.tree.flatten(args)
        signature = structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        self._last_use = next(_uses)
        if signature not in self._compiled:
            if crowded():
                _let_go()
            start = time.perf_counter()
            self._compiled[signature] = self._jitted.lower(*args).compile()
            self.compilations += 1
            self.seconds += time.perf_counter() - start
        return self._compiled[signature]

    def formula(self, *args) -> Any:
        """What it computes for arguments of these shapes, to compare."""
        traced = self._jitted.trace(*args).jaxpr
        return str(traced.jaxpr), [np.asarray(constant).tobytes() for constant in traced.consts]

    def __call__(self, *args):
        """Run it."""
        return self.compile(*args)(*args)


def _let_go() -> None:
    """Forget the executables of the older half of all programs."""
    held = sorted((program for program in _programs if program._compiled), key=lambda one: one._last_use)
    for program in held[: len(held) // 2]:
        program._compiled.clear()
        program._jitted.clear_cache()  # which holds them as well
    gc.collect()
