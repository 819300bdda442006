"""Reading ``.npz`` files written elsewhere."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfl.errors import JaxflError


def read(path: str | Path, required: Sequence[str]) -> dict[str, np.ndarray]:
    """Return all arrays of an ``.npz`` file by name, without unpickling anything.

    Raises:
      JaxflError: if the file is missing, is not an ``.npz`` of plain arrays, lacks a required array, or its
        arrays do not fit in memory.
    """
    try:
        # Opened here, because numpy leaves a file open whose contents it does not understand.
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        RuntimeError,  # of an encrypted file, or an unknown compression
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise JaxflError(
            f"{path} is damaged or not an .npz file of plain arrays; write it with numpy.savez."
        ) from error
    except MemoryError:
        raise JaxflError(f"{path} holds more than fits in memory.") from None
    missing = [name for name in required if name not in arrays]
    if missing:
        has = ", ".join(arrays) or "nothing"
        raise JaxflError(f"{path} lacks {', '.join(missing)}; it holds {has}; give its arrays these names.")
    return arrays
