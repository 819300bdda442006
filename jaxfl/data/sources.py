"""Data sources: an embedded set, tensorflow-datasets, Hugging Face, an ``.npz`` file, a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxfl.config.options import as_path
from jaxfl.data import hf, npz, tfds
from jaxfl.errors import JaxflError, nearest

DATASETS = {
    "digits": "1,797 handwritten digits, 8x8, ten classes; comes with jaxfl",
    "cifar10, mnist, fashion_mnist, svhn_cropped, ...": "any image classification set of "
    "tensorflow-datasets, by its name",
    "emnist/byclass": "a configuration of a set",
    "cifar100:coarse_label": "another label of a set",
    "hf:uoft-cs/cifar10": "a data set of the Hugging Face hub, with options: config, image, label",
    "hf:path/to/folder": "one in a folder: of save_to_disk, of parquet files, ...",
    "path/to/file.npz": "arrays images (N, H, W[, C]) or features (N, d), labels (N,), and perhaps split",
    "path/to/folder": "a sub-folder of images per class, perhaps below train/ and test/",
    "path/to/my.py:source": "a function of your own: data_dir -> jaxfl.data.sources.Source",
}

# UCI's optical recognition of handwritten digits (E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49, CC BY
# 4.0), the part that scikit-learn has, with a fixed stratified fifth to test on.
DIGITS = Path(__file__).with_name("digits.npz")


class Source(NamedTuple):
    """Labelled images in memory, the training images first, then the test images.

    Vectors are images of a single pixel, whose channels are the features: (N, 1, 1, d).

    Attributes:
      name: name by which it was loaded.
      images: (N, H, W, C), uint8, or float32 for all other types.
      labels: (N,) int32 in 0..classes-1.
      train: (N,) bool, True where the source calls the row a training row.
      classes: number of classes; one may have no rows.
      columns: further values of every row, (N,) integers or words by name, such as its owner or device.
      numbers: (N,) int, number of every row where it came from, before training images were put first; None
        where that is the same.
      divided: whether the data themselves say which rows are for testing; if not, `train` leaves a fixed
        fifth out.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    classes: int
    columns: Mapping[str, np.ndarray] = MappingProxyType({})
    numbers: np.ndarray | None = None
    divided: bool = True


def load(name: str, data_dir: str | Path | None = None, labelled: bool = True) -> Source:
    """Load a data set by its name or path.

    Args:
      name: one of

        - ``digits``: the 1,797 real 8x8 handwritten digits (values 0..16) that come with jaxfl;
        - a path ending in ``.npz``: arrays ``images`` (N, H, W) or (N, H, W, C), uint8 or float,
          or ``features`` (N, d), also integers, in place of them; ``labels`` (N,) that number the classes
          0, 1, 2, ... without a gap, and optionally ``split`` (N,), either the words "train" and "test" or
          True for a training row; every further array (N,) of integers or words is a column;
        - ``hf:`` and the name or the folder of a data set of Hugging Face, see `jaxfl.data.hf.read`;
        - an existing folder: one sub-folder of images per class, in alphabetical order, or
          ``train`` and ``test`` above these; the column ``file`` has each image's path in it;
        - else an image-classification set of tensorflow-datasets: ``cifar10``, ``emnist/byclass``
          (with a configuration), ``cifar100:coarse_label`` (with a label other than its usual one).

        Without a test part, a fixed stratified fifth of the rows becomes it.
      data_dir: folder of tensorflow-datasets' sets, ``~/tensorflow_datasets`` by default.
      labelled: whether images must have labels. If not, an ``.npz`` may lack them, and a folder may hold
        images without sub-folders: all are training rows of class 0 then.

    Raises:
      JaxflError: if the data set is unknown, not prepared, unreadable or malformed.
    """
    path = as_path(name)
    if name == "digits":
        read: Any = _npz(DIGITS, labelled)
    elif name.startswith(hf.PREFIX):
        read = hf.read(name)
    elif path.suffix == ".npz":
        read = _npz(path, labelled)
    elif is_folder(name):
        read = _folder(path, labelled)
    elif path.suffix and path.is_file():
        raise JaxflError(
            f"{name} is a file, but only .npz files are read; write one by numpy.savez, with arrays images "
            "or features, and labels."
        )
    else:
        read = tfds.read(name, data_dir)
    return from_arrays(name, *read)


def is_folder(name: str) -> bool:
    """Return whether `load` takes a name for that of a folder."""
    return name != "digits" and as_path(name).is_dir()


def absolute(name: str) -> str:
    """Return a name of the same data set that holds in every directory."""
    if name.startswith(hf.PREFIX):
        return hf.absolute(name)
    return str(as_path(name).resolve()) if name.endswith(".npz") or is_folder(name) else name


def of_vectors(shape: Sequence[int]) -> bool:
    """Return whether shape (H, W, C) is that of vectors: a single pixel, whose channels are the features."""
    return tuple(shape[:2]) == (1, 1)


def numbers(source: Source) -> np.ndarray:
    """Return the number of every row where it came from, (N,)."""
    return np.arange(len(source.labels)) if source.numbers is None else source.numbers


def column(source: Source, name: str) -> np.ndarray:
    """Return a column of the data, (N,); "row", if the data have none, is the number of each row in them.

    Raises:
      JaxflError: if there is no such column.
    """
    if name == "row" and name not in source.columns:
        return numbers(source)
    if name not in source.columns:
        raise JaxflError(
            f"{source.name} has no column {name!r} of integers or words; {nearest(name, source.columns)}"
        )
    return source.columns[name]


def from_arrays(
    name: str,
    images: np.ndarray,
    labels: np.ndarray,
    train: np.ndarray | None,
    classes: int,
    columns: Mapping[str, np.ndarray] = MappingProxyType({}),
    numbers: np.ndarray | None = None,
    divided: bool = True,
) -> Source:
    """Check arrays of any origin and bring them into the types and order of a source.

    Args:
      name: name of the source.
      images: (N, H, W) or (N, H, W, C), uint8 or float; or vectors (N, d), integers (as float32) or float.
      labels: (N,) integers in 0..classes-1.
      train: (N,) bool, True for a training row; None sets a fixed stratified fifth aside for testing.
      classes: number of classes.
      columns: further values of every row, (N,) integers or words by name.
      numbers: (N,) int, number of every row where it came from; None where these are in order.
      divided: whether the data say themselves which rows are for testing, and `train` was not made up.

    Raises:
      JaxflError: if types, shapes or values are not as described.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    images = _checked_images(name, images)
    if not isinstance(classes, int | np.integer):
        raise JaxflError(f"{name}: classes must be the number of classes, but is {classes!r}.")
    labels = _checked_labels(name, labels, len(images), classes)
    if train is None:
        train, divided = ~_stratified_fifth(name, labels), False
    elif (train := np.asarray(train)).dtype != bool or train.shape != labels.shape:
        raise JaxflError(
            f'{name}: split (train of a Source) must say "train" or "test", or True for training, once '
            "per label."
        )
    if not isinstance(columns, Mapping):
        raise JaxflError(f"{name}: columns of a Source must be a dict of arrays by name, not {columns!r}.")
    if numbers is None:
        numbers = np.arange(len(labels))
    if not np.array_equal(np.sort(numbers, axis=None), np.arange(len(labels))):
        raise JaxflError(f"{name}: numbers of a Source must be those from 0 to {len(labels) - 1}, each once.")
    order = np.argsort(~train, kind="stable")
    columns = {key: _checked_column(name, key, values, len(labels))[order] for key, values in columns.items()}
    came_from = np.asarray(numbers)[order]
    moved = came_from if (np.diff(came_from) < 0).any() else None
    return Source(name, images[order], labels[order], train[order], classes, columns, moved, divided)


def _npz(path: Path, labelled: bool):
    arrays = npz.read(path, required=())
    name = "features" if "features" in arrays and "images" not in arrays else "images"
    if not labelled and name in arrays and "labels" not in arrays:
        arrays["labels"] = np.zeros(len(np.atleast_1d(arrays[name])), int)
        arrays.setdefault("split", np.ones(len(arrays["labels"]), bool))
    if missing := [what for what in ("labels", name) if what not in arrays]:
        lacks = " and ".join(missing).replace("images", "images or features")
        raise JaxflError(
            f"{path} lacks {lacks}; it holds {', '.join(arrays) or 'nothing'}; give its arrays these names."
        )
    examples, labels, split = arrays.pop(name), arrays.pop("labels"), arrays.pop("split", None)
    if (examples.ndim == 2) != (name == "features"):
        wanted = "(N, d)" if name == "features" else "(N, H, W) or (N, H, W, C); name vectors (N, d) features"
        raise JaxflError(f"{path}: {name} have shape {examples.shape}, not {wanted}.")
    if split is not None and np.isin(split, ("train", "test")).all():
        split = split == "train"
    columns = {name: values for name, values in arrays.items() if _is_column(values, len(examples))}
    return examples, labels, split, len(np.unique(labels)), columns


def _folder(path: Path, labelled: bool):
    if not labelled and not any(entry.is_dir() for entry in _visible(path)):
        images = _stacked(_visible(path), f"{path} is an empty folder; put images in it.")
        return images, np.zeros(len(images), int), np.ones(len(images), bool), 1
    divided = (path / "train").is_dir() and (path / "test").is_dir()
    alone = path / "train"
    if not divided and alone.is_dir() and any(entry.is_dir() for entry in _visible(alone)):
        raise JaxflError(
            f"{path} has train, but no test beside it; rename the folder of test images to test, or give "
            f"{alone}."
        )
    if divided and (others := [name for name in ("val", "valid", "validation") if (path / name).is_dir()]):
        raise JaxflError(
            f"{path} has {others[0]} beside train and test, but only these two are read; move its images "
            "into train (--validation-fraction cuts validation rows from clients' own) or out of the folder."
        )
    parts = [path / "train", path / "test"] if divided else [path]
    names = sorted({folder.name for part in parts for folder in _visible(part) if folder.is_dir()})
    files = [
        (file, label, part == parts[0])
        for part in parts
        for label, name in enumerate(names)
        if (part / name).is_dir()
        for file in _visible(part / name)
    ]
    empty = (
        f"{path} has no images; give every class a sub-folder of images, or write arrays into one .npz file "
        "(numpy.savez) and name that."
    )
    images = _stacked([file for file, *_ in files], empty)
    paths, labels, train = zip(*files, strict=True)
    columns = {"file": np.array([file.relative_to(path).as_posix() for file in paths])}
    return images, np.array(labels), np.array(train) if divided else None, len(names), columns


def _stacked(files: Sequence[Path], empty: str) -> np.ndarray:
    """Read images of one size and mode, (N, H, W) or (N, H, W, 3); `empty` is the error if there are none."""
    if not files:
        raise JaxflError(empty)
    images = [_image(file) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise JaxflError(
                f"{file} has height, width and colours {image.shape}, but {files[0]} has "
                f"{images[0].shape}; bring all images to one size and mode."
            )
    return np.stack(images)


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _image(file: Path) -> np.ndarray:
    try:
        with Image.open(file) as image:
            mode, pixels = image.mode, np.asarray(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # all of Pillow's
        raise JaxflError(f"{file} cannot be read as an image; repair it or move it elsewhere.") from error
    if mode not in ("L", "RGB"):
        raise JaxflError(f"{file} is of mode {mode}; convert it to L (grey) or RGB.")
    return pixels


def _checked_images(name: str, images: np.ndarray) -> np.ndarray:
    if images.ndim == 2:
        whole = images.dtype.kind in "biu" and images.dtype != np.uint8  # as tables have them
        images = images[:, None, None].astype(np.float32 if whole else images.dtype)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.size == 0:
        raise JaxflError(
            f"{name}: images have shape {images.shape}, not (N, H, W), (N, H, W, C) or, for vectors, (N, d), "
            "with at least one of each."
        )
    channels, sides = images.shape[1], images.shape[2:]
    # Small windows of a signal, (N, 1, T, C), are no grey images unless they are square.
    least = 16 if channels == 1 and sides[0] != sides[1] else max(5, 2 * channels)
    if channels in (1, 3, 4) and min(sides) >= least and max(sides) <= 2 * min(sides):
        raise JaxflError(
            f"{name}: images have shape {images.shape}, which would be {images.shape[3]} channels, but looks "
            "like (N, C, H, W); store images.transpose(0, 2, 3, 1)."
        )
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind != "f":
        raise JaxflError(f"{name}: images are {images.dtype}; store them as uint8 or float.")
    with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused
        images = images.astype(np.float32)
    if not np.isfinite(images).all():
        raise JaxflError(f"{name} has NaN or infinite values (as float32) among its examples; replace them.")
    return images


def _checked_labels(name: str, labels: np.ndarray, rows: int, classes: int) -> np.ndarray:
    if labels.shape != (rows,):
        raise JaxflError(
            f"{name}: labels have shape {labels.shape}, not ({rows},), a number per image; rows of zeros and "
            "a one become numbers by .argmax(1)."
        )
    if labels.dtype.kind not in "iu":
        raise JaxflError(f"{name}: labels are {labels.dtype}; number the classes 0, 1, 2, ...")
    if labels.min() < 0 or labels.max() >= classes:
        raise JaxflError(
            f"{name}: labels run from {labels.min()} to {labels.max()}, but {classes} classes must be "
            f"numbered from 0 to {classes - 1}; leave out rows without a label, and number labels with gaps "
            "anew: numpy.unique(labels, return_inverse=True)[1]."
        )
    return labels.astype(np.int32)


def _is_column(values: np.ndarray, rows: int) -> bool:
    return values.shape == (rows,) and values.dtype.kind in "biuSU"


def _checked_column(name: str, key: str, values: np.ndarray, rows: int) -> np.ndarray:
    if not _is_column(values := np.asarray(values), rows):
        raise JaxflError(
            f"{name}: the column {key} is {values.dtype} of shape {values.shape}; give each of {rows} rows "
            "an integer or a word."
        )
    return values


def _stratified_fifth(name: str, labels: np.ndarray) -> np.ndarray:
    try:
        from sklearn.model_selection import train_test_split

        _, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    except ValueError as error:
        raise JaxflError(
            f"{name} has no test part and too few images of some class to set a fifth of each "
            "aside; add images or a split of your own."
        ) from error
    return np.isin(np.arange(len(labels)), test)
