"""Reading PFLlib's folder of a data set: the rows of each client, and which of them are for testing.

It has config.json with the numbers of clients and classes, and train/0.npz, test/0.npz, ... for each client,
whose only array, ``data``, is a pickled dict: x (n, C, H, W) or (n, d), and y (n,), classes from 0.
"""

import zipfile
from pathlib import Path

import numpy as np

from jaxfl.data import plain_pickles
from jaxfl.data.row_lists import parsed
from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError

PREFIX = "pfllib:"


def read_source(name: str, path: Path) -> Source:
    """Read the rows of all clients, which the column ``client`` numbers; training rows come first.

    Raises:
      JaxflError: if a file is missing, damaged or of another form, or `from_arrays` refuses its arrays.
    """
    config = parsed(path / "config.json")
    try:
        clients, classes = int(config["num_clients"]), int(config["num_classes"])
    except (KeyError, TypeError, ValueError):
        raise JaxflError(
            f"{path / 'config.json'} lacks num_clients or num_classes; it is not PFLlib's."
        ) from None
    files = [(client, part) for part in ("train", "test") for client in range(clients)]
    rows = [_rows(path / part / f"{client}.npz") for client, part in files]
    sizes = [len(y) for _, y in rows]
    x, y = (np.concatenate([of_file[i] for of_file in rows if len(of_file[1])]) for i in (0, 1))
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    train = np.repeat([part == "train" for _, part in files], sizes)
    columns = {"client": np.repeat([client for client, _ in files], sizes)}
    return from_arrays(name, x, y, train, classes, columns)


def _rows(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return x (n, ...) and y (n,) of a client's file."""
    try:
        with zipfile.ZipFile(path) as file, file.open("data.npy") as stream:
            np.lib.format.read_magic(stream)
            _, _, kind = np.lib.format.read_array_header_1_0(stream)
            data = plain_pickles.read(path, stream) if kind.hasobject else None
    except FileNotFoundError:
        raise JaxflError(f"There is no file {path}, although config.json counts its client.") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise JaxflError(f"{path} is damaged or not a file of PFLlib; write it again.") from error
    x, y = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
    if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray) and len(x) == len(y)):
        raise JaxflError(
            f"{path} does not hold arrays x and y of equal length; text is not read from PFLlib."
        )
    return x, y
