"""ShuffleNetV2 for small images, one of the four networks of MNFL's heterogeneous federation."""

import functools

import flax.linen as nn
import jax

from jaxfl.models.blocks import Conv, ConvBlock, DepthwiseConv, chain
from jaxfl.models.build import NormName, Shape, has_norm, network, scaled
from jaxfl.models.conv import axis, halves, interleaved, to_images, to_maps
from jaxfl.models.model import Block, Model


class ShuffleUnit(nn.Module):
    """Two branches of `half` channels each, interleaved (Ma et al. 2018, figures 3c and 3d).

    At stride 1 half of the input's channels pass unchanged. At stride 2 both branches convolve all of them.
    The main branch keeps their number before its depthwise convolution, as in the code that the federated
    papers use; the authors' own code changes it before.
    """

    half: int
    stride: int = 1
    norm: bool = True
    uncut = "interleaves channels, which leaves no first ones"  # see `jaxfl.models.slices`

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Map (B, H, W, C) to (B, H', W', 2 half)."""
        pointwise = functools.partial(Conv, kernel=1, norm=self.norm, bias=not self.norm)
        depthwise = functools.partial(DepthwiseConv, 3, self.stride, self.norm, not self.norm)
        x = to_maps(x)
        passed, y = halves(x) if self.stride == 1 else (x, x)
        if self.stride != 1:
            passed = depthwise(name="shortcut1")(passed, train=train, mask=mask)
            passed = nn.relu(pointwise(self.half, name="shortcut2")(passed, train=train, mask=mask))
        steps = (
            (pointwise(y.shape[axis("C")], name="conv1"), nn.relu),
            (depthwise(name="conv2"), jax.nn.identity),
            (pointwise(self.half, name="conv3"), nn.relu),
        )
        return to_images(interleaved(passed, chain(self, y, *steps, train=train, mask=mask)))


def shufflenet(*, shape: Shape, classes: int, width: float = 1.0, norm: NormName = "batch") -> Model:
    """ShuffleNetV2 1x: stages of 4, 8 and 4 shuffle units, 116 to 464 channels (Ma et al. 2018).

    arXiv:1807.11164, table 5, for 32x32 images: a stem without stride, pooling and ReLU, as in the code
    of the federated papers that use it.

    Args:
      width: factor on the hidden channels; the paper's own 0.5x and 2x scale less evenly.
    """
    batch = has_norm(norm)
    conv = functools.partial(ConvBlock, norm=batch, bias=not batch)
    body = [Block("stem", conv(scaled(width, 24), 3, 1, activation=jax.nn.identity))]
    for stage, (channels, units) in enumerate([(116, 4), (232, 8), (464, 4)], 1):
        half = scaled(width, channels // 2)
        body += [
            Block(f"stage{stage}_{unit}", ShuffleUnit(half, 2 if unit == 1 else 1, batch))
            for unit in range(1, units + 1)
        ]
    body.append(Block("conv", conv(scaled(width, 1024), 1, mean=True)))
    return network("shufflenet", body, shape=shape, classes=classes)
