"""A backward pass of max pooling by hand, which did not help enough, beside JAX's, timed alone.

    taskset -c 0 python experiments/bench/pooling.py

README.md has the results, and the time of a whole step.
"""

import time

import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.models.conv import max_pool, using

SHAPES = {  # maps (H, C, W, B) of `rows`
    "LeNet5, first": (28, 6, 28, 32),
    "LeNet5, second": (10, 16, 10, 32),
    "McMahan, first": (24, 32, 24, 50),
}
STEPS, ATTEMPTS = 200, 7


def larger(x, axis):
    """Return the larger of every two neighbours along an axis, and where it is the first one."""
    first, second = (lax.slice_in_dim(x, i, None, 2, axis) for i in range(2))
    return jnp.maximum(first, second), first >= second


@jax.custom_vjp
def by_hand(x):
    """Return the maxima of 2 x 2 windows; of equals the first one gets the gradient."""
    return larger(larger(x, 0)[0], 2)[0]


def forward(x):
    """Return the maxima, and which they were."""
    x, rows = larger(x, 0)
    x, columns = larger(x, 2)
    return x, (rows, columns)


def backward(saved, dy):
    """Return the gradient, stacked side by side instead of added up with zeros between."""
    rows, columns = saved
    dy = jnp.stack([jnp.where(columns, dy, 0), jnp.where(columns, 0, dy)], 3).reshape(rows.shape)
    dx = jnp.stack([jnp.where(rows, dy, 0), jnp.where(rows, 0, dy)], 1)
    return (dx.reshape(-1, *dx.shape[2:]),)


by_hand.defvjp(forward, backward)


def run(pool, x):
    """Compile steps along the gradient of pooled activations, and return a function that runs them."""

    def step(_, x):
        y, back = jax.vjp(lambda x: pool(jax.nn.relu(x)), x)
        return x + 1e-3 * back(y)[0]

    compiled = jax.jit(lambda x: lax.fori_loop(0, STEPS, step, x))
    jax.block_until_ready(compiled(x))
    return lambda: jax.block_until_ready(compiled(x))


def main() -> None:
    """Print a line for each shape: microseconds of a step, the best of several attempts in turn."""
    for shape, axes in SHAPES.items():
        x = jax.random.normal(jax.random.key(0), axes)
        with using("rows"):
            ways = {"derived": run(max_pool, x), "by hand": run(by_hand, x)}
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ATTEMPTS):
            for name, way in ways.items():
                begun = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - begun)
        print(shape, *(f"{name} {seconds / STEPS * 1e6:.0f}" for name, seconds in best.items()), sep="  ")


if __name__ == "__main__":
    main()
