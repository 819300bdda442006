"""Which blocks cannot train on a single row: those in which BatchNorm gets one value of a channel per row.

One value has no variance: after a dense layer, or on maps of one pixel. Maps of several pixels have one. This
is seen where a block is traced on one row. Who trains a network learns of such blocks while tracing its loss.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import flax.linen as nn

_values: ContextVar[list[int] | None] = ContextVar("values", default=None)
_blocks: ContextVar[set[str] | None] = ContextVar("blocks", default=None)


@contextlib.contextmanager
def values_per_channel() -> Iterator[list[int]]:
    """Collect how many values of a channel each BatchNorm gets that is called inside."""

    def intercept(call, inputs, options, context):
        if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__":
            call = counted(call, context.module.axis)
        return call(*inputs, **options)

    values = []
    token = _values.set(values)
    try:
        with nn.intercept_methods(intercept):
            yield values
    finally:
        _values.reset(token)


def counted(call: Callable, axis: int | Iterable[int]) -> Callable:
    """Return the call of a BatchNorm for `values_per_channel` to see; Linen's are seen without it.

    Args:
      call: returns normalised maps, perhaps in a tuple with more.
      axis: axis of the channels, or several.
    """

    def counting(*inputs, **options) -> Any:
        found = call(*inputs, **options)
        values, y = _values.get(), found[0] if isinstance(found, tuple) else found
        if values is not None:
            channels = math.prod(y.shape[i] for i in ([axis] if isinstance(axis, int) else axis))
            values.append(y.size // channels)
        return found

    return counting


@contextlib.contextmanager
def needing_two_rows() -> Iterator[set[str]]:
    """Collect the names of blocks that are applied inside in training mode and cannot train on one row."""
    names = set()
    token = _blocks.set(names)
    try:
        yield names
    finally:
        _blocks.reset(token)


def report(names: Iterable[str]) -> None:
    """Report blocks to an enclosing `needing_two_rows`, if there is one."""
    found = _blocks.get()
    if found is not None:
        found.update(names)
