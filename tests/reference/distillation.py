"""A server that distils an ensemble on the round's public images."""

import dataclasses
import math

import numpy as np

from reference.exchange import divergence, taught
from reference.training import descend


def distilled(client, weights, teacher, x, orders, options):
    """A network of the client's architecture after Adam over T^2 KL, its rate falling as a cosine."""
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
        dataclasses.replace(options, clip_norm=None),  # of clients
        lr=rate,
        batch_size=options.public_batch,
        optimizer="undecayed adam",
    )[0]


class Unweighted:
    """The options that a divergence reads, its weight 1."""

    kl_weight = 1.0

    def __init__(self, temperature):
        self.temperature = temperature
