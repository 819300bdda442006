"""The fastest convolution for some networks on the current device, found by trying all."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxfl.models.conv import CONVOLUTIONS
from jaxfl.models.model import Model

BATCH, STEPS, REPETITIONS = 32, 10, 3


def fastest(models: Sequence[tuple[Model, int]], at_once: int, cache: Path) -> str:
    """Time training steps on 32 images with every convolution, and return the name of the fastest.

    Args:
      models: pairs (network, number of clients that train it).
      at_once: number of clients that train side by side.
      cache: JSON file of earlier measurements; ignored if it cannot be read or written.

    Returns:
      A key of `CONVOLUTIONS`.
    """
    known = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known |= json.loads(cache.read_text())
    total = dict.fromkeys(CONVOLUTIONS, 0.0)
    for model, clients in models:
        device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
        network = f"{model.name} {model.size} {model.shape} {model.precision} {jnp.result_type(float)}"
        question = f"{network}, {BATCH} images, {at_once} at once, {device}"
        if set(known.get(question, ())) != set(CONVOLUTIONS):
            known[question] = _seconds(model, at_once)
        for name in total:
            total[name] += clients * known[question][name]
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1) + "\n")
        part.replace(cache)
    return min(total, key=total.__getitem__)


def _seconds(model: Model, clients: int) -> dict[str, float]:
    """Return the shortest time of some steps with each convolution, tried in turn, in seconds."""
    programs = {name: _steps(dataclasses.replace(model, convolution=name), clients) for name in CONVOLUTIONS}
    seconds = dict.fromkeys(programs, math.inf)
    for program in programs.values():
        program()  # compiles
    for _ in range(REPETITIONS):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def _steps(model: Model, clients: int):
    """Return a compiled function without arguments: some training steps of stacked clients."""
    x = jnp.ones((BATCH, *model.shape), jnp.result_type(float))

    def train(weights):
        def loss(params):
            logits, _ = model.apply(params, weights.stats, x, train=True, key=jax.random.key(0))
            return jnp.square(logits).mean()

        def step(_, params):
            return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params))

        return jax.lax.fori_loop(0, STEPS, step, weights.params)

    run = jax.jit(jax.vmap(train) if clients > 1 else train)
    weights = model.init(jax.random.key(0))
    if clients > 1:
        weights = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients, *leaf.shape)), weights)
    return lambda: run(weights)
