"""The same training as a careful PyTorch loop, one client after another, with which jaxfl is compared.

Nothing in it is slow on purpose. The normalised images are on the device before the clock starts, no
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
from jaxfl.models.blocks import ConvBlock, DenseBlock, Linear, ResidualPair
from jaxfl.models.model import Model, Weights

try:
    import torch
    from torch import nn
except ImportError as error:
    raise JaxflError(
        "PyTorch, which jaxfl bench measures against, is not installed; pip install '.[bench]' in a clone of "
        "jaxfl, or add --no-torch."
    ) from error

THREADS = torch.get_num_threads()
ACTIVATIONS = {jax.nn.relu: nn.ReLU, jax.nn.leaky_relu: nn.LeakyReLU}


def prepare(
    federation: Federation, method: str, config: Any, phases: tuple[Phase, ...], weights: Weights
) -> Callable[[list[int]], list[float]]:
    """Make a round of FedAvg, FedPer, FedRep or Ditto.

    Args:
      federation: a federation of one architecture.
      method: the method's name.
      config: its options; the optimiser is sgd.
      phases: the phases of a client's round.
      weights: the initial global model.

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

    images = (np.asarray(federation.images) - np.asarray(federation.mean)) / np.asarray(federation.std)
    images = tensor(images.transpose(0, 3, 1, 2).astype(np.float32, order="C"))
    labels, relabel, sizes = np.asarray(federation.labels), np.asarray(group.relabel), np.asarray(group.size)
    rows = [own[:size] for own, size in zip(np.asarray(group.rows), sizes, strict=True)]
    targets = [tensor(outputs[labels[own]]).long() for outputs, own in zip(relabel, rows, strict=True)]
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
                loss = train(net, phase, images, rows[client], targets[client], config, shared)
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
def train(net, phase: Phase, images, rows, targets, config, received) -> torch.Tensor:
    """Train some blocks of a network on a client's rows.

    Args:
      net: its children are the blocks; it is changed.
      phase: which of them train, and for how many epochs.
      images: (N, C, H, W), of all clients.
      rows: (n,), the client's rows of these.
      targets: (n,), its outputs.
      config: rates and the batch size.
      received: {name: leaf} of the global model, to which a personal one is pulled.

    Returns:
      (), the mean loss over the batches.
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
            loss = nn.functional.cross_entropy(net(images[rows[batch]]), targets[batch])
            loss.backward()
            if phase.personal:
                for name, leaf in trained.items():
                    leaf.grad.add_(leaf.detach() - received[name], alpha=config.lam)
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses).mean() if losses else torch.zeros((), device=rows.device)


def network(model: Model, weights: Weights) -> nn.Sequential:
    """Build a model with its weights in PyTorch, each block a child of the same name.

    Raises:
      JaxflError: if a block's kind is not known here.
    """
    net = nn.Sequential()
    x = torch.zeros((1, *np.roll(model.shape, 1)))
    for name, module in model.blocks:
        params = jax.tree.map(np.asarray, weights.params[name])
        match module:
            case ConvBlock():
                layers = _conv(module, params)
            case DenseBlock():
                layers = _dense(module, params, x.shape[1:])
            case ResidualPair():
                layers = [Pair(params, pools=module.pool is not None)]
            case Linear():
                layers = [_linear(params, x.shape[1:])]
            case _:
                raise JaxflError(
                    f"The PyTorch loop of jaxfl bench does not know {type(module).__name__}, a block of "
                    f"{model.name}; add --no-torch."
                )
        net.add_module(name, nn.Sequential(*layers))
        with torch.no_grad():
            x = net[-1].eval()(x)
    return net


class Pair(nn.Sequential):
    """A residual pair: x plus two convolutions of it, and global max pooling if it `pools`."""

    def __init__(self, params: dict, pools: bool):
        super().__init__(
            *(layer for name in ("conv1", "conv2") for layer in (*_normed(params[name], 1), nn.ReLU()))
        )
        self.pools = pools

    def forward(self, x):
        """Map (B, C, H, W) to the same shape, or to (B, C)."""
        y = x + super().forward(x)
        return y.amax((2, 3)) if self.pools else y


def _conv(module: ConvBlock, params: dict) -> list[nn.Module]:
    pool = [nn.MaxPool2d(module.pool)] if module.pool > 1 else []
    return [*_normed(params["conv"], module.padding), ACTIVATIONS[module.activation](), *pool]


def _normed(params: dict, padding: int) -> list[nn.Module]:
    """Return a convolution of stride 1, and BatchNorm if there are parameters of it."""
    kernel = params["kernel"].transpose(3, 2, 0, 1)
    bias = {name: value for name, value in params.items() if name == "bias"}
    layer = nn.Conv2d(kernel.shape[1], kernel.shape[0], kernel.shape[2:], padding=padding, bias=bool(bias))
    _fill(layer, weight=kernel, **bias)
    return [layer, *([nn.BatchNorm2d(kernel.shape[0])] if "norm" in params else [])]


def _dense(module: DenseBlock, params: dict, shape: tuple[int, ...]) -> list[nn.Module]:
    norm = [nn.BatchNorm1d(module.features)] if module.norm else []
    drop = [nn.Dropout(module.dropout)] if module.dropout else []
    activation = ACTIVATIONS[module.activation]()
    return [nn.Flatten(), _linear(params["linear"], shape), *norm, activation, *drop]


def _linear(params: dict, shape: tuple[int, ...]) -> nn.Linear:
    kernel = params["kernel"]
    if len(shape) == 3:  # flattened: jaxfl's order is height, width, channels, PyTorch's channels first
        channels, height, width = shape
        kernel = kernel.reshape(height, width, channels, -1).transpose(2, 0, 1, 3)
    kernel = kernel.reshape(-1, kernel.shape[-1]).T
    layer = nn.Linear(kernel.shape[1], kernel.shape[0])
    _fill(layer, weight=kernel, bias=params["bias"])
    return layer


def _fill(layer: nn.Module, **values: np.ndarray) -> None:
    for name, value in values.items():
        layer.get_parameter(name).data.copy_(torch.tensor(value))
