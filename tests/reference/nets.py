"""A multilayer perceptron and CNNs in the manner of McMahan et al. 2017, forward and backward.

Networks and layers return their output and a function `back`, which takes the gradient of a loss
with respect to that output to those with respect to the input and, by name, to the weights. In training
BatchNorm adds the new values of its running statistics to the gradients of the weights.
"""

import numpy as np

HEAD, STATISTICS = "classifier", "stats/"
CONVOLUTIONS, DENSE = set(), set()  # layers of these kinds


def network(**blocks):
    """Return the features of a network of these blocks, {name: layers}: images (B, H, W, C) -> (B, d)."""

    def net(weights, x, train=False):
        return chain(weights, x, *sum(blocks.values(), ()), train=train)

    BLOCKS[net] = blocks | {HEAD: (dense(HEAD),)}
    return net


def classify(weights, z):
    """Return logits of the linear head: features (B, d) -> (B, classes)."""
    return dense(HEAD)(weights, z)


def logits(net, weights, x):
    """Return predictions of a whole model: images (B, H, W, C) -> (B, classes)."""
    return classify(weights, net(weights, x)[0])[0]


def outputs(net, weights, x, train):
    """Return the output of every block, in order: images (B, H, W, C) -> {block: (B, ...)}."""
    found = {}
    for name, layers in BLOCKS[net].items():
        found[name] = x = chain(weights, x, *layers, train=train)[0]
    return found


def norm_inputs(net, weights, x):
    """Return the outputs of all convolutions, or without any of all hidden layers: list of (B, ..., C)."""
    layers = [layer for name, of_block in BLOCKS[net].items() if name != HEAD for layer in of_block]
    wanted, found = CONVOLUTIONS if CONVOLUTIONS & {*layers} else DENSE, []
    for layer in layers:
        x, _ = layer(weights, x)
        if layer in wanted:
            found.append(x)
    return found


def head(weights):
    """Return the classifier's part of some weights."""
    return {name: value for name, value in weights.items() if in_head(name)}


def body(weights):
    """Return the extractor's part of some weights, with its statistics."""
    return {name: value for name, value in weights.items() if not in_head(name)}


def in_head(name):
    """Return whether a leaf belongs to the classifier."""
    return block_of(name) == HEAD


def in_body(name):
    """Return whether a leaf belongs to the extractor."""
    return not in_head(name)


def block_of(name):
    """Return the block of a leaf."""
    return name.removeprefix(STATISTICS).split("/")[0]


def is_statistic(name):
    """Return whether a leaf is a running statistic of BatchNorm."""
    return name.startswith(STATISTICS)


def least_rows(names):
    """Return how many rows a batch needs for weights of these names: two where BatchNorm has features (B, d).

    On one row they have no variance. These networks' maps have several pixels.
    """
    return 2 if any(is_statistic(name) and "/conv/" not in name for name in names) else 1


# ---- layers


def chain(weights, x, *layers, train=False):
    """Apply layers one after the other."""
    backs = []
    for layer in layers:
        x, back = layer(weights, x, train)
        backs.append(back)

    def back(dx):
        gradients = {}
        for back in reversed(backs):
            dx, new = back(dx)
            gradients |= new
        return dx, gradients

    return x, back


def dense(name):
    """Return an affine map, (B, d) -> (B, features)."""

    def layer(weights, x, train=False):
        kernel, bias = weights[f"{name}/kernel"], weights[f"{name}/bias"]

        def back(dy):
            return dy @ kernel.T, {f"{name}/kernel": x.T @ dy, f"{name}/bias": dy.sum(0)}

        return x @ kernel + bias, back

    DENSE.add(layer)
    return layer


def conv(name):
    """Return a convolution with an odd kernel (k, k, C, D) and zero padding: (B, H, W, C) -> (B, H, W, D)."""

    def layer(weights, x, train=False):
        kernel, bias = weights[f"{name}/kernel"], weights.get(f"{name}/bias", 0)

        def back(dy):
            dkernel = np.einsum("bhwcij,bhwd->ijcd", windows(x, len(kernel)), dy)
            dx = correlate(dy, kernel[::-1, ::-1].swapaxes(2, 3))
            return dx, {f"{name}/kernel": dkernel, f"{name}/bias": dy.sum((0, 1, 2))}

        return correlate(x, kernel) + bias, back

    CONVOLUTIONS.add(layer)
    return layer


def correlate(x, kernel):
    """Sum over windows of x times the kernel; height and width stay."""
    return np.einsum("bhwcij,ijcd->bhwd", windows(x, len(kernel)), kernel)


def windows(x, side):
    """Return the window around every pixel, zero outside: (B, H, W, C) -> (B, H, W, C, side, side)."""
    margin = side // 2
    padded = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, (side, side), (1, 2))


def max_pool(weights, x, train=False):
    """Take the maximum of 2x2 tiles: (B, H, W, C) -> (B, H/2, W/2, C), even H and W."""
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


def relu(weights, x, train=False):
    """Take the positive part."""
    return np.maximum(x, 0), lambda dy: (dy * (x > 0), {})


def flatten(weights, x, train=False):
    """Reshape (B, ...) -> (B, d)."""
    return x.reshape(len(x), -1), lambda dy: (dy.reshape(x.shape), {})


def batch_norm(name):
    """Return BatchNorm of channels (Ioffe and Szegedy 2015, Algorithms 1 and 2), (B, ..., C) -> (B, ..., C).

    In training the batch's statistics normalise and move the running ones by a tenth; in evaluation the
    running ones normalise.
    """

    def layer(weights, x, train=False):
        scale, shift = weights[f"{name}/scale"], weights[f"{name}/bias"]
        running = {leaf: weights[f"{STATISTICS}{name}/{leaf}"] for leaf in ("mean", "var")}
        axes = tuple(range(x.ndim - 1))
        now = {"mean": x.mean(axes), "var": x.var(axes)} if train else running
        deviation = np.sqrt(now["var"] + 1e-5)
        normal = (x - now["mean"]) / deviation

        def back(dy):
            new = {f"{name}/scale": (dy * normal).sum(axes), f"{name}/bias": dy.sum(axes)}
            dnormal = dy * scale
            if train:  # the batch moves its own mean and deviation
                dnormal = dnormal - dnormal.mean(axes) - normal * (dnormal * normal).mean(axes)
                for leaf, before in running.items():
                    new[f"{STATISTICS}{name}/{leaf}"] = 0.9 * before + 0.1 * now[leaf]
            return dnormal / deviation, new

        return normal * scale + shift, back

    return layer


# ---- blocks, in order

CONV1 = conv("conv1/conv"), relu, max_pool
CONV2 = conv("conv2/conv"), relu, max_pool
CONV3 = conv("conv3/conv"), relu, max_pool
FC = flatten, dense("fc1/linear"), relu
NORMAL_FC = flatten, dense("fc1/linear"), batch_norm("fc1/norm"), relu
NORMAL_FC2 = dense("fc2/linear"), batch_norm("fc2/norm"), relu
NORMAL_FC3 = dense("fc3/linear"), batch_norm("fc3/norm"), relu
NORMAL_CONV1 = conv("conv1/conv"), batch_norm("conv1/conv/norm"), relu, max_pool

BLOCKS = {}  # network: {block: layers}, the head included
NETS = {  # by the names of the tests' models
    "mlp": network(fc1=FC),
    "mlp of BatchNorm": network(fc1=NORMAL_FC),
    "two layers": network(fc1=NORMAL_FC, fc2=NORMAL_FC2),
    "three layers": network(fc1=NORMAL_FC, fc2=NORMAL_FC2, fc3=NORMAL_FC3),
    "cnn": network(conv1=CONV1, fc1=FC),
    "cnn of BatchNorm": network(conv1=NORMAL_CONV1, fc1=FC),
    "mcmahan": network(conv1=CONV1, conv2=CONV2, fc1=FC),
    "late": network(conv1=CONV1[:2], conv2=CONV2, fc1=FC),
    "deep": network(conv1=CONV1, conv2=CONV2, conv3=CONV3, fc1=FC),
}
