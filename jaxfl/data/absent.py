"""Placeholder for images and labels where a run is used without its data set."""

import jax

from jaxfl.errors import JaxflError


class NotAtHand(JaxflError):
    """The error of reading images or labels of a federation without them."""


@jax.tree_util.register_static
class Absent:
    """Placeholder for arrays that are not loaded: reading it raises `NotAtHand`, even under tracing."""

    def _refuse(self, *_):
        raise NotAtHand("The images are not available; load the data set.")

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


ABSENT = Absent()
