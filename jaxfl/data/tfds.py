"""Image-classification sets of tensorflow-datasets, read without TensorFlow."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxfl.data.sources import Source, from_arrays
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.files import below
from jaxfl.machine.packages import quiet


def read_source(name: str, data_dir: str | Path | None = None) -> Source:
    """Read a prepared data set; decoding is faster where OpenCV is installed.

    Args:
      name: ``set``, ``set/configuration``, either followed by ``:label`` to choose the label.
      data_dir: the folder of prepared sets, ``~/tensorflow_datasets`` by default.

    Returns:
      The source, of the splits ``train`` and ``test``; its columns are the set's further features of one
      integer or word per row.

    Raises:
      JaxflError: if the set or label is unknown, not prepared, not readable or not about images, or the
        library is missing.
    """
    # Imported here because it takes a second that only users of these sets should pay.
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise JaxflError(
            f"{name} is a set of tensorflow-datasets, which cannot be imported here ({error}); pip install "
            "tensorflow-datasets, or give images as an .npz file."
        ) from error

    set_name, _, label = name.partition(":")
    with quiet():
        builder = _builder(tfds, set_name, data_dir)
        _check_prepared(builder, set_name, data_dir)
        image, label = _keys(tfds, builder.info, set_name, label)
        splits = [split for split in ("train", "test") if split in builder.info.splits]
        if "train" not in splits:
            raise JaxflError(f"{set_name} has no training split.")
        examples = [_examples(builder, split) for split in splits]
    rows = [row for split in examples for row in split]
    shapes = {row[image].shape for row in rows}
    if len(shapes) != 1:
        raise JaxflError(f"{set_name} has images of different sizes; jaxfl needs one size for all.")
    train = np.arange(len(rows)) < len(examples[0]) if "test" in splits else None
    images = np.stack([row[image] for row in rows])
    labels = np.array([row[label] for row in rows])
    columns = {key: np.array([row[key] for row in rows]) for key in _columns(builder.info, (image, label))}
    kind = builder.info.features[label]
    names = kind.names or ()
    return from_arrays(name, images, labels, train, kind.num_classes, columns, class_names=names)


def files(name: str, data_dir: str | Path | None = None) -> Iterable[Path]:
    """Return the files of a set in all configurations and versions, and their folders."""
    root = data_dir or os.environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets"
    set_name, _, _ = name.partition(":")
    return below(Path(root) / set_name.partition("/")[0])


def _builder(tfds, name: str, data_dir) -> Any:
    try:
        # Any version, so that a set prepared by an older release of the library is found too.
        return tfds.builder(f"{name}:*.*.*", data_dir=data_dir)
    except ImportError as error:
        raise JaxflError(
            f"{name} needs a package that is missing here; pip install '.[tfds-prepare]' in a clone of jaxfl."
        ) from error
    except Exception as error:  # names are refused by one type of error, broken files by many
        raise JaxflError(_why_no_builder(tfds, name)) from error


def _why_no_builder(tfds, name: str) -> str:
    base, _, configuration = name.partition("/")
    if re.search(",.*=", name):
        return (
            f"{name!r}: the only option of a data set is classes, such as {name.split(',')[0]},classes=0-4."
        )
    sets = tfds.list_builders(with_community_datasets=False)
    if base not in sets:
        advice = nearest(base, ["digits", *sets])
        return f"{name!r} is neither a file, a folder nor a set of tensorflow-datasets; {advice}"
    known = list(tfds.builder_cls(base).builder_configs)
    if configuration in ("", *known):
        return f"The description of {name} is damaged; delete its folder and prepare it again."
    return f"{base} has no configuration {configuration!r}; {nearest(configuration, known)}"


def _check_prepared(builder, name: str, data_dir) -> None:
    where = "" if data_dir is None else f"data_dir={str(data_dir)!r}, "
    recipe = (
        "pip install '.[tfds-prepare]' in a clone of jaxfl and then "
        'python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder({name!r}, {where}file_format='array_record').download_and_prepare()\""
    )
    if not builder.is_prepared():
        raise JaxflError(
            f"{name} is not prepared in {builder.data_dir}; give its folder by --data-dir, or prepare it "
            f"with {recipe}"
        )
    if builder.info.file_format.value not in ("array_record", "parquet"):
        raise JaxflError(
            f"{name} is prepared in {builder.data_dir} as {builder.info.file_format.value}, which "
            f"only TensorFlow reads; delete that folder and prepare it again with {recipe}"
        )


def _keys(tfds, info, name: str, label: str) -> tuple[str, str]:
    """Return the features that hold the image and the label."""
    image, usual = info.supervised_keys or ("", "")
    kinds = dict(info.features.items())
    if not isinstance(kinds.get(image), tfds.features.Image):
        raise JaxflError(f"{name} is not an image-classification set.")
    labels = sorted(k for k, kind in kinds.items() if isinstance(kind, tfds.features.ClassLabel))
    if (label or usual) not in labels:
        raise JaxflError(
            f"{name} has no class label {label or usual!r}; it has {', '.join(labels) or 'none'}."
        )
    return image, label or usual


def _columns(info, used: tuple[str, ...]) -> list[str]:
    """Return the features that are one integer or word per row."""
    kinds = {name: kind for name, kind in info.features.items() if name not in used}
    return [
        name
        for name, kind in kinds.items()
        if kind.shape == () and (kind.np_dtype is object or np.dtype(kind.np_dtype).kind in "biuSU")
    ]


def _examples(builder, split: str) -> list[dict]:
    try:
        source = builder.as_data_source(split)
        # All at once, which is a quarter faster than one by one.
        return source.__getitems__(range(len(source)))
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise JaxflError(
            f"The {split} split in {builder.data_dir} is damaged or incomplete; prepare it again."
        ) from error
