"""Lists of rows in JSON files written elsewhere."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.errors import JaxflError
from jaxfl.machine.files import unreadable


def parsed(path: Path) -> Any:
    """Return the value of a JSON file.

    Raises:
      JaxflError: if it is missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}.") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (RecursionError, ValueError) as error:
        raise JaxflError(f"{path} is not JSON ({error}); docs/data.md shows what it must hold.") from None


def whole_numbers(path: Path, value: Any) -> np.ndarray:
    """Return a list of whole numbers from 0 up, each once, as (n,) int64.

    Raises:
      JaxflError: if it is not such a list, naming the file that holds it.
    """
    if not isinstance(value, list) or not all(type(row) is int and 0 <= row < 2**63 for row in value):
        raise JaxflError(f"{path} does not hold lists of rows; docs/data.md shows their form.")
    if len(set(value)) < len(value):
        raise JaxflError(f"{path} names a row twice for one client; list each once.")
    return np.array(value, np.int64)
