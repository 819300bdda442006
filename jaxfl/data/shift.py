"""Feature shift: how the images of one client differ from those of another, while labels mean the same.

A client's shift is drawn like the partition, from a stream of the partition's seed, and is then part of the
data: the same for its training, validation and test rows, in all rounds and for all seeds of a run. Images
are stored once, and changed when a client reads them; public images are the same for all.

A shift is a function ``(clients, rng, *, options) -> amounts (clients,)`` in `SHIFTS`, and one of the same
name in `APPLIED`, ``(images (B, H, W, C), amounts (B,), keys (B,), std (1, 1, 1, C)) -> images``, on raw
values as floats. `keys` are those of a client's rows, `std` is the standard deviation of all training images.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.options import static
from jaxfl.data.colour import with_hue
from jaxfl.data.partition import PARTS, Partition
from jaxfl.data.rotation import turned
from jaxfl.data.sources import kind_of
from jaxfl.errors import JaxflError


def rotate(
    clients: int, rng: np.random.Generator, *, degrees: float | None = None, angles: int | None = None
) -> np.ndarray:
    """Rotate each client's images by an angle of its own, black where they do not reach.

    Args:
      degrees: angles are uniform between minus and plus this number of degrees; 45 if `angles` is none.
      angles: instead, number of equally spaced angles: 4 are 0, 90, 180 and 270 degrees. Each has the same
        number of clients, give or take one.
    """
    if angles is not None:
        if degrees is not None:
            raise JaxflError("--shift rotate: degrees and angles exclude each other; leave one of them out.")
        if angles < 1:
            raise JaxflError(f"--shift rotate: angles is {angles}; it must be 1 or more.")
        return rng.permutation(np.arange(clients) % angles) * 360 / angles
    degrees = 45.0 if degrees is None else degrees
    if not 0 <= degrees <= 180:
        raise JaxflError(f"--shift rotate: degrees is {degrees}; it must be from 0 to 180.")
    return rng.uniform(-degrees, degrees, clients)


def colour(clients: int, rng: np.random.Generator, *, hue: float = 0.5) -> np.ndarray:
    """Move the hue of each client's images by an amount of its own; they need red, green and blue.

    Args:
      hue: amounts are uniform between minus and plus this share of the circle of hues; 0.5 is all of it.
    """
    if not 0 <= hue <= 0.5:
        raise JaxflError(f"--shift colour: hue is {hue}; it must be from 0 to 0.5.")
    return rng.uniform(-hue, hue, clients)


def noise(clients: int, rng: np.random.Generator, *, std: float = 0.5) -> np.ndarray:
    """Add Gaussian noise to each client's images, or vectors, with a strength of its own.

    The strengths of N clients are std i / N for i = 1, ..., N, dealt out at random, after the feature
    imbalance of NIID-Bench (Li et al. 2022, arXiv:2102.02079). An image has the same noise whenever its
    client sees it.

    Args:
      std: largest strength of a client's noise, in standard deviations of the data.
    """
    if not 0 <= std < np.inf:
        raise JaxflError(f"--shift noise: std is {std}; it must be a number from 0 up.")
    return rng.permutation(std * np.arange(1, clients + 1) / clients)


SHIFTS: dict[str, Callable[..., np.ndarray]] = {"rotate": rotate, "colour": colour, "noise": noise}
UNITS = {"rotate": "degrees", "colour": "of the circle of hues", "noise": "standard deviations"}


def _rotated(images, degrees, keys, std):
    return jax.vmap(turned)(images, jnp.deg2rad(degrees))


def _coloured(images, hues, keys, std):
    return jax.vmap(with_hue)(images, hues)


def _noisy(images, strengths, keys, std):
    drawn = jax.vmap(lambda key: jax.random.normal(key, images.shape[1:], images.dtype))(keys)
    return images + strengths[:, None, None, None] * std * drawn


APPLIED: dict[str, Callable] = {"rotate": _rotated, "colour": _coloured, "noise": _noisy}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shift:
    """Rows as their clients see them: each is an image of the data set and its owner."""

    image: jax.Array  # (V,) int32, place of each row's image; an image of several clients has a row for each
    number: jax.Array  # (V,) int32, number of that image in the data set, from which noise is drawn
    owner: jax.Array  # (V,) int32, id of the client; N for public rows, which are unchanged
    amounts: tuple[jax.Array, ...]  # per kind (N + 1,) float, by owner
    seed: jax.Array  # () uint32, seed of noise
    kinds: tuple[str, ...] = static()  # names in `SHIFTS`, in the order in which they are applied

    def look(self, images, rows, std):
        """Return rows (B,) of images (N, H, W, C) as floats (B, H, W, C), not yet normalised."""
        seen, owner = images[self.image[rows]], self.owner[rows]
        amounts = tuple(of_clients[owner] for of_clients in self.amounts)
        return _changed(self.kinds, seen, amounts, self.seed, owner, self.number[rows], std)


def _changed(kinds, images, amounts, seed, owner, number, std):
    """Shift images (B, H, W, C) by amounts (B,) of every kind; `owner` and `number` (B,) decide noise."""
    key = jax.random.key(seed)
    keys = jax.vmap(lambda i, k: jax.random.fold_in(jax.random.fold_in(key, i), k))(owner, number)
    images = images.astype(std.dtype)
    for place, (kind, amount) in enumerate(zip(kinds, amounts, strict=True)):
        again = kind in kinds[:place]  # a second noise differs from the first
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, place) if again else keys
        images = APPLIED[kind](images, amount, own, std)
    return images


class Drawn(NamedTuple):
    """The shift of each client's images."""

    kinds: tuple[str, ...]  # names in `SHIFTS`, in the order in which they are applied
    amounts: tuple[np.ndarray, ...]  # per kind (clients,)
    seed: int  # seed of noise


def require(name: str, kinds: Sequence[str], shape: Sequence[int]) -> None:
    """Raise `JaxflError` if a shift makes no sense for images of a shape (H, W, C)."""
    for kind in kinds:
        if len(shape) == 1:
            raise JaxflError(f"--shift {kind} changes images, but {name} holds tokens; leave it out.")
        if kind == "colour" and shape[-1] != 3:
            raise JaxflError(
                f"--shift colour moves the hue of red, green and blue, but the number of channels of {name} "
                f"is {shape[-1]}; take rotate or noise."
            )
        if kind in ("rotate", "colour") and 1 in shape[:2]:
            does = {"rotate": "turns", "colour": "moves the hue of"}[kind]
            raise JaxflError(f"--shift {kind} {does} images, but {name} holds {kind_of(shape)}; take noise.")


def shifted(partition: Partition, public: np.ndarray, drawn: Drawn) -> tuple[Partition, Shift]:
    """Return a partition of rows as their clients see them, and the `Shift` of these.

    `public` (P,) are the rows of the public images.
    """
    clients = len(partition.train)
    parts = [rows for part in PARTS for rows in getattr(partition, part)]
    ends = np.cumsum([len(rows) for rows in (*parts, public)])
    numbers = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    owners = [*np.tile(np.arange(clients), len(PARTS)), clients]
    train, validation, test = (tuple(numbers[i * clients : (i + 1) * clients]) for i in range(len(PARTS)))
    number = jnp.asarray(np.concatenate([*parts, public]), jnp.int32)
    shift = Shift(
        number,
        number,
        jnp.asarray(np.repeat(owners, np.diff(ends, prepend=0)), jnp.int32),
        tuple(jnp.asarray(np.append(amounts, 0), jnp.result_type(float)) for amounts in drawn.amounts),
        jnp.uint32(drawn.seed),
        drawn.kinds,
    )
    return partition._replace(train=train, validation=validation, test=test, public=numbers[-1]), shift


def seen(
    drawn: Drawn | None, images: np.ndarray, std: np.ndarray, client: int, rows: np.ndarray
) -> np.ndarray:
    """Return images (B, H, W, C) as a client sees them, as floats, not yet normalised.

    Args:
      drawn: shift of each client's images, if any.
      images: (N, H, W, C), images of the data set.
      std: (1, 1, 1, C), standard deviation of its training images.
      client: id of the client.
      rows: (B,), rows of the data set.
    """
    std = np.asarray(std, jnp.result_type(float))
    if drawn is None:
        return images[rows].astype(std.dtype)
    found = []
    for part in np.array_split(rows, max(1, -(-len(rows) // 1024))):
        owner, number = np.full(len(part), client, np.int32), part.astype(np.int32)
        amounts = tuple(np.full(len(part), of_clients[client], std.dtype) for of_clients in drawn.amounts)
        changed = jax.jit(_changed, static_argnums=0)
        found.append(changed(drawn.kinds, images[part], amounts, np.uint32(drawn.seed), owner, number, std))
    return np.concatenate(found)


def describe(drawn: Drawn) -> str:
    """Describe clients' shifts in a phrase."""
    return ", ".join(
        f"{kind} by {min(amounts):.3g} to {max(amounts):.3g} {UNITS[kind]}"
        for kind, amounts in zip(drawn.kinds, drawn.amounts, strict=True)
    )
