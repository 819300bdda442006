"""Parts of some work, for machines that divide it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from jaxfl.errors import JaxflError
from jaxfl.runs.variant import Variant

Item = TypeVar("Item")


def labels_of_part(variants: Sequence[Variant], part: str, folder: Path | None) -> list[str]:
    """Return the labels of the variants that a part of a comparison trains.

    Args:
      variants: those of the whole comparison.
      part: see `of_part`.
      folder: the comparison's folder, if it was named.

    Raises:
      JaxflError: if `part` is not one of several parts, or these do not share a named folder.
    """
    labels = of_part([variant.label for variant in variants], part)
    if folder is None and len(labels) < len(variants):
        raise JaxflError(f"--part {part}: name the folder that all parts share, with --run-dir.")
    return labels


def of_part(work: Sequence[Item], part: str) -> list[Item]:
    """Return the items of one part: of 2/8 every eighth one, from the second on.

    Raises:
      JaxflError: if `part` is not two such numbers.
    """
    first, slash, parts = part.partition("/")
    if not (slash and first.isdecimal() and parts.isdecimal()):
        raise JaxflError(f"--part takes two numbers such as 2/8, not {part!r}.")
    number, of = int(first), int(parts)
    if of < 1:
        raise JaxflError(f"--part {part}: there must be at least one part.")
    if not 1 <= number <= of:
        raise JaxflError(f"--part {part} is not one of {of} parts; write 1/{of} to {of}/{of}.")
    return list(work[number - 1 :: of])
