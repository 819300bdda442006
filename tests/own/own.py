"""FedProx (Li et al. 2020, arXiv:1812.06127), and a user's own model, partition and data set."""

from typing import Literal

import flax.linen as nn
import numpy as np
import optax

import jaxfl
from jaxfl.data.sources import Source
from jaxfl.fl import (
    cohort_rows,
    descend,
    initial_weights,
    map_and_sum,
    own_rows,
    per_group,
    sent_down,
    sent_up,
    task_loss,
    tree,
)
from jaxfl.models import Block, Model


@jaxfl.options
class FedProx(jaxfl.Training):
    """Options of FedProx."""

    mu: float = jaxfl.within("[0, inf)", 0.1)
    """Pull towards the global model."""


def build(config):
    def init(key, federation, hyper):
        return hyper, initial_weights(key, federation)

    def receive(key, state, federation, cohort):
        return per_group(lambda weights: jaxfl.Predictor(weights, None, predict), state[1])

    def step(key, state, federation, cohort):
        hyper, received = state

        def client(key, client, start, own):
            plain = task_loss(client.model)

            def loss(weights, batch, key):
                value, stats = plain(weights, batch, key)
                distance = optax.tree.norm(optax.tree.sub(weights.params, start.params), squared=True)
                return value + hyper.mu / 2 * distance, stats

            trained = descend(loss, start, key, own_rows(client, hyper), hyper)
            return trained.loss, trained.weights

        shares = per_group(tree.shares, cohort_rows(federation, cohort))
        loss, means = map_and_sum(client, key, federation, cohort, shares, received)

        def unless_nobody(share, mean, before):
            return tree.where((share > 0).any(), mean, before)

        means = per_group(unless_nobody, shares, means, received)
        up, down = sent_up(cohort, received), sent_down(cohort, received)
        return (hyper, means), jaxfl.Info(loss, up, down)

    return jaxfl.Algorithm(init, receive, step, personal=receive)


def predict(model, shared, own, x):
    return model.apply(shared.params, shared.stats, x, train=False)[0]


fedprox = jaxfl.Method("fedprox", build, FedProx, "FedAvg with a proximal term")


class Dense(nn.Module):
    """A dense layer on flattened images."""

    features: int

    @nn.compact
    def __call__(self, x, *, train, mask):
        """(B, H, W, C) -> (B, features)."""
        return nn.Dense(self.features)(x.reshape(len(x), -1))


def linear(
    *, shape, classes, features: int = 2, bits: Literal[16, 32] = 32, sizes: dict[str, int] | None = None
):
    blocks = (Block("body", Dense(features)), Block("classifier", Dense(classes)))
    return Model("linear", blocks, shape, classes)


def unequal(labels, clients, rng, *, most: int = 8):
    parts = np.array_split(rng.permutation(len(labels)), clients)
    return [part[: most - i] for i, part in enumerate(parts)]


def stripes(data_dir):
    labels = np.arange(48) % 2
    images = np.random.default_rng(0).integers(0, 99, (48, 8, 8, 1), dtype=np.uint8)
    images[labels == 1, ::2] += 100
    return Source("stripes", images, labels, np.arange(48) < 36, 2)


def nothing(*arguments, **options):
    return None
