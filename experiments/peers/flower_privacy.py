"""Clipping and noise of Flower's servers beside jaxfl's, on the same updates. `python flower_privacy.py`.

Needs `pip install flwr==1.42.0` beside jaxfl. The updates are drawn: twelve clients, 25,450 entries each.
"""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from jaxfl.mechanisms.wire.aggregation import clipped
from jaxfl.mechanisms.wire.privacy import Gaussian

logging.getLogger("flwr").setLevel(logging.WARNING)
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # no network: messages are made here
CLIENTS, CLIP, NOISE = 12, 1.0, 0.8
RNG = np.random.default_rng(0)
SHAPES = ((784, 32), (32,), (32, 10), (10,))
SERVER = [RNG.normal(size=shape).astype(np.float32) for shape in SHAPES]
SIZES = np.geomspace(0.2, 2, CLIENTS) / math.sqrt(sum(map(np.size, SERVER)))
CHANGES = [[(s * RNG.normal(size=x.shape)).astype(np.float32) for x in SERVER] for s in SIZES]


def aggregated(strategy, server, models):
    """Return what a strategy of Flower makes of the models of clients with equal weights, all as arrays."""
    strategy.current_arrays = ArrayRecord(server)
    replies = [
        Message(
            RecordDict({"arrays": ArrayRecord(model), "metrics": MetricRecord({"num-examples": 1})}),
            dst_node_id=i,
            message_type="train",
        )
        for i, model in enumerate(models)
    ]
    return strategy.aggregate_train(1, replies)[0].to_numpy_ndarrays()


def flower(strategy):
    """Return what a strategy of Flower makes of the updates, minus what it had."""
    models = [[x + d for x, d in zip(SERVER, change, strict=True)] for change in CHANGES]
    return flat([y - x for x, y in zip(SERVER, aggregated(strategy, SERVER, models), strict=True)])


def ours(privacy, key=None):
    """Return the mean of clipped updates, with noise given a key."""
    total = jax.tree.map(lambda *leaves: sum(leaves), *[clipped(change, privacy.clip) for change in CHANGES])
    total = total if key is None else privacy.noisy(key, total)
    return flat(jax.tree.map(lambda leaf: np.asarray(leaf) / CLIENTS, total))


def flat(arrays):
    """Return all entries."""
    return np.concatenate([np.ravel(array) for array in arrays])


def fixed(noise):
    """Return Flower's server with a fixed clip norm."""
    return DifferentialPrivacyServerSideFixedClipping(FedAvg(), noise, CLIP, CLIENTS)


def report(what, **found):
    """Print figures under their names."""
    print(f"{what:<45}", ", ".join(f"{name} {value:.5g}" for name, value in found.items()))


def adaptive(noise, count_noise):
    """Return Flower's server with an adaptive clip norm, gamma 0.5 and eta 0.2."""
    return DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(), noise, CLIENTS, CLIP, 0.5, 0.2, count_noise
    )


def main() -> None:
    """Print both."""
    plain = ours(Gaussian(clip=CLIP))
    apart = np.abs(flower(fixed(0.0)) - plain).max()
    report("mean of clipped updates", largest=np.abs(plain).max(), apart=apart)
    report(
        "standard deviation of the noise",
        jaxfl=(ours(Gaussian(clip=CLIP, noise=NOISE), jax.random.key(0)) - plain).std(),
        Flower=(flower(fixed(NOISE)) - plain).std(),
        paper=NOISE * CLIP / CLIENTS,
    )
    following = Gaussian(clip=CLIP, noise=NOISE, adapt=0.5, count_noise=0.6)
    report(
        "z_delta under an adaptive clip norm",
        jaxfl=float(following.at(CLIP, CLIENTS).noise),
        Flower=adaptive(NOISE, 0.6).noise_multiplier,
    )
    within, quiet = np.mean([np.linalg.norm(flat(change)) <= CLIP for change in CHANGES]), adaptive(0.0, 0.0)
    flower(quiet)
    silent = Gaussian(clip=CLIP, noise=0.0, adapt=0.5)
    report(
        f"next clip norm, {within:.3f} of updates within it",
        jaxfl=float(silent.next_clip(jax.random.key(0), jnp.float32(within - 0.5), CLIENTS)),
        Flower=quiet.clipping_norm,
        paper=CLIP * math.exp(-0.2 * (within - 0.5)),
    )


if __name__ == "__main__":
    main()
