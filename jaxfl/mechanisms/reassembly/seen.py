"""Outputs of networks' first parts on the public images, computed once for all that begin alike.

Parts that do not learn have the same output in every epoch, and in every network that begins with them.
"""

import math
import threading
from itertools import takewhile

import numpy as np

from jaxfl.core import flops
from jaxfl.mechanisms.reassembly.parts import Chain, Part, output_shape, run_all

ROOM = 2**29  # bytes


class Seen:
    """A cache of the public images on their way through networks; it keeps the latest.

    Several threads may ask; each finds what another has computed. The images take up to `room` bytes of host
    memory, and twice as much while the next ones are computed. If they would not fit after a part, they stay
    before it. Operations are not counted again if images are recomputed for lack of room: when that happens
    depends on which thread asks first.
    """

    def __init__(self, images: np.ndarray, batch_size: int, room: int = ROOM):
        """Start empty; images (P, ...) will go through a part in batches of one size."""
        self._images, self._batch_size, self._room = images, batch_size, room
        self._remembered = {}
        self._counted = set()
        self._asked = threading.Lock()

    def after(self, chain: Chain) -> tuple[int, np.ndarray]:
        """Return how far the images have come in a chain, and what they are there.

        Returns:
          The number of parts passed, all of the chain's if there is room, and the images there (P, ...).
        """
        x, room = self._images, takewhile(self._has_room, chain)
        done = 0
        with self._asked:
            for done, part in enumerate(room, 1):
                begun = chain[:done]
                if begun in self._remembered:
                    x = self._remembered.pop(begun)
                else:
                    x, operations = flops.on_host(run_all, (part,), x, self._batch_size)
                    flops.add(0 if begun in self._counted else operations)
                    self._counted.add(begun)
                self._remembered[begun] = x  # as the latest
                self._forget()
        return done, x

    def through(self, chain: Chain) -> np.ndarray:
        """Return what the images are after all parts of a chain (P, ...)."""
        done, x = self.after(chain)
        return run_all(chain[done:], x, self._batch_size)

    def _has_room(self, part: Part) -> bool:
        of_one = math.prod(output_shape(part.layer)) * self._images.dtype.itemsize
        return len(self._images) * of_one <= self._room

    def _forget(self):
        """Drop the earliest images until the others fit."""
        while sum(x.nbytes for x in self._remembered.values()) > self._room:
            del self._remembered[next(iter(self._remembered))]
