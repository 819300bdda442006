"""A multilayer perceptron with one hidden layer."""

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import DenseBlock
from jaxfl.models.build import NormName, Shape, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def mlp(
    *, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "none", hidden: int = 100
) -> Model:
    """Flatten, hidden layer, ReLU, classifier: 784-100-10 on 28x28 grey images.

    Args:
      hidden: number of hidden features.
    """
    if hidden < 1:
        raise JaxflError(f"hidden is {hidden}; mlp needs at least one hidden feature.")
    layer = DenseBlock(scaled(width, hidden), has_norm(norm))
    return plain_cnn("mlp", [], [layer], shape=shape, classes=classes)
