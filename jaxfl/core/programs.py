"""Compiled programs, the time to compile them, and which are dropped when a process holds too many."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import memory
from jaxfl.machine.memory_maps import crowded

compilers = ThreadPoolExecutor(thread_name_prefix="compiler")
_programs = weakref.WeakSet()
_uses = itertools.count()
tracing = threading.RLock()  # one thread at a time traces, makes room or adds a program


class Program:
    """A jitted function, compiled ahead of time once per shape of its arguments.

    Several threads may call it: one compiles, the others wait. An executable is kept for the next run, until
    the process has no room for more. Then the least recently used ones are dropped, and compiled again if
    needed.

    Attributes:
      compilations: number of compiled programs.
      seconds: time spent on that, tracing included; compilation in parallel to other work does not count.
    """

    def __init__(self, function: Callable, donate: tuple[int, ...] = ()):
        """Wrap a function; nothing is compiled yet."""
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._begun: dict[Any, Future] = {}
        self._compiled = {}
        self._last_use = next(_uses)
        self.compilations = 0
        self.seconds = 0.0
        self._compiling = threading.Lock()
        with tracing:
            _programs.add(self)

    def begin(self, *args) -> None:
        """Start compiling it for arguments of these shapes in another thread."""
        signature = _signature(args)
        with tracing:
            if signature in self._compiled or signature in self._begun:
                return
            start = time.perf_counter()
            self._begun[signature] = compilers.submit(self._lowered(args).compile)
            self.seconds += time.perf_counter() - start

    def compile(self, *args):
        """Return the executable for arguments of these shapes."""
        signature = _signature(args)
        self._last_use = next(_uses)
        if compiled := self._compiled.get(signature):
            return compiled
        with self._compiling:
            if compiled := self._compiled.get(signature):
                return compiled
            start = time.perf_counter()
            with tracing:  # another thread may be about to begin it
                begun = self._begun.pop(signature, None)
            compiled = begun.result() if begun else self._lowered(args).compile()
            memory.warn_if_short(compiled)
            self._compiled[signature] = compiled
            self.seconds += time.perf_counter() - start
        return compiled

    def _lowered(self, args: tuple) -> jax.stages.Lowered:
        """Lower the function for these arguments, after making room for its executable if needed."""
        with tracing:
            if crowded():
                _let_go()
            self.compilations += 1
            return self._jitted.lower(*args)

    def jaxpr_text(self, *args) -> Any:
        """Return what it computes for arguments of these shapes, to compare."""
        traced = self._jitted.trace(*args).jaxpr
        return str(traced.jaxpr), [np.asarray(constant).tobytes() for constant in traced.consts]

    def __call__(self, *args):
        """Run it."""
        return self.compile(*args)(*args)


def _signature(args: tuple) -> Any:
    """Return a key that is equal for two calls of the same executable."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _let_go() -> None:
    """Drop the executables of the less recently used half of all programs."""
    held = sorted((program for program in _programs if program._compiled), key=lambda one: one._last_use)
    for program in held[: len(held) // 2]:
        program._compiled.clear()
        program._jitted.clear_cache()
    gc.collect()
