"""A server that distils an ensemble on the round's public images."""

import dataclasses
import math

import numpy as np

from reference.exchange import divergence, taught
from reference.training import descend


def distilled(client, weights, teacher, x, orders, options):
    """Train the client's architecture by Adam on T^2 KL, with a cosine decay of the learning rate."""
    steps = max(1, options.server_epochs * math.ceil(len(x) / options.public_batch))

    def rate(step):
        return options.server_lr * (1 + np.cos(np.pi * step / steps)) / 2

    def squared(logits, t, options):
        value, gradient = divergence(logits, t, Unweighted(options.temperature))
        return options.temperature**2 * value, options.temperature**2 * gradient

    return descend(
        weights,
        taught(client, x, teacher, squared, options),
        orders,
        dataclasses.replace(options, clip_norm=None),  # only clients clip
        lr=rate,
        batch_size=options.public_batch,
        optimizer="undecayed adam",
    )[0]


class Unweighted:
    """The options that a divergence reads, with weight 1."""

    kl_weight = 1.0

    def __init__(self, temperature):
        self.temperature = temperature
