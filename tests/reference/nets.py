"""The multilayer perceptron and the CNN of McMahan et al. 2017, forward and backward.

Networks and layers return their output and a function `back`, which takes the gradient of a loss
with respect to that output to those with respect to the input and, by name, to the weights.
"""

import numpy as np

HEAD = "classifier"


def mlp(weights, x):
    """Features of a multilayer perceptron: images (B, H, W, C) -> (B, d)."""
    return chain(weights, x, *FC)


def cnn(weights, x):
    """Features of the CNN with two padded 5x5 convolutions: images (B, H, W, C) -> (B, d)."""
    return chain(weights, x, *CONV1, *CONV2, *FC)


def late(weights, x):
    """Features of such a CNN whose first convolution is not pooled: images (B, H, W, C) -> (B, d)."""
    return chain(weights, x, *CONV1[:2], *CONV2, *FC)


def deep(weights, x):
    """Features of such a CNN with a third convolution: images (B, H, W, C) -> (B, d)."""
    return chain(weights, x, *CONV1, *CONV2, *CONV3, *FC)


def classify(weights, z):
    """Logits of the linear head: features (B, d) -> (B, classes)."""
    return dense(HEAD)(weights, z)


def logits(net, weights, x):
    """Prediction of a whole model: images (B, H, W, C) -> (B, classes)."""
    return classify(weights, net(weights, x)[0])[0]


def outputs(net, weights, x):
    """What every block puts out, in order: images (B, H, W, C) -> {block: (B, ...)}."""
    found = {}
    for name, layers in BLOCKS[net].items():
        found[name] = x = chain(weights, x, *layers)[0]
    return found


def head(weights):
    """The classifier's part of some weights."""
    return {name: value for name, value in weights.items() if in_head(name)}


def body(weights):
    """The extractor's part of some weights."""
    return {name: value for name, value in weights.items() if not in_head(name)}


def in_head(name):
    """Whether a leaf belongs to the classifier."""
    return name.startswith(HEAD)


# ---- layers


def chain(weights, x, *layers):
    """Layers one after the other."""
    backs = []
    for layer in layers:
        x, back = layer(weights, x)
        backs.append(back)

    def back(dx):
        gradients = {}
        for back in reversed(backs):
            dx, new = back(dx)
            gradients |= new
        return dx, gradients

    return x, back


def dense(name):
    """Affine map, (B, d) -> (B, features)."""

    def layer(weights, x):
        kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]

        def back(dy):
            return dy @ kernel.T, {f"{name}/kernel": x.T @ dy, f"{name}/bias": dy.sum(0)}

        return x @ kernel + bias, back

    return layer


def conv(name):
    """Convolution with an odd kernel (k, k, C, D), zeros around: (B, H, W, C) -> (B, H, W, D)."""

    def layer(weights, x):
        kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]

        def back(dy):
            dkernel = np.einsum("bhwcij,bhwd->ijcd", windows(x, len(kernel)), dy)
            dx = correlate(dy, kernel[::-1, ::-1].swapaxes(2, 3))
            return dx, {f"{name}/kernel": dkernel, f"{name}/bias": dy.sum((0, 1, 2))}

        return correlate(x, kernel) + bias, back

    return layer


def correlate(x, kernel):
    """Sum over windows of x times the kernel, same height and width."""
    return np.einsum("bhwcij,ijcd->bhwd", windows(x, len(kernel)), kernel)


def windows(x, side):
    """The window around every pixel, zero outside: (B, H, W, C) -> (B, H, W, C, side, side)."""
    margin = side // 2
    padded = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))


def max_pool(weights, x):
    """Maximum of 2x2 tiles: (B, H, W, C) -> (B, H/2, W/2, C), even H and W."""
    batch, height, width, channels = x.shape
    tiles = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    tiles = tiles.transpose(0, 1, 3, 5, 2, 4).reshape(batch, height // 2, width // 2, channels, 4)
    winner = tiles.argmax(-1)[..., None]

    def back(dy):
        dtiles = np.zeros_like(tiles)
        np.put_along_axis(dtiles, winner, dy[..., None], -1)
        dtiles = dtiles.reshape(batch, height // 2, width // 2, channels, 2, 2)
        return dtiles.transpose(0, 1, 4, 2, 5, 3).reshape(x.shape), {}

    return tiles.max(-1), back


def relu(weights, x):
    """Positive part."""
    return np.maximum(x, 0), lambda dy: (dy * (x > 0), {})


def flatten(weights, x):
    """(B, ...) -> (B, d)."""
    return x.reshape(len(x), -1), lambda dy: (dy.reshape(x.shape), {})


# ---- blocks, in order

CONV1 = conv("conv1/conv"), relu, max_pool
CONV2 = conv("conv2/conv"), relu, max_pool
CONV3 = conv("conv3/conv"), relu, max_pool
FC = flatten, dense("fc1/linear"), relu
BLOCKS = {
    mlp: {"fc1": FC, HEAD: (dense(HEAD),)},
    cnn: {"conv1": CONV1, "conv2": CONV2, "fc1": FC, HEAD: (dense(HEAD),)},
    late: {"conv1": CONV1[:2], "conv2": CONV2, "fc1": FC, HEAD: (dense(HEAD),)},
    deep: {"conv1": CONV1, "conv2": CONV2, "conv3": CONV3, "fc1": FC, HEAD: (dense(HEAD),)},
}
