"""The runs of a comparison repeated in PFLlib: same clients, same rows, same initial weights, same rates.

    python experiments/peers/pfllib_peer.py PFLlib/system DATA COMPARISON pfllib.csv --method fedper --seed 0

For FedAvg, FedPer and Ditto with the network `mlp`, plain SGD and all clients in every round; all runs of
COMPARISON without --method or --seed. DATA is the folder pfllib/ of `jaxfl partition --format pfllib`. PFLlib
unpickles it, so use only your own. PFLlib's files stay as they are. Adds a line per run: method, seed,
accuracies (of the model that each client deploys after the last round, on its own test rows) of jaxfl and
PFLlib as means over clients, PFLlib's own over rows, and PFLlib's seconds without evaluation.
"""

import argparse
import contextlib
import importlib
import io
import random
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import torch
from torch import nn

from jaxfl.grid.comparison import load

SERVERS = {  # {method: (module below flcore.servers, its class)}
    "fedavg": ("serveravg", "FedAvg"),
    "fedper": ("serverper", "FedPer"),
    "ditto": ("serverditto", "Ditto"),
}


def network(weights: dict) -> nn.Module:
    """Return jaxfl's `mlp` with its initial weights, split into a base and a head as in PFLlib."""
    from flcore.trainmodel.models import BaseHeadSplit  # of PFLlib

    hidden, classifier = _linear(weights["fc1"]["linear"]), _linear(weights["classifier"])
    return BaseHeadSplit(nn.Sequential(nn.Flatten(), hidden, nn.ReLU()), classifier)


def _linear(leaves: dict) -> nn.Linear:
    kernel, bias = (torch.from_numpy(np.array(leaves[name])) for name in ("kernel", "bias"))
    layer = nn.Linear(*kernel.shape)
    layer.weight.data, layer.bias.data = kernel.T.contiguous(), bias
    return layer


def arguments(run, data: Path, model: nn.Module) -> types.SimpleNamespace:
    """Return what PFLlib's main.py would parse, for a run of jaxfl."""
    options = run.config["options"]
    assert options["momentum"] == options["weight_decay"] == 0 and options["participation"] == 1
    assert options["eval_every"] == options["rounds"]
    common = {
        "algorithm": run.config["method"],
        "dataset": str(data.resolve()),  # joined to ../dataset, which an absolute path replaces
        "model": model,
        "device": "cpu",
        "num_classes": 10,
        "num_clients": len(run.partition.train),
        "global_rounds": options["rounds"],
        "eval_gap": options["rounds"],  # at the beginning, and after the last round
        "local_epochs": options["epochs"],
        "batch_size": options["batch_size"],
        "local_learning_rate": options["lr"],
        "mu": options.get("lam", 0),  # Ditto's lambda
        "plocal_epochs": options.get("personal_epochs") or options["epochs"],
    }
    defaults = {
        "join_ratio": 1.0,
        "random_join_ratio": False,
        "learning_rate_decay": False,
        "learning_rate_decay_gamma": 0.99,
        "client_drop_rate": 0.0,
        "train_slow_rate": 0.0,
        "send_slow_rate": 0.0,
        "time_select": False,
        "time_threthold": 10000,
        "auto_break": False,
        "top_cnt": 100,
        "dlg_eval": False,
        "dlg_gap": 100,
        "batch_num_per_client": 2,
        "num_new_clients": 0,
        "fine_tuning_epoch_new": 0,
        "goal": "test",
        "save_folder_name": "items",
    }
    return types.SimpleNamespace(**common, **defaults)


def repeat(run, data: Path) -> tuple[float, float, float]:
    """Return PFLlib's accuracy with a run's options.

    Args:
      run: run of jaxfl.
      data: folder of its clients' rows in PFLlib's form.

    Returns:
      Accuracy as mean over clients and as mean over rows, and seconds.
    """
    options, method = run.config["options"], run.config["method"]
    init_key, *_ = jax.random.split(jax.random.key(options["seed"]), 4)
    model = network(run.models[0].model.init(jax.random.fold_in(init_key, 0)).params)
    module, name = SERVERS[method]
    make = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
    server = make(arguments(run, data, model), 0)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(options["seed"])  # here, as each of PFLlib's clients sets torch's to 0
    server.save_results = server.save_global_model = lambda: None
    score = "test_metrics_personalized" if method == "ditto" else "test_metrics"
    measure, found = getattr(server, score), []
    setattr(server, score, lambda: found.append(measure()) or found[-1])
    server.train()  # with one round more than asked for, after the last evaluation
    assert len(found) == 2
    _, rows, correct, _ = found[-1]
    seconds = np.mean(server.Budget[1 : options["rounds"]]) * options["rounds"]
    return float(np.mean(np.divide(correct, rows))), server.rs_test_acc[-1], float(seconds)


def main() -> None:
    """Repeat every run that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("system", type=Path, help="PFLlib's folder of that name")
    parser.add_argument("data", type=Path, help="jaxfl's folder pfllib/")
    parser.add_argument("comparison", type=Path, help="folder of jaxfl compare")
    parser.add_argument("out", type=Path, help="csv")
    parser.add_argument("--method", choices=SERVERS)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sys.path.insert(0, str(given.system.resolve()))
    sys.modules.setdefault("h5py", types.ModuleType("h5py"))  # for results that are not saved
    if not given.out.exists():
        given.out.write_text("method,seed,jaxfl,pfllib,pfllib_rows,pfllib_seconds\n")
    for (label, seed), run in load(given.comparison).runs.items():
        if given.method in (None, run.config["method"]) and given.seed in (None, seed):
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()):
                theirs, pooled, seconds = repeat(run, given.data)
            row = f'"{label}",{seed},{run.personal.mean[-1]:.4f},{theirs:.4f},{pooled:.4f},{seconds:.1f}'
            with given.out.open("a") as file:
                print(row, file=file)
            print(f"{row} ({time.perf_counter() - start:.0f} s with evaluation)", flush=True)


if __name__ == "__main__":
    main()
