"""The same training as a careful PyTorch loop, one client after another, with which jaxfl is compared.

Nothing in it is slow on purpose. The normalised inputs are on the device before the clock starts, no
DataLoader is used, one network serves all clients, and nothing is evaluated. Layers, initial
weights, batch sizes, numbers of steps, optimiser and aggregation are jaxfl's. It runs on the number
of threads that is fastest.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfl.bench.count import Phase
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights

try:
    import torch
    from torch import nn
except ImportError as error:
    raise JaxflError(
        "PyTorch, which jaxfl bench measures against, is not installed; pip install '.[bench]' in a clone of "
        "jaxfl, or add --no-torch."
    ) from error

from jaxfl.bench.torch_networks import network

THREADS = torch.get_num_threads()


def prepare(
    federation: Federation, method: str, config: Any, phases: tuple[Phase, ...], weights: Weights
) -> Callable[[list[int]], list[float]]:
    """Make a round of FedAvg, FedPer, FedRep or Ditto with plain SGD on a federation of one architecture.

    `weights` are those of the initial global model.

    Returns:
      A function that trains one round of the given clients, and returns each one's mean loss over the
      batches of its last phase.

    Raises:
      JaxflError: if JAX has a GPU and PyTorch does not.
    """
    (group,) = federation.groups
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise JaxflError(
            "jaxfl trains on a GPU that this PyTorch cannot use; install a build of it with CUDA, or add "
            "--no-torch."
        )

    def tensor(array):
        return torch.from_numpy(np.array(array)).to(device)

    inputs = np.asarray(federation.images)
    if group.model.tokens:
        inputs = tensor(inputs).long()
    else:
        inputs = (inputs - np.asarray(federation.mean)) / np.asarray(federation.std)
        inputs = tensor(inputs.transpose(0, 3, 1, 2).astype(np.float32, order="C"))
    sizes, aim = np.asarray(group.size), federation.task.aim
    rows = [own[:size] for own, size in zip(np.asarray(group.rows), sizes, strict=True)]
    targets = [
        tensor(aim(federation.labels[own], outputs)).long()
        for outputs, own in zip(group.relabel, rows, strict=True)
    ]
    rows = [tensor(own).long() for own in rows]

    net = network(group.model, weights).to(device)
    leaves = {name: leaf for name, leaf in net.state_dict().items() if leaf.is_floating_point()}
    stays = group.model.head.names if method in ("fedper", "fedrep") else ()
    kept = [name for name in leaves if name.split(".")[0] in stays]

    def copy(names):
        return {name: leaves[name].clone() for name in names}

    def put(values):
        for name, value in values.items():
            leaves[name].copy_(value)

    initial, shared = copy(leaves), copy(name for name in leaves if name not in kept)
    own = {client: copy(kept) for client in range(len(rows))}
    personal = {}  # Ditto's models of clients that took part

    @torch.no_grad()
    def one_round(clients):
        nonlocal shared
        mean = {name: torch.zeros_like(leaf) for name, leaf in shared.items()}
        losses = []
        for client in clients:
            put(shared | own[client])
            for phase in phases:
                if phase.personal:
                    put(personal.get(client, initial))
                loss = train(net, phase, inputs, rows[client], targets[client], config, shared)
                if phase.personal:
                    personal[client] = copy(leaves)
                    put(shared)
            own[client] = copy(kept)
            for name, leaf in mean.items():
                leaf.add_(leaves[name], alpha=sizes[client] / sizes[clients].sum())
            losses.append(loss)
        shared = mean
        return torch.stack(losses).tolist()

    return one_round


def choose_threads(work: Callable[[], object]) -> None:
    """Give PyTorch all of its threads, or one if that is faster, as for steps on small batches.

    One thread launches a GPU's steps, so nothing is chosen there.
    """
    if jax.default_backend() == "gpu":
        return
    seconds = {}
    work()  # warms up
    for threads in (THREADS, 1):
        torch.set_num_threads(threads)
        start = time.perf_counter()
        work()
        seconds[threads] = time.perf_counter() - start
    torch.set_num_threads(min(seconds, key=seconds.__getitem__))


@torch.enable_grad()
def train(net, phase: Phase, inputs, rows, targets, config, received) -> torch.Tensor:
    """Train blocks, which are the network's children, on a client's rows; return the mean loss () of batches.

    Inputs are those of all clients, (N, C, H, W) or tokens (N, T). The client has rows (n,) of these, whose
    targets are (n,), or (n, T) with -1 where nothing follows. A personal model is pulled to the one received,
    {name: leaf}.
    """
    for name, block in net.named_children():
        block.train(name in phase.blocks)
        block.requires_grad_(name in phase.blocks)
    trained = {name: leaf for name, leaf in net.named_parameters() if leaf.requires_grad}
    pairs = any(isinstance(layer, nn.BatchNorm1d) and layer.training for layer in net.modules())
    optimizer = torch.optim.SGD(
        trained.values(), config.lr, config.momentum, weight_decay=config.weight_decay, foreach=True
    )
    losses = []
    for _ in range(phase.epochs):
        for batch in torch.randperm(len(rows), device=rows.device).split(config.batch_size):
            if pairs and len(batch) == 1:  # one value of a channel has no variance
                continue
            optimizer.zero_grad(set_to_none=True)
            outputs, of_batch = net(inputs[rows[batch]]), targets[batch]
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), of_batch.flatten(), ignore_index=-1)
            loss.backward()
            if phase.personal:
                for name, leaf in trained.items():
                    leaf.grad.add_(leaf.detach() - received[name], alpha=config.lam)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean() if losses else torch.zeros((), device=rows.device)
