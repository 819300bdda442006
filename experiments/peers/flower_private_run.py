"""Private FedAvg under Flower's server and in jaxfl. `python flower_private_run.py DATA_DIR OUT.csv`.

Needs `pip install flwr==1.42.0 opacus==1.6.0` and `jaxfl[privacy]`. Flower's server clips, averages and adds
noise; its clients are NumPy. Both have the same clients, rows, initial weights, rates and numbers of clients
in a round; who they are, batches and noise are drawn anew. Opacus tells epsilon under Poisson sampling.
"""

import csv
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from flower_privacy import aggregated
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from opacus.accountants import RDPAccountant

import jaxfl
from jaxfl.mechanisms.wire.accounting import Accounting

CLIP, ROUNDS, ACTIVE, CLIENTS, DELTA = 0.5, 60, 20, 100, 1e-5
RATE, BATCH = 0.1, 10
OPTIONS = {
    "dataset": "mnist",
    "partition": "classes,classes_per_client=5,samples_per_client=100",
    "clients": CLIENTS,
    "participation": ACTIVE / CLIENTS,
    "models": ["mlp,hidden=32"],
    "rounds": ROUNDS,
    "eval_every": ROUNDS,
    "epochs": 1,
    "batch_size": BATCH,
    "lr": RATE,
    "momentum": 0,
    "weight_decay": 0,
}


def gradients(weights, x, y):
    """Return those of an MLP's mean cross-entropy."""
    w1, b1, w2, b2 = weights
    h = np.maximum(x @ w1 + b1, 0)
    logits = h @ w2 + b2
    p = np.exp(logits - logits.max(1, keepdims=True))
    dz = (p / p.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[y]) / len(x)
    dh = dz @ w2.T * (h > 0)
    return x.T @ dh, dh.sum(0), h.T @ dz, dz.sum(0)


def trained(weights, x, y, rng):
    """Return weights after an epoch of SGD."""
    order = rng.permutation(len(x)).reshape(-1, BATCH)
    for rows in order:
        steps = gradients(weights, x[rows], y[rows])
        weights = [w - RATE * step for w, step in zip(weights, steps, strict=True)]
    return weights


def flower(run, noise, seed):
    """Return the accuracy of Flower's model on each client's test rows, the mean over clients."""
    source, images, rng = run.source, run.models[0].images, np.random.default_rng(seed)
    x = ((source.images - images.mean) / images.std).astype(np.float32).reshape(len(source.images), -1)
    y, rows = source.labels, run.partition
    init_key, *_ = jax.random.split(jax.random.key(seed), 4)
    params = run.models[0].model.init(jax.random.fold_in(init_key, 0)).params
    layers = params["fc1"]["linear"], params["classifier"]
    weights = [np.array(layer[name]) for layer in layers for name in ("kernel", "bias")]
    strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), noise, CLIP, ACTIVE)
    for _ in range(ROUNDS):
        cohort = [rows.train[i] for i in rng.choice(CLIENTS, ACTIVE, replace=False)]
        weights = aggregated(strategy, weights, [trained(weights, x[own], y[own], rng) for own in cohort])

    def accuracy(own):
        w1, b1, w2, b2 = weights
        return np.mean((np.maximum(x[own] @ w1 + b1, 0) @ w2 + b2).argmax(1) == y[own])

    return np.mean([accuracy(own) for own in rows.test])


def epsilon(noise):
    """Return that of Opacus, if each client takes part by itself."""
    accountant = RDPAccountant()
    accountant.history = [(noise, ACTIVE / CLIENTS, ROUNDS)]
    return accountant.get_epsilon(DELTA)


def main(data_dir: str, out: str) -> None:
    """Write a line for each noise multiplier and seed."""
    with open(out, "w") as file, tempfile.TemporaryDirectory() as folder:
        to = csv.writer(file)
        to.writerow(["noise", "seed", "jaxfl", "Flower", "epsilon", "Opacus's"])
        for noise in (0.0, 0.5, 1.0, 2.0):
            for seed in range(3):
                run = jaxfl.run(
                    "fedavg",
                    **OPTIONS,
                    privacy=f"gaussian,clip={CLIP},noise={noise}",
                    seed=seed,
                    data_dir=data_dir,
                    run_dir=Path(folder, f"{noise}-{seed}"),
                )
                ours = Accounting(noise, DELTA, "server", "poisson", ACTIVE / CLIENTS, 0, 0)
                spent = (ours.epsilon(ROUNDS), epsilon(noise)) if noise else ("", "")
                to.writerow([noise, seed, run.personal.mean[-1], flower(run, noise, seed), *spent])
                file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
