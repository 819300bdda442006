"""Convolutions by columns and by Winograd's products, which jaxfl does not have: a gradient step of each.

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
    "ResNet-18, first stage": (34, 64, 32, 64, 3),
    "second": (18, 128, 32, 128, 3),
    "third": (10, 256, 32, 256, 3),
    "fourth": (6, 512, 32, 512, 3),
}
ATTEMPTS = 4


def columns(x, kernel, stride):
    """Convolve maps (C, H, W, B) by one product with all patches as columns of a matrix; stride 1 only."""
    kh, kw, channels, features = kernel.shape
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    x = jnp.concatenate([x[:, :, i : i + width] for i in range(kw)])
    x = jnp.concatenate([x[:, i : i + height] for i in range(kh)])
    y = kernel.reshape(kh * kw * channels, features).T @ x.reshape(x.shape[0], -1)
    return y.reshape(features, *x.shape[1:])


def winograd(x, kernel, stride):
    """Convolve maps (C, H, W, B) with 3 x 3 kernels, by 16 products for 2 x 2 outputs instead of 36."""

    def of_input(x, axis):
        size = x.shape[axis] - 3
        a, b, c, d = (jax.lax.slice_in_dim(x, i, i + size, 2, axis) for i in range(4))
        return a - c, b + c, c - b, b - d

    def of_kernel(a, b, c):
        return a, (a + b + c) / 2, (a - b + c) / 2, c

    def of_output(products, axis):
        a, b, c, d = products
        y = jnp.stack((a + b + c, b - c - d), axis + 1)
        return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])

    def product(u, v):
        return (u.T @ v.reshape(len(v), -1)).reshape(-1, *v.shape[1:])

    us = [of_kernel(*row) for row in of_kernel(*kernel)]
    vs = [of_input(row, 2) for row in of_input(x, 1)]
    rows = [of_output(list(map(product, u, v)), 2) for u, v in zip(us, vs, strict=True)]
    return of_output(rows, 1)


WAYS = {name: CONVOLUTIONS[name] for name in ("rows", "patches")}
WAYS["columns"] = WAYS["rows"]._replace(axes="CHWB", apply=columns)
WAYS["winograd"] = WAYS["columns"]._replace(apply=winograd)


def microseconds(apply, x, kernel, steps: int) -> float:
    """Return the microseconds of one gradient step on maps and kernel, the best of several attempts."""

    def step(_, both):
        gradients = jax.grad(lambda both: jnp.square(apply(*both, 1)).sum())(both)
        return jax.tree.map(lambda leaf, g: leaf - 1e-6 * g, both, gradients)

    run = jax.jit(lambda both: jax.lax.fori_loop(0, steps, step, both))
    run((x, kernel))
    seconds = []
    for _ in range(ATTEMPTS):
        begun = time.perf_counter()
        jax.block_until_ready(run((x, kernel)))
        seconds.append(time.perf_counter() - begun)
    return min(seconds) / steps * 1e6


def main() -> None:
    """Print a line for each shape."""
    for shape, (side, channels, images, features, size) in SHAPES.items():
        x = jax.random.normal(jax.random.key(0), (images, side, side, channels))
        kernel = 0.01 * jax.random.normal(jax.random.key(1), (size, size, channels, features))
        took, steps = {}, 100 if channels <= 64 and images < 32 else 5
        for name, way in WAYS.items():
            if name == "winograd" and (size != 3 or side % 2):
                continue
            maps = x.transpose([IMAGES.index(axis) for axis in way.axes])
            took[name] = f"{name} {microseconds(way.apply, maps, kernel, steps):.0f}"
        print(f"{shape}: {', '.join(took.values())} microseconds", flush=True)


if __name__ == "__main__":
    main()
