"""The model that a client deploys: it predicts on images as the data set has them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl.core.protocol import Predictor
from jaxfl.data.normalisation import Pair, normalised
from jaxfl.data.sources import of_vectors
from jaxfl.errors import JaxflError
from jaxfl.models.applied import applied_weights
from jaxfl.models.model import Model
from jaxfl.tasks import require_classes

BATCH = 64  # most images at a time


class Images(NamedTuple):
    """The shape, type and normalisation of a run's images."""

    shape: tuple[int, ...]  # (H, W, C) of an image, or (T,) of tokens
    dtype: np.dtype  # uint8, float32 (of floats, and images with a `--shift`) or int32 of tokens
    mean: np.ndarray  # (1, 1, 1, C), or (1, H, W, C) of each value, of training images in raw units
    std: np.ndarray  # the same, their standard deviation, in raw units
    shifted: bool = False  # whether each client sees images of its own, see `Loaded.seen`
    vocabulary: int = 0  # number of different tokens, if the rows are tokens; else 0


@dataclass(frozen=True, eq=False)
class Deployed:
    """The model that a client of a run deploys, after one of the run's checkpoints.

    Attributes:
      client: id of the client.
      model: the architecture.
      images: shape, type and normalisation of the images that it takes.
      relabel: (classes,) int, the output for each class of the data set; -1 if the client lacks the class.
      accuracy: on the client's test rows, as a fraction, as it was scored, or the score of another task; None
        for a newcomer or an attacker.
      predictor: the method's `Predictor`, with the leaves of this client.
      target: mean and standard deviation (k,) by which targets are standardised; None for classes.
    """

    client: int
    model: Model
    images: Images
    relabel: np.ndarray
    accuracy: float | None
    predictor: Predictor
    target: Pair | None = None

    def __repr__(self) -> str:
        """Return a line of text with client, architecture and accuracy."""
        scored = "not scored" if self.accuracy is None else self.model.task.text(self.accuracy)
        return f"<client {self.client}'s {self.model.name}, {scored}>"

    @property
    def classes(self) -> np.ndarray:
        """The data set's class for which each output stands, (outputs,) int; -1 if there is none."""
        (known,) = np.nonzero(self.relabel >= 0)
        classes = np.full(self.model.classes, -1)
        classes[self.relabel[known]] = known
        return classes

    @property
    def shared(self) -> bool:
        """Whether all clients of the architecture deploy this model."""
        return not jax.tree.leaves(self.predictor.stacked)

    def predict(self, images: Any) -> np.ndarray:
        """Predict the label of each image: its most likely class, or the targets of a regression.

        Args:
          images: (B, H, W, C) as the data set has them: uint8, or floats if the data set has floats. They are
            normalised here. Grey images may be (B, H, W), and vectors (B, d).

        Returns:
          (B,) int, labels of the data set, however the client numbers them. They are never classes that the
          client does not know; -1 where the network chooses an output without a class. Targets are (B, k), in
          their own unit.

        Raises:
          JaxflError: if the images have another shape or type.
        """
        return self.model.task.label(self.scores(images), self.classes, self.target)

    def probabilities(self, images: Any) -> np.ndarray:
        """Return the softmax of the scores by the data set's classes, (B, classes); images as in `predict`.

        It is 0 for a class that the client does not know.

        Raises:
          JaxflError: as `predict`, or if labels are not classes.
        """
        require_classes(self.model.task, "A probability")
        scores = self.scores(images)
        likely = np.exp(scores - scores.max(1, keepdims=True))
        likely /= likely.sum(1, keepdims=True)
        return np.where(self.relabel >= 0, likely[:, self.relabel], 0)

    def scores(self, images: Any) -> np.ndarray:
        """Return the method's scores of the client's outputs, (B, outputs); images as in `predict`."""
        return self._over(self.predictor.predict, self.predictor.shared, self.predictor.stacked, images)

    def outputs(self, images: Any) -> dict[str, np.ndarray]:
        """Return the output of every block of the network; images as in `predict`.

        Returns:
          {block: (B, ...)}, in the blocks' order. The last but one gives the features (B, d) that the
          classifier gets.

        Raises:
          JaxflError: if the images have another shape or type, or a block is applied with several weights.
        """
        return dict(
            zip(self.model.names, self._over(_outputs, self._of_network(), None, images), strict=True)
        )

    def taps(self, images: Any) -> dict[int, np.ndarray]:
        """Return the output of every convolution of the network; images as in `predict`.

        Returns:
          {depth: (B, H, W, C)}, counted from 1 on the main path, without the convolutions of shortcuts. The
          output is taken after a norm that follows directly, before activation and pooling. For a user's own
          network: the output of each block with a convolution, if it is a map. Empty without convolutions.

        Raises:
          JaxflError: as in `outputs`.
        """
        return dict(enumerate(self._over(_taps, self._of_network(), None, images), 1))

    @functools.cached_property
    def weights(self) -> dict[str, dict]:
        """The weights with which the method applies the network's blocks: {block: {layer: NumPy arrays}}.

        BatchNorm's statistics are beside its parameters. A block that is applied with several weights, as in
        an ensemble, has an entry for each of them: ``classifier``, ``classifier-2``.
        """
        return applied_weights(self.model, self._predict)

    def plain(self, own: Callable[[], np.ndarray]) -> bool:
        """Return whether the scores are just the outputs of the network with `weights`.

        This is tested on random images, or if the network has no numbers for these (they may stand for ids)
        on the client's `own`.
        """
        if set(self.weights) - set(self.model.names):
            return False
        rng, form = np.random.default_rng(0), self.images
        if form.vocabulary:
            images = rng.integers(0, form.vocabulary, (8, *form.shape), np.int32)
        else:
            images = form.mean + form.std * rng.normal(size=(8, *form.shape))
            images = images.round().clip(0, 255) if form.dtype == np.uint8 else images
            images = images.astype(form.dtype)
        outputs = self._over(_scores, self._of_network(), None, images)
        if not np.isfinite(outputs).all():
            images = own()
            outputs = self._over(_scores, self._of_network(), None, images)
        return np.allclose(outputs, self.scores(images), rtol=1e-4, atol=1e-4)

    def _of_network(self) -> dict[str, dict]:
        """Return `weights` with an entry for every block, empty for a block without weights."""
        several = sorted(set(self.weights) - set(self.model.names))
        if several:
            raise JaxflError(
                f"Client {self.client} applies blocks of its {self.model.name} with several weights "
                f"({', '.join(several)}): its outputs are not those of one network; see its `weights`."
            )
        return {name: self.weights.get(name, {}) for name in self.model.names}

    def _over(self, function: Callable, shared: Any, own: Any, images: Any) -> Any:
        """Apply ``function(model, shared, own, x)``, with leaves (B, ...), to raw images in batches."""
        images = self._checked(images)
        batch = min(BATCH, 1 << max(0, len(images) - 1).bit_length())  # few lengths mean few programs
        found = []
        for start in range(0, max(len(images), 1), batch):
            part = images[start : start + batch]
            filled = np.resize(part, (batch, *images.shape[1:]))
            leaves = _applied(function, self.model, shared, own, filled, self.images.mean, self.images.std)
            found.append(jax.tree.map(lambda leaf: np.asarray(leaf)[: len(part)], leaves))  # noqa: B023
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _predict(self, model: Model, x):
        return self.predictor.predict(model, self.predictor.shared, self.predictor.stacked, x)

    def _checked(self, images: Any) -> np.ndarray:
        try:
            images, shape, dtype = np.asarray(images), self.images.shape, self.images.dtype
        except (ValueError, TypeError, jax.errors.TracerArrayConversionError):
            raise JaxflError(
                "The images must be one array of numbers that are known, not lists of different lengths, and "
                "not an argument of jax.jit or jax.vmap."
            ) from None
        if self.images.vocabulary:
            return self._checked_tokens(images)
        if images.ndim == 2 and of_vectors(shape):
            images = images[:, None, None]
        if images.ndim == 3 and images.shape[1:] == shape[:2] and shape[2] == 1:
            images = images[..., None]
        vectors = of_vectors(shape)
        what = "vectors" if vectors else "images"
        if images.ndim != 4 or images.shape[1:] != shape:
            wanted = f"(B, {shape[2]})" if vectors else f"(B, {str(shape)[1:]}"
            raise JaxflError(f"The model takes {what} {wanted}, but these are {images.shape}.")
        if dtype.kind == "f" and images.dtype.kind in ("biuf" if vectors else "f"):
            return images.astype(dtype)
        if images.dtype != dtype and self.images.shifted:
            raise JaxflError(
                f"Client {self.client} sees {what} of its own (--shift), in {dtype}, but these are "
                f"{images.dtype}; run.seen({self.client}, rows) makes them."
            )
        if images.dtype != dtype:
            whole = " (whole numbers from 0 to 255, not divided by anything)" if dtype == np.uint8 else ""
            raise JaxflError(
                f"The model takes {what} as its data set has them, in {dtype}{whole}, and normalises them "
                f"itself, but these are {images.dtype}."
            )
        return images

    def _checked_tokens(self, tokens: np.ndarray) -> np.ndarray:
        most, shape = self.images.vocabulary, self.images.shape
        if tokens.shape[1:] != shape or tokens.dtype.kind not in "iu":
            raise JaxflError(
                f"The model takes tokens (B, {shape[0]}) of whole numbers, but these are {tokens.dtype} of "
                f"shape {tokens.shape}; put -1 after the end of shorter rows."
            )
        if tokens.size and not -1 <= tokens.min() <= tokens.max() < most:
            raise JaxflError(
                f"The model takes tokens from 0 to {most - 1}, and -1 after the end of a row, but these run "
                f"from {tokens.min()} to {tokens.max()}."
            )
        return tokens.astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _applied(function, model: Model, shared, own, images, mean, std):
    return function(model, shared, own, normalised(images, mean, std))


def _scores(model: Model, weights, _, x):
    return model.apply(weights, weights, x, train=False)[0]


def _outputs(model: Model, weights, _, x):
    return model.outputs(weights, weights, x, train=False)[0]


def _taps(model: Model, weights, _, x):
    return model.taps(weights, weights, x, tuple(range(1, model.convolution_count + 1)))
