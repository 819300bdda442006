"""Parts of some work, for machines that divide it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from jaxfl.errors import JaxflError
from jaxfl.folder.variant import Variant

Item = TypeVar("Item")


def labels_to_train(variants: Sequence[Variant], part: str, folder: Path | None) -> list[str]:
    """Return the labels of the variants that a part of a comparison trains, see `take_part`.

    Raises:
      JaxflError: if `part` is not one of several parts, or no folder is named that all of these share.
    """
    labels = take_part([variant.label for variant in variants], part)
    if folder is None and not part.endswith("/1"):
        raise JaxflError(f"--part {part}: name the folder that all parts share, with --run-dir.")
    return labels


def take_part(work: Sequence[Item], part: str) -> list[Item]:
    """Return the items of one part: of 2/8 every eighth one, from the second on.

    Raises:
      JaxflError: if `part` is not two such numbers.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(part))
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise JaxflError(f"--part {part!r} is not one of several parts; write 1/8 to 8/8 for eight of them.")
    return list(work[number - 1 :: count])
