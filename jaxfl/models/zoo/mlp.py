"""A multilayer perceptron with one hidden layer."""

from jaxfl.errors import JaxflError
from jaxfl.models.blocks import DenseBlock
from jaxfl.models.build import NormName, has_norm, plain_cnn, scaled
from jaxfl.models.model import Model


def mlp(
    *,
    shape: tuple[int, int, int],
    classes: int,
    width: float = 1.0,
    norm: NormName = "none",
    hidden: int = 100,
) -> Model:
    """Flatten, hidden layer, ReLU, classifier: 784-100-10 on 28x28 grey images.

    Args:
      shape: (H, W, C) of the images.
      classes: number of classes.
      width: factor on the hidden features.
      norm: "batch" adds BatchNorm before the ReLU.
      hidden: number of hidden features.

    Raises:
      JaxflError: if an argument is out of range.
    """
    if hidden < 1:
        raise JaxflError(f"hidden is {hidden}; mlp needs at least one hidden feature.")
    layer = DenseBlock(scaled(width, hidden), has_norm(norm))
    return plain_cnn("mlp", [], [layer], shape=shape, classes=classes)
