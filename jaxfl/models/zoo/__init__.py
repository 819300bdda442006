"""The architectures, one factory each, and how a choice such as ``resnet18,width=0.5`` names one.

A factory takes the shape of an example, (H, W, C) of an image, the number of classes, and options. Those that
most networks have are explained in `jaxfl.models.build.USUAL`. One out of range raises JaxflError. One for
tokens, whose shape is (T,), also takes their vocabulary, the number of different ones, and `every_token`:
whether outputs are of each token, by those up to it.
"""

import inspect
from collections.abc import Callable

from jaxfl.config import choices, options
from jaxfl.config.options import Described, Option, declared
from jaxfl.config.own_code import own_code, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.build import USUAL, with_features
from jaxfl.models.model import Model, TokenShape
from jaxfl.models.shape_check import check, noted, refuse_module
from jaxfl.models.zoo.densenet import densenet121, densenet161, densenet169, densenet201
from jaxfl.models.zoo.gru import gru
from jaxfl.models.zoo.harcnn import harcnn
from jaxfl.models.zoo.mobilenet import mobilenet_v1, mobilenet_v2, mobilenet_v3
from jaxfl.models.zoo.plain import (
    alexnet,
    cifar_small,
    cnn1,
    cnn2,
    cnn3,
    cnn4,
    fmnist_large,
    fmnist_small,
    lenet,
    lenet5,
    mcmahan,
    mlp,
)
from jaxfl.models.zoo.resnet import resnet9, resnet18, resnet50, resnet101, resnet152
from jaxfl.models.zoo.shufflenet import shufflenet
from jaxfl.models.zoo.transformer import transformer
from jaxfl.models.zoo.vit import vit

__all__ = ["alexnet", "harcnn", "lenet", "lenet5", "mcmahan", "mlp", "vit"]
__all__ += ["gru", "transformer"]
__all__ += ["cifar_small", "cnn1", "cnn2", "cnn3", "cnn4", "fmnist_large", "fmnist_small"]
__all__ += ["densenet121", "densenet161", "densenet169", "densenet201"]
__all__ += ["resnet9", "resnet18", "resnet50", "resnet101", "resnet152"]
__all__ += ["mobilenet_v1", "mobilenet_v2", "mobilenet_v3", "shufflenet"]

MODELS = {name: globals()[name] for name in sorted(__all__)}
BUILT_FOR = ("shape", "classes")  # of every model, not the user's to choose
GIVEN = (*BUILT_FOR, "vocabulary", "every_token")  # and of those for tokens


def options_of(factory: Callable) -> dict[str, Option]:
    """Return a factory's options, and `features`; see `build`."""
    own = declared(factory, GIVEN)
    return own if "features" in own else own | {"features": Option("features", int, None)}


def described(factory: Callable) -> list[Described]:
    """Return a factory's options as help shows them, and `features`."""
    rows, usual = options.described(factory, options_of(factory)), USUAL if factory in MODELS.values() else {}
    return [row._replace(what=row.what or usual.get(row.name, "")) for row in rows]


def build(
    choice: str, *, shape: tuple[int, ...], classes: int, vocabulary: int = 0, every_token: bool = False
) -> Model:
    """Build the network of a choice; ``path/to/my.py:object`` names a factory of your own.

    Every network takes ``features=NUMBER``, the number of features that its classifier gets: methods that
    compare features need the same number in all architectures. A factory's own option of that name takes
    precedence.

    Args:
      choice: ``name,option=value``.
      shape: (H, W, C) of an image, or (T,) of tokens.
      classes: number of classes.
      vocabulary: number of different tokens, for factories that have such a parameter.
      every_token: whether outputs of each token are wanted, for factories that have such a parameter.

    Raises:
      JaxflError: if the factory or one of its options does not exist, or what it returns is no model for
        these images and classes.
    """
    name, texts = choices.split(choice)
    factory = choices.lookup("model", MODELS, name)
    refuse_module(name, factory)
    chosen = choices.convert(name, options_of(factory), texts)
    adapts = "features" not in declared(factory, GIVEN)
    features = chosen.pop("features", None) if adapts else None
    given = {"shape": TokenShape(shape) if vocabulary else shape, "classes": classes}
    if "vocabulary" in inspect.signature(factory).parameters:
        if not vocabulary:
            raise JaxflError(f"{name} takes tokens, but the data are examples of shape {shape}.")
        given["vocabulary"] = vocabulary
    if "every_token" in inspect.signature(factory).parameters:
        given["every_token"] = every_token
    require_call(name, factory, **given, **chosen)
    with own_code():
        model = factory(**given, **chosen)
        if name not in MODELS:
            check(name, model, shape, classes, every_token)
        if features is not None:
            model = with_features(model, features)
        if name in MODELS:
            return model
        check(name, model, shape, classes, every_token)
        return noted(model)
