"""The architectures, one factory each."""

from jaxfl.models.zoo.cnn_dropout import cnn_dropout
from jaxfl.models.zoo.compfl import cifar_small, fmnist_large, fmnist_small
from jaxfl.models.zoo.densenet import densenet121, densenet161, densenet169, densenet201
from jaxfl.models.zoo.lenet5 import lenet5
from jaxfl.models.zoo.mcmahan import mcmahan
from jaxfl.models.zoo.mlp import mlp
from jaxfl.models.zoo.resnet import resnet9, resnet18, resnet50, resnet101, resnet152

__all__ = [
    "cifar_small",
    "cnn_dropout",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "fmnist_large",
    "fmnist_small",
    "lenet5",
    "mcmahan",
    "mlp",
    "resnet101",
    "resnet152",
    "resnet18",
    "resnet50",
    "resnet9",
]
