"""The runs of a comparison repeated in fluke: same clients, same rows, same initial weights, same rates.

    python experiments/peers/fluke_peer.py COMPARISON fluke.csv

For FedAvg, FedPer and Ditto with the network `mlp`, plain SGD and all clients in every round. Only the order
of the batches and the training code differ. Writes a line per run: method, seed, both accuracies (mean over
clients, of the model that each deploys, on its own test rows), and fluke's seconds.
"""

import sys
import time
from copy import deepcopy
from pathlib import Path

import jax
import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedper import FedPer
from fluke.data import FastDataLoader
from fluke.nets import EncoderHeadNet
from torch import nn

from jaxfl.grid.comparison import load


class Net(EncoderHeadNet):
    """jaxfl's `mlp` with jaxfl's initial weights."""

    def __init__(self, weights: dict):
        hidden, classifier = _linear(weights["fc1"]["linear"]), _linear(weights["classifier"])
        super().__init__(nn.Sequential(nn.Flatten(), hidden, nn.ReLU()), classifier)


def _linear(leaves: dict) -> nn.Linear:
    kernel, bias = (torch.from_numpy(np.array(leaves[name])) for name in ("kernel", "bias"))
    layer = nn.Linear(*kernel.shape)
    layer.weight.data, layer.bias.data = kernel.T.contiguous(), bias
    return layer


class Handed:
    """A run's partition in fluke's form: for each client a loader of training rows and one of test rows."""

    def __init__(self, run):
        source, images = run.source, run.models[0].images
        x = ((source.images - images.mean) / images.std).astype(np.float32)
        self.x, self.y, self.partition = (
            torch.from_numpy(x),
            torch.from_numpy(source.labels).long(),
            run.partition,
        )

    def assign(self, clients: int, batch_size: int):
        """Return training loaders, test loaders, and nothing for the server."""

        def loaders(parts, **options):
            return [FastDataLoader(self.x[rows], self.y[rows], num_labels=10, **options) for rows in parts]

        # A last batch of a single row trains, as in jaxfl.
        train = loaders(self.partition.train, batch_size=batch_size, shuffle=True, skip_singleton=False)
        return (train, loaders(self.partition.test, batch_size=256, skip_singleton=False)), None


def repeat(run) -> tuple[float, float]:
    """Return fluke's accuracy with a run's options, and its seconds."""
    options, method = run.config["options"], run.config["method"]
    assert options["momentum"] == options["weight_decay"] == 0 and options["participation"] == 1
    init_key, *_ = jax.random.split(jax.random.key(options["seed"]), 4)
    net = Net(run.models[0].model.init(jax.random.fold_in(init_key, 0)).params)
    client = {
        "batch_size": options["batch_size"],
        "local_epochs": options["epochs"],
        "loss": nn.CrossEntropyLoss,
        "optimizer": DDict(name="SGD", lr=options["lr"]),
        "scheduler": DDict(name="StepLR", step_size=1, gamma=1),
    }
    if method == "ditto":
        client |= {"lam": options["lam"], "tau": options["personal_epochs"] or options["epochs"]}
    if method != "fedavg":
        client["model"] = deepcopy(net)
    FlukeENV().set_seed(options["seed"])
    FlukeENV().set_inmemory(True)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    shared = net.encoder if method == "fedper" else net  # what fluke's server has
    hyper = DDict(client=DDict(**client), server=DDict(weighted=True), model=shared)
    make = {"fedavg": FedAVG, "fedper": FedPer, "ditto": Ditto}[method]
    federation = make(len(run.partition.train), Handed(run), hyper)
    start = time.perf_counter()
    federation.run(options["rounds"], 1.0)
    seconds = time.perf_counter() - start
    return float(np.mean([accuracy(method, one) for one in federation.clients])), seconds


@torch.no_grad()
def accuracy(method: str, client) -> float:
    """Return the accuracy of what a client of fluke deploys; the server has sent it its last mean."""
    model = client.personalized_model if method == "ditto" else client.model
    model.eval()
    x, y = client.test_set.tensors
    return (model(x).argmax(1) == y).float().mean().item()


def main(folder: str, out: str) -> None:
    """Repeat every run of a comparison."""
    torch.set_num_threads(1)  # for so small a network more threads take longer
    with open(out, "w") as file:  # fluke's progress bars are on stdout
        print("method,seed,jaxfl,fluke,fluke_seconds", file=file)
        for (label, seed), run in load(Path(folder)).runs.items():
            theirs, seconds = repeat(run)
            row = f'"{label}",{seed},{run.personal.mean[-1]:.4f},{theirs:.4f},{seconds:.1f}'
            print(row, file=file, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
