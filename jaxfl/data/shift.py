"""Feature shift: how the images of one client differ from those of another, while labels mean the same.

What a shift does to a client is drawn like the partition, by a stream of its seed, and is then part of the
data: the same for its training, validation and test rows, in all rounds and for all seeds of a run. Images
are stored once, and changed when a client looks at them; public images are the same to all.

A shift is a function ``(clients, rng, *, options) -> amounts (clients,)`` in `SHIFTS`, and one of the same
name in `APPLIED`, ``(images (B, H, W, C), amounts (B,), keys (B,), std (1, 1, 1, C)) -> images``, on raw
values as floats. `keys` are of a client's rows, `std` is the standard deviation of all training images.
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
from jaxfl.errors import JaxflError

STREAM = 7  # of the partition's seed; it divides by 0 to 4, draws public images by 5 and links by 6


def rotate(
    clients: int, rng: np.random.Generator, *, degrees: float = 45.0, angles: int | None = None
) -> np.ndarray:
    """Turn the images of every client by an angle of its own, black where they do not reach.

    Args:
      clients: number of clients.
      rng: source of randomness.
      degrees: angles are even between minus and plus so many.
      angles: instead, each client has one of so many angles of equal distance: 4 are 0, 90, 180 and 270
        degrees. As many clients have each, give or take one.
    """
    if angles is not None:
        if angles < 1:
            raise JaxflError(f"--shift rotate: angles is {angles}; it has to be 1 or more.")
        return rng.permutation(np.arange(clients) % angles) * 360 / angles
    if not 0 <= degrees <= 180:
        raise JaxflError(f"--shift rotate: degrees is {degrees}; it has to be from 0 to 180.")
    return rng.uniform(-degrees, degrees, clients)


def colour(clients: int, rng: np.random.Generator, *, hue: float = 0.5) -> np.ndarray:
    """Move the hue of every client's images by an amount of its own; they need red, green and blue.

    Args:
      clients: number of clients.
      rng: source of randomness.
      hue: amounts are even between minus and plus so much of the circle of hues; 0.5 is all of it.
    """
    if not 0 <= hue <= 0.5:
        raise JaxflError(f"--shift colour: hue is {hue}; it has to be from 0 to 0.5.")
    return rng.uniform(-hue, hue, clients)


def noise(clients: int, rng: np.random.Generator, *, std: float = 0.5) -> np.ndarray:
    """Add Gaussian noise to every client's images, or vectors, of a strength of its own.

    The strengths are std i / N for i = 1, ..., N, dealt out at random, after the feature imbalance of
    NIID-Bench (Li et al. 2022, arXiv:2102.02079). An image has the same noise whenever its client sees it.

    Args:
      clients: N, number of clients.
      rng: source of randomness.
      std: of the noise of the client with most of it, where 1 is the standard deviation of the data.
    """
    if not 0 <= std < np.inf:
        raise JaxflError(f"--shift noise: std is {std}; it has to be a number from 0 up.")
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
    """Rows as their clients see them: each is an image of the data set and whose it is.

    Attributes:
      image: (V,) int32, where each row's image is; one that several clients have is there for each.
      number: (V,) int32, of that image in the data set, by which noise is drawn.
      owner: (V,) int32, the client's id; N for public rows, which nothing changes.
      amounts: of each kind (N + 1,) float, by owner.
      seed: () uint32, of noise.
      kinds: names in `SHIFTS`, in the order in which they are applied.
    """

    image: jax.Array
    number: jax.Array
    owner: jax.Array
    amounts: tuple[jax.Array, ...]
    seed: jax.Array
    kinds: tuple[str, ...] = static()

    def look(self, images, rows, std):
        """Rows (B,) of the data set's images (N, H, W, C): floats (B, H, W, C), not yet normalised."""
        seen, owner = images[self.image[rows]], self.owner[rows]
        amounts = tuple(of_clients[owner] for of_clients in self.amounts)
        return _changed(self.kinds, seen, amounts, self.seed, owner, self.number[rows], std)


def _changed(kinds, images, amounts, seed, owner, number, std):
    """Images (B, H, W, C), each by its amount of every kind (B,); `owner` and `number` (B,) decide noise."""
    key = jax.random.key(seed)
    keys = jax.vmap(lambda i, k: jax.random.fold_in(jax.random.fold_in(key, i), k))(owner, number)
    images = images.astype(std.dtype)
    for place, (kind, amount) in enumerate(zip(kinds, amounts, strict=True)):
        again = kind in kinds[:place]  # a second noise is another one
        own = jax.vmap(jax.random.fold_in, (0, None))(keys, place) if again else keys
        images = APPLIED[kind](images, amount, own, std)
    return images


class Drawn(NamedTuple):
    """What is done to the images of each client.

    Attributes:
      kinds: names in `SHIFTS`, in the order in which they are applied.
      amounts: of each kind (clients,).
      seed: of noise.
    """

    kinds: tuple[str, ...]
    amounts: tuple[np.ndarray, ...]
    seed: int


def require(name: str, kinds: Sequence[str], shape: Sequence[int]) -> None:
    """Refuse shifts that do nothing sensible to images of a shape (H, W, C).

    Raises:
      JaxflError: naming the data set `name`.
    """
    for kind in kinds:
        if kind == "colour" and shape[-1] != 3:
            raise JaxflError(
                f"--shift colour moves the hue of red, green and blue, but {name} has channels in another "
                f"number, {shape[-1]}; take rotate or noise."
            )
        if kind == "rotate" and 1 in shape[:2]:
            what = "vectors" if tuple(shape[:2]) == (1, 1) else f"windows of {max(shape[:2])} steps"
            raise JaxflError(f"--shift rotate turns images, but {name} holds {what}; take noise.")


def shifted(partition: Partition, public: np.ndarray, drawn: Drawn) -> tuple[Partition, Shift]:
    """A partition of rows as their clients see them, and what they see.

    Args:
      partition: of a data set.
      public: (P,) the images that everybody sees.
      drawn: what is done to whom.
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
    """Images (B, H, W, C) as a client sees them, as floats that are not yet normalised.

    Args:
      drawn: what is done to the images of each client.
      images: (N, H, W, C) of the data set.
      std: (1, 1, 1, C) of its training images.
      client: its id.
      rows: (B,) of the data set, at least one.
    """
    std = np.asarray(std, jnp.result_type(float))
    if drawn is None:
        return images[rows].astype(std.dtype)
    found = []
    for part in np.array_split(rows, -(-len(rows) // 1024)):
        owner, number = np.full(len(part), client, np.int32), part.astype(np.int32)
        amounts = tuple(np.full(len(part), of_clients[client], std.dtype) for of_clients in drawn.amounts)
        changed = jax.jit(_changed, static_argnums=0)
        found.append(changed(drawn.kinds, images[part], amounts, np.uint32(drawn.seed), owner, number, std))
    return np.concatenate(found)


def describe(drawn: Drawn) -> str:
    """What is done to clients, in a phrase."""
    return ", ".join(
        f"{kind} by {min(amounts):.3g} to {max(amounts):.3g} {UNITS[kind]}"
        for kind, amounts in zip(drawn.kinds, drawn.amounts, strict=True)
    )
