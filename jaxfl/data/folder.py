"""Reading folders of images."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError


def read_source(name: str, path: Path, labelled: bool = True) -> Source:
    """Read a folder of images.

    It has one sub-folder of images per class, in alphabetical order, or ``train`` and ``test`` above these.
    The column ``file`` has each image's path in it. Unless images must be `labelled`, the folder may hold
    images without sub-folders: all are training rows of class 0 then.

    Raises:
      JaxflError: if there are no images, one cannot be read, or they are not of one size.
    """
    if not labelled and not any(entry.is_dir() for entry in _visible(path)):
        images = _stacked(_visible(path), f"{path} is an empty folder; put images in it.")
        return from_arrays(name, images, np.zeros(len(images), int), np.ones(len(images), bool), 1)
    divided = (path / "train").is_dir() and (path / "test").is_dir()
    alone = path / "train"
    if not divided and alone.is_dir() and any(entry.is_dir() for entry in _visible(alone)):
        raise JaxflError(
            f"{path} has train, but no test beside it; rename the folder of test images to test, or give "
            f"{alone}."
        )
    if divided and (others := [part for part in ("val", "valid", "validation") if (path / part).is_dir()]):
        raise JaxflError(
            f"{path} has {others[0]} beside train and test, but only these two are read; move its images "
            "into train (--validation-fraction cuts validation rows from clients' own) or out of the folder."
        )
    parts = [path / "train", path / "test"] if divided else [path]
    classes = sorted(
        {folder.name for part in parts for folder in _visible(part) if folder.is_dir() and _visible(folder)}
    )
    files = [
        (file, label, part == parts[0])
        for part in parts
        for label, of_class in enumerate(classes)
        if (part / of_class).is_dir()
        for file in _visible(part / of_class)
    ]
    empty = (
        f"{path} has no images; give every class a sub-folder of images, or write arrays into one .npz file "
        f"(numpy.savez) and name that. A folder that PFLlib wrote is pfllib:{path}."
    )
    if (path / "train" / "0.npz").exists():
        empty = (
            f"{path} is a folder of PFLlib: --dataset pfllib:{path} --partition natural,column=client,"
            "min_samples=1."
        )
    images = _stacked([file for file, *_ in files], empty)
    paths, labels, train = zip(*files, strict=True)
    columns = {"file": np.array([file.relative_to(path).as_posix() for file in paths])}
    train = np.array(train) if divided else None
    return from_arrays(name, images, np.array(labels), train, len(classes), columns, class_names=classes)


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
            mode, pixels = image.mode, np.asarray(ImageOps.exif_transpose(image))  # as viewers turn it
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # all of Pillow's
        raise JaxflError(f"{file} cannot be read as an image; repair it or move it elsewhere.") from error
    if mode not in ("L", "RGB"):
        raise JaxflError(f"{file} is of mode {mode}; convert it to L (grey) or RGB.")
    return pixels
