"""jaxfl's networks in PyTorch, with the same weights, for the loop with which jaxfl is compared."""

import jax
import numpy as np
import torch
from torch import nn

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import LAYER_EPSILON, BasicBlock, ConvBlock, DenseBlock, Linear, ResidualPair
from jaxfl.models.model import Model, Weights
from jaxfl.models.zoo.gru import GATES, GRU
from jaxfl.models.zoo.stem import ImageNetStem
from jaxfl.models.zoo.tokens import EachToken, Embedding
from jaxfl.models.zoo.transformer import TokenEncoder
from jaxfl.models.zoo.vit import Encoder, PatchEmbedding

ACTIVATIONS = {jax.nn.relu: nn.ReLU, jax.nn.leaky_relu: nn.LeakyReLU}


def network(model: Model, weights: Weights) -> nn.Sequential:
    """Build a model with its weights in PyTorch, each block a child of the same name.

    Raises:
      JaxflError: if a block's kind is not known here.
    """
    net = nn.Sequential()
    x = torch.zeros((1, *np.roll(model.shape, 1)), dtype=torch.long if model.tokens else torch.float)
    for name, module in model.blocks:
        params = jax.tree.map(np.asarray, weights.params[name])
        match module:
            case ConvBlock():
                layers = _conv(module, params)
            case DenseBlock():
                layers = _dense(module, params, x.shape[1:])
            case ResidualPair():
                layers = [Pair(params, pools=module.pool is not None)]
            case ImageNetStem():
                layers = [*_normed(params["conv"], 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
            case BasicBlock():
                layers = [Basic(module, params)]
            case Linear():
                layers = [_linear(params, x.shape[1:])]
            case EachToken():
                layers = [_linear(params, x.shape[2:])]
            case Embedding():
                layers = [Embedded(params)]
            case GRU(every_token=True):
                layers = [Recurrent(params)]
            case TokenEncoder(causal=True):
                layers = _encoder(CausalEncoder, module, params)
            case PatchEmbedding():
                layers = [Patches(module, params)]
            case Encoder():
                layers = _encoder(nn.TransformerEncoderLayer, module, params)
                layers += [Mean()] if module.mean else []
            case _:
                raise JaxflError(
                    f"The PyTorch loop of jaxfl bench does not know {type(module).__name__}, a block of "
                    f"{model.name}; add --no-torch."
                )
        net.add_module(name, nn.Sequential(*layers))
        with torch.no_grad():
            x = net[-1].eval()(x)
    return net


class Embedded(nn.Module):
    """A vector for each token, and for each place if there are such parameters."""

    def __init__(self, params: dict):
        super().__init__()
        self.token = nn.Embedding(*params["embedding"].shape)
        _fill(self, **{"token.weight": params["embedding"]})
        places = params.get("position")
        self.position = None if places is None else nn.Parameter(torch.tensor(places))

    def forward(self, x):
        """Map tokens (B, T) to (B, T, d)."""
        y = self.token(x)
        return y if self.position is None else y + self.position


class Recurrent(nn.Module):
    """Gated recurrent units; of PyTorch's two biases of a gate, which add up, one stays 0."""

    def __init__(self, params: dict):
        super().__init__()
        inputs = [params[f"from_{gate}"] for gate in GATES]
        states = [params[f"state_{gate}"] for gate in GATES]
        self.gru = nn.GRU(*inputs[0]["kernel"].shape, batch_first=True)
        bias = np.concatenate([np.zeros_like(params["state_bias"])] * 2 + [params["state_bias"]])
        _fill(
            self.gru,
            weight_ih_l0=np.concatenate([of["kernel"].T for of in inputs]),
            weight_hh_l0=np.concatenate([kernel.T for kernel in states]),
            bias_ih_l0=np.concatenate([of["bias"] for of in inputs]),
            bias_hh_l0=bias,
        )
        free = torch.arange(len(bias)) >= len(bias) // 3 * 2
        self.gru.get_parameter("bias_hh_l0").register_hook(lambda gradient: gradient * free.to(gradient))

    def forward(self, x):
        """Map (B, T, d) to the states after all tokens, (B, T, features)."""
        return self.gru(x)[0]


class CausalEncoder(nn.TransformerEncoderLayer):
    """An encoder in which each place attends to those up to it."""

    def forward(self, x):
        """Map (B, T, d) to the same shape."""
        later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device)
        return super().forward(x, later, is_causal=True)


class Patches(nn.Module):
    """A vector for each patch of an image, with a learned position."""

    def __init__(self, module: PatchEmbedding, params: dict):
        super().__init__()
        side, (inputs, features) = module.patch, params["linear"]["kernel"].shape
        kernel = params["linear"]["kernel"].reshape(side, side, -1, features).transpose(3, 2, 0, 1)
        self.conv = nn.Conv2d(inputs // side**2, features, side, side)
        _fill(self.conv, weight=kernel, bias=params["linear"]["bias"])
        self.position = nn.Parameter(torch.tensor(params["position"].reshape(-1, features)))

    def forward(self, x):
        """Map (B, C, H, W) to (B, patches, d)."""
        return self.conv(x).flatten(2).transpose(1, 2) + self.position


class Mean(nn.Module):
    """The mean of all tokens."""

    def forward(self, x):
        """Map (B, T, d) to (B, d)."""
        return x.mean(1)


class Basic(nn.Module):
    """ResNet's block of two convolutions, and global mean pooling if it `pools`."""

    def __init__(self, module: BasicBlock, params: dict):
        super().__init__()
        first, second = _normed(params["conv1"], 1, module.stride), _normed(params["conv2"], 1)
        self.convolutions = nn.Sequential(*first, nn.ReLU(), *second)
        shortcut = _normed(params["shortcut"], 0, module.stride) if "shortcut" in params else []
        self.shortcut, self.pools = nn.Sequential(*shortcut), module.pool is not None

    def forward(self, x):
        """Map (B, C, H, W) to (B, D, H', W'), or to (B, D)."""
        y = nn.functional.relu(self.shortcut(x) + self.convolutions(x))
        return y.mean((2, 3)) if self.pools else y


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


def _normed(params: dict, padding: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution, and BatchNorm if there are parameters of it."""
    kernel = params["kernel"].transpose(3, 2, 0, 1)
    bias = {name: value for name, value in params.items() if name == "bias"}
    features, channels, *sides = kernel.shape
    layer = nn.Conv2d(channels, features, sides, stride, padding, bias=bool(bias))
    _fill(layer, weight=kernel, **bias)
    return [layer, *([nn.BatchNorm2d(features)] if "norm" in params else [])]


def _encoder(
    kind: type[nn.TransformerEncoderLayer], module: TokenEncoder | Encoder, params: dict
) -> list[nn.Module]:
    """Return an encoder, and the network's LayerNorm if there are parameters of it."""
    features = params["mlp1"]["kernel"].shape[0]
    options = {"layer_norm_eps": LAYER_EPSILON, "batch_first": True, "norm_first": True}
    layer = kind(features, module.heads, 4 * features, module.dropout, "gelu", **options)
    attention = [params["attention"][name] for name in ("query", "key", "value")]
    out = params["attention"]["out"]
    values = {
        "self_attn.in_proj_weight": np.concatenate([p["kernel"].reshape(features, -1).T for p in attention]),
        "self_attn.in_proj_bias": np.concatenate([p["bias"].ravel() for p in attention]),
        "self_attn.out_proj.weight": out["kernel"].reshape(-1, features).T,
        "self_attn.out_proj.bias": out["bias"],
    }
    for name, ours in {"linear1": "mlp1", "linear2": "mlp2"}.items():
        values |= {f"{name}.weight": params[ours]["kernel"].T, f"{name}.bias": params[ours]["bias"]}
    for name in ("norm1", "norm2"):
        values |= {f"{name}.weight": params[name]["scale"], f"{name}.bias": params[name]["bias"]}
    _fill(layer, **values)
    if "norm" not in params:
        return [layer]
    norm = nn.LayerNorm(features, LAYER_EPSILON)
    _fill(norm, weight=params["norm"]["scale"], bias=params["norm"]["bias"])
    return [layer, norm]


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
