"""Convolution by columns, which did not help: a gradient step beside `rows` and `patches`, timed alone.

    taskset -c 0 python experiments/bench/columns.py

README.md has the results, also of whole runs.
"""

import time

import jax
import jax.numpy as jnp

from jaxfl.models.conv import CONVOLUTIONS, IMAGES

SHAPES = {  # side, channels, images, features, kernel
    "LeNet5, first": (32, 3, 32, 6, 5),
    "LeNet5, second": (14, 6, 32, 16, 5),
    "McMahan, first": (28, 1, 10, 32, 5),
    "McMahan, second": (12, 32, 10, 64, 5),
    "3 x 3, 64 channels": (16, 64, 16, 64, 3),
}
STEPS, ATTEMPTS = 100, 4


def columns(x, kernel, stride):
    """Convolve maps (C, H, W, B) by one product with all patches as columns of a matrix; stride 1 only."""
    kh, kw, channels, features = kernel.shape
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    x = jnp.concatenate([x[:, :, i : i + width] for i in range(kw)])
    x = jnp.concatenate([x[:, i : i + height] for i in range(kh)])
    y = kernel.reshape(kh * kw * channels, features).T @ x.reshape(x.shape[0], -1)
    return y.reshape(features, *x.shape[1:])


WAYS = {name: CONVOLUTIONS[name] for name in ("rows", "patches")}
WAYS["columns"] = WAYS["rows"]._replace(axes="CHWB", apply=columns)


def microseconds(apply, x, kernel) -> float:
    """Return the microseconds of one gradient step on maps and kernel, the best of several attempts."""

    def step(_, both):
        gradients = jax.grad(lambda both: jnp.square(apply(*both, 1)).sum())(both)
        return jax.tree.map(lambda leaf, g: leaf - 1e-6 * g, both, gradients)

    run = jax.jit(lambda both: jax.lax.fori_loop(0, STEPS, step, both))
    run((x, kernel))
    seconds = []
    for _ in range(ATTEMPTS):
        begun = time.perf_counter()
        jax.block_until_ready(run((x, kernel)))
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / STEPS * 1e6


def main() -> None:
    """Print a line for each shape."""
    for shape, (side, channels, images, features, size) in SHAPES.items():
        x = jax.random.normal(jax.random.key(0), (images, side, side, channels))
        kernel = 0.01 * jax.random.normal(jax.random.key(1), (size, size, channels, features))
        took = {}
        for name, way in WAYS.items():
            maps = x.transpose([IMAGES.index(axis) for axis in way.axes])
            took[name] = f"{name} {microseconds(way.apply, maps, kernel):.0f}"
        print(f"{shape}: {', '.join(took.values())} microseconds", flush=True)


if __name__ == "__main__":
    main()
