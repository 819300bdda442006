"""Data sets of Hugging Face, from the hub or from a folder, read with the package `datasets`."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.kept import How, kept
from jaxfl.data.sources import Source, from_arrays, require_everywhere
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.packages import optional, quiet

PREFIX = "hf:"
WORDS = ("int", "uint", "bool", "string", "large_string")  # columns besides images and labels
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in a folder


def read_source(
    place: str, how: How, *, config: str | None = None, image: str | None = None, label: str | None = None
) -> Source:
    """Read the splits ``train`` and ``test`` of a data set.

    Labels that are not numbers of classes are numbered in their order; words name them.

    Args:
      place: ``hf:NAME`` of the hub or ``hf:FOLDER``.
      how: how it is read.
      config: configuration of the set.
      image: column of images; by default the only one of images, else of vectors or arrays of equal size.
      label: column of labels; by default the only one of class labels, else the one called label or labels.

    Returns:
      The source; its columns are all further ones of integers or words.

    Raises:
      JaxflError: if the package is missing, the set cannot be loaded, lacks a column, or its images do not
        fit.
    """
    name = place.removeprefix(PREFIX)
    datasets: Any = optional("datasets", "hf", place)
    splits = _splits(datasets, name, config)
    parts = [splits[split] for split in ("train", "test") if split in splits]
    if "train" not in splits:
        raise JaxflError(f"{PREFIX}{name} has no split train; it has {', '.join(splits) or 'none'}.")
    kinds = parts[0].features
    if len(parts) > 1 and set(kinds) - set(parts[1].features):
        raise JaxflError(
            f"{PREFIX}{name} has different columns in test and train; save both with the same ones."
        )
    image = _image_column(datasets, name, kinds, image)
    label = _label_column(datasets, name, kinds, label)
    if len({str(getattr(part.features[label], "names", None)) for part in parts}) > 1:
        raise JaxflError(
            f"{PREFIX}{name}: {label} numbers its classes differently in test and train; number both alike."
        )
    train = np.arange(sum(map(len, parts))) < len(parts[0]) if len(parts) > 1 else None
    stored = [Path(file["filename"]) for part in parts for file in part.cache_files]
    return kept(how, stored, lambda: _decoded(datasets, how.name, name, parts, image, label, train))


def _decoded(datasets, choice: str, name: str, parts, image: str, label: str, train) -> Source:
    """Return the source of some parts: their columns of images and labels, and all further ones."""
    kinds = parts[0].features
    columns = _columns(parts, [key for key, kind in kinds.items() if _is_column(datasets, kind)])
    labels, classes = columns.pop(label), getattr(kinds[label], "num_classes", None)
    require_everywhere(f"{PREFIX}{name}", label, labels)
    if labels.dtype.kind in "SU":
        classes = len(np.unique(labels))  # which these words name
    if classes is None:
        known, labels = np.unique(labels, return_inverse=True)
        if len(known) > 2 and known.dtype.kind == "i" and known[0] < 0:  # two may be -1 and 1
            raise JaxflError(
                f"{PREFIX}{name}: some rows have the {label} {known[0]}, which is no class; leave these out."
            )
        classes = len(known)
    images, names = _images(name, parts, image, kinds[image]), getattr(kinds[label], "names", None) or ()
    return from_arrays(choice, images, labels, train, classes, columns, class_names=names)


def absolute(place: str) -> str:
    """Return the same place, with an absolute path where it is a folder."""
    folder = as_path(place.removeprefix(PREFIX))
    return f"{PREFIX}{folder.resolve()}" if folder.is_dir() else place


def _splits(datasets, name: str, config: str | None) -> dict:
    """Return the splits of a set by name."""
    folder = as_path(name)
    try:
        with quiet():
            if any((folder / file).is_file() for file in SAVED):
                found = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder) if folder.is_dir() else name, config)
    except Exception as error:  # of the network, the hub, readers of files: there is no common type
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        mend = (
            "check its files"
            if folder.is_dir()
            else "check the name and the network, or name a folder of its files"
        )
        raise JaxflError(
            f"{PREFIX}{name} cannot be loaded ({type(error).__name__}: {reason}); {mend}."
        ) from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _image_column(datasets, name: str, kinds, given: str | None) -> str:
    images = [key for key, kind in kinds.items() if isinstance(kind, datasets.Image)]
    arrays = [key for key, kind in kinds.items() if _is_array(datasets, kind)]
    if given is not None:
        if given not in images + arrays:
            known = ", ".join(images + arrays) or "none"
            raise JaxflError(f"{PREFIX}{name} has no column {given!r} of images or vectors; it has {known}.")
        return given
    found = images or arrays
    if not found:
        raise JaxflError(
            f"{PREFIX}{name} has no column of images, nor one of vectors or arrays of uint8 or floats, among "
            f"{', '.join(kinds)}; cast one of them."
        )
    if len(found) != 1:
        raise JaxflError(
            f"{PREFIX}{name} has {len(found)} columns of images or vectors among {', '.join(kinds)}; "
            "choose one by image=COLUMN."
        )
    return found[0]


def _label_column(datasets, name: str, kinds, given: str | None) -> str:
    usable = [key for key, kind in kinds.items() if _is_column(datasets, kind)]
    if given is not None:
        if given not in usable:
            raise JaxflError(f"{PREFIX}{name} has no column {given!r} of labels; {nearest(given, usable)}")
        return given
    classes = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    called = [key for key in usable if key in ("label", "labels")]
    for found in (classes, called):
        if len(found) == 1:
            return found[0]
    raise JaxflError(
        f"{PREFIX}{name} does not say which column is the label: {', '.join(classes or usable) or 'none'}; "
        "choose one by label=COLUMN."
    )


def _is_array(datasets, kind) -> bool:
    """Return whether a column holds vectors, or arrays of a fixed size."""
    if isinstance(kind, datasets.Array2D | datasets.Array3D):
        return True
    return isinstance(kind, datasets.List) and _is_number(datasets, kind.feature)


def _is_number(datasets, kind) -> bool:
    return isinstance(kind, datasets.Value) and kind.dtype.startswith(("uint8", "float"))


def _is_column(datasets, kind) -> bool:
    """Return whether a column holds an integer or a word per row."""
    if isinstance(kind, datasets.ClassLabel):
        return True
    return isinstance(kind, datasets.Value) and kind.dtype.startswith(WORDS)


def _columns(parts, names: list[str]) -> dict[str, np.ndarray]:
    """Return the columns of all parts, (N,) by name: integers, or words if some row has no value ("")."""

    def of_all(values):
        words = ["" if value is None else str(value) for value in values]
        return np.array(words if None in values else values)

    return {name: of_all([value for part in parts for value in part[name][:]]) for name in names}


def _images(name: str, parts, key: str, kind) -> np.ndarray:
    """Return images or vectors of all parts, of one shape and type."""
    declared = getattr(getattr(kind, "feature", kind), "dtype", None)  # of an Image: Pillow's class
    dtype = declared if declared in ("uint8", "float16", "float32", "float64") else None
    found = []
    try:
        for image in (image for part in parts for image in part[key]):
            if (mode := getattr(image, "mode", "L")) not in ("L", "RGB"):
                raise JaxflError(
                    f"{PREFIX}{name}: {key} has images of mode {mode}; convert them to L or RGB."
                )
            if isinstance(image, dict):
                raise JaxflError(f"{PREFIX}{name}: {key} is not decoded; save it with Image(decode=True).")
            if image is None:
                raise JaxflError(f"{PREFIX}{name}: row {len(found)} has no {key}; leave it out.")
            found.append(np.asarray(image, dtype))
    except (OSError, SyntaxError, ValueError) as error:  # of Pillow, which decodes now
        raise JaxflError(
            f"{PREFIX}{name}: the {key} of row {len(found)} cannot be read ({error}); repair or remove it."
        ) from error
    shapes = sorted({image.shape for image in found})
    if len(shapes) != 1:
        raise JaxflError(
            f"{PREFIX}{name}: {key} has {len(shapes)} sizes, such as {shapes[0]} and {shapes[-1]}; bring all "
            "to one size and mode."
        )
    return np.stack(found)
