"""The architectures, one factory each."""

from jaxfl.models.zoo.cnn_dropout import cnn_dropout
from jaxfl.models.zoo.compfl import cifar_small, fmnist_large, fmnist_small
from jaxfl.models.zoo.lenet5 import lenet5
from jaxfl.models.zoo.mcmahan import mcmahan
from jaxfl.models.zoo.mlp import mlp
from jaxfl.models.zoo.resnet import resnet9, resnet18

__all__ = [
    "cifar_small",
    "cnn_dropout",
    "fmnist_large",
    "fmnist_small",
    "lenet5",
    "mcmahan",
    "mlp",
    "resnet18",
    "resnet9",
]
