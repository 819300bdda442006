"""Data sets of Hugging Face, from the hub or from a folder, read with the package `datasets`."""

from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxfl.config.values import as_path
from jaxfl.data.columns import labels_of, tokens_of, training_rows
from jaxfl.data.kept import How, kept
from jaxfl.data.sources import Source, from_arrays, require_everywhere
from jaxfl.data.vocabulary import content_of
from jaxfl.errors import JaxflError, nearest
from jaxfl.machine.packages import optional, quiet
from jaxfl.tasks import NEXT_TOKEN

PREFIX = "hf:"
TEXTS = ("string", "large_string")
VALUES = ("int", "uint", "bool", "float", *TEXTS)  # columns besides images
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in a folder


def read_source(
    place: str,
    how: How,
    *,
    config: str | None = None,
    image: str | None = None,
    label: tuple[str, ...] = (),
    text: tuple[str, ...] = (),
    tokens: Literal["words", "characters"] = "words",
    length: int = 64,
    tokenizer: Path | None = None,
) -> Source:
    """Read the splits ``train`` and ``test`` of a data set.

    Labels that are not numbers of classes are numbered in their order; words name them.

    Args:
      place: ``hf:NAME`` of the hub or ``hf:FOLDER``.
      how: how it is read.
      config: configuration of the set.
      image: column of images; by default the only one of images, else of vectors or arrays of equal size.
      label: column of labels, or of the targets of a regression, or several, A+B; by default the only one of
        class labels, else the one called label or labels, else the next token of a text.
      text: columns that are read as text, A+B, joined, in place of images.
      tokens: what tokens of a text are: words and punctuation marks in lower case, or characters.
      length: number of tokens of a row, the first ones of its text.
      tokenizer: file of a tokenizer of the package tokenizers, whose ids are the tokens, in place of
        `tokens`; its vocabulary is that of the run.

    Returns:
      The source; its columns are all further ones of integers or words.

    Raises:
      JaxflError: if the package is missing, the set cannot be loaded, lacks a column, or its images or texts
        do not fit.
    """
    datasets: Any = optional("datasets", "hf", place)
    splits = _splits(datasets, place, config)
    parts = [splits[split] for split in ("train", "test") if split in splits]
    if "train" not in splits:
        raise JaxflError(f"{place} has no split train; it has {', '.join(splits) or 'none'}.")
    kinds = parts[0].features
    if len(parts) > 1 and set(kinds) - set(parts[1].features):
        raise JaxflError(f"{place} has different columns in test and train; save both with the same ones.")
    _require_texts(datasets, place, kinds, text, image)
    seen = "" if text else _image_column(datasets, place, kinds, image)
    others = {key: kind for key, kind in kinds.items() if key not in text}
    labels = _label_columns(datasets, place, others, label, how.task, bool(text))
    for key in labels:
        if len({str(getattr(part.features[key], "names", None)) for part in parts}) > 1:
            raise JaxflError(
                f"{place}: {key} numbers its classes differently in test and train; number both alike."
            )
    content = content_of(tokenizer)
    stored = [Path(file["filename"]) for part in parts for file in part.cache_files]
    files = stored + ([tokenizer] if stored and tokenizer else [])

    def decoded() -> Source:
        columns = _columns(parts, [key for key, kind in others.items() if _is_value(datasets, kind)])
        y, known = _labels(place, {key: columns.pop(key) for key in labels}, kinds, how.task)
        known |= {"divided": len(parts) > 1, "task": how.task}
        rows = sum(map(len, parts))
        train = np.arange(rows) < len(parts[0])
        if len(parts) == 1:
            train = training_rows(place, y, known["classes"], rows, how.task)
        if text:
            texts = [[value or "" for part in parts for value in part[key][:]] for key in text]
            x, words = tokens_of(place, texts, train, tokens, length, content)
            known |= words
        else:
            x = _images(place, parts, seen, kinds[seen])
        columns = {key: values for key, values in columns.items() if values.dtype.kind != "f"}
        return from_arrays(how.name, x, y, train, columns=columns, **known)

    return kept(how, files, decoded)


def _labels(place: str, columns: dict[str, np.ndarray], kinds, task: str):
    """Return the labels in some columns, and the number and the names of classes, see `labels_of`."""
    for key, labels in columns.items():
        require_everywhere(place, key, labels)
    labels, known = labels_of(columns, task)
    if len(columns) != 1 or not known["classes"]:
        return labels, known
    ((key, values),) = columns.items()
    if (classes := getattr(kinds[key], "num_classes", None)) is not None:  # those that no row has count, too
        return values, {"classes": classes, "class_names": kinds[key].names or ()}
    if known["classes"] > 2 and values.dtype.kind == "i" and values.min() < 0:  # two may be -1 and 1
        raise JaxflError(
            f"{place}: some rows have the {key} {values.min()}, which is no class; leave these out."
        )
    return labels, known


def absolute(place: str) -> str:
    """Return the same place, with an absolute path where it is a folder."""
    folder = as_path(place.removeprefix(PREFIX))
    return f"{PREFIX}{folder.resolve()}" if folder.is_dir() else place


def _splits(datasets, place: str, config: str | None) -> dict:
    """Return the splits of a set by name."""
    name = place.removeprefix(PREFIX)
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
        raise JaxflError(f"{place} cannot be loaded ({type(error).__name__}: {reason}); {mend}.") from error
    return dict(found) if isinstance(found, dict) else {"train": found}


def _image_column(datasets, place: str, kinds, given: str | None) -> str:
    images = [key for key, kind in kinds.items() if isinstance(kind, datasets.Image)]
    arrays = [key for key, kind in kinds.items() if _is_array(datasets, kind)]
    if given is not None:
        if given not in images + arrays:
            known = ", ".join(images + arrays) or "none"
            raise JaxflError(f"{place} has no column {given!r} of images or vectors; it has {known}.")
        return given
    found = images or arrays
    if not found:
        raise JaxflError(
            f"{place} has no column of images, nor one of vectors or arrays of uint8 or floats, among "
            f"{', '.join(kinds)}; cast one of them."
        )
    if len(found) != 1:
        raise JaxflError(
            f"{place} has {len(found)} columns of images or vectors among {', '.join(kinds)}; "
            "choose one by image=COLUMN."
        )
    return found[0]


def _require_texts(datasets, place: str, kinds, text: tuple[str, ...], image: str | None) -> None:
    """Refuse columns of text that are none, and images beside them."""
    texts = [key for key, kind in kinds.items() if _is_value(datasets, kind, TEXTS)]
    for key in text:
        if key not in texts:
            raise JaxflError(f"{place} has no column {key!r} of text; {nearest(key, texts)}")
    if text and image:
        raise JaxflError(f"{place}: text={text[0]} and image={image}; keep the one that is meant.")


def _label_columns(
    datasets, place: str, kinds, given: tuple[str, ...], task: str, text: bool
) -> tuple[str, ...]:
    """Return the columns of labels; none where the next token of a text is to be predicted."""
    usable = [key for key, kind in kinds.items() if _is_value(datasets, kind)]
    for key in given:
        if key not in usable:
            raise JaxflError(f"{place} has no column {key!r} of labels; {nearest(key, usable)}")
    if given or (text and task == NEXT_TOKEN.name):
        return given
    classes = [key for key, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
    called = [key for key in usable if key in ("label", "labels")]
    for found in (classes, called):
        if len(found) == 1:
            return (found[0],)
    if text and not (classes or called):
        return ()
    raise JaxflError(
        f"{place} does not say which column is the label: {', '.join(classes or usable) or 'none'}; "
        "choose one by label=COLUMN."
    )


def _is_array(datasets, kind) -> bool:
    """Return whether a column holds vectors, or arrays of a fixed size."""
    if isinstance(kind, datasets.Array2D | datasets.Array3D):
        return True
    return isinstance(kind, datasets.List) and _is_value(datasets, kind.feature, ("uint8", "float"))


def _is_value(datasets, kind, types: tuple[str, ...] = VALUES) -> bool:
    """Return whether a column holds a number or a word per row."""
    if isinstance(kind, datasets.ClassLabel):
        return types == VALUES
    return isinstance(kind, datasets.Value) and kind.dtype.startswith(types)


def _columns(parts, names: list[str]) -> dict[str, np.ndarray]:
    """Return the columns of all parts, (N,) by name: numbers, or words if some row has no value ("")."""

    def of_all(values):
        words = ["" if value is None else str(value) for value in values]
        return np.array(words if None in values else values)

    return {name: of_all([value for part in parts for value in part[name][:]]) for name in names}


def _images(place: str, parts, key: str, kind) -> np.ndarray:
    """Return images or vectors of all parts, of one shape and type."""
    declared = getattr(getattr(kind, "feature", kind), "dtype", None)  # of an Image: Pillow's class
    dtype = declared if declared in ("uint8", "float16", "float32", "float64") else None
    found = []
    try:
        for image in (image for part in parts for image in part[key]):
            if (mode := getattr(image, "mode", "L")) not in ("L", "RGB"):
                raise JaxflError(f"{place}: {key} has images of mode {mode}; convert them to L or RGB.")
            if isinstance(image, dict):
                raise JaxflError(f"{place}: {key} is not decoded; save it with Image(decode=True).")
            if image is None:
                raise JaxflError(f"{place}: row {len(found)} has no {key}; leave it out.")
            found.append(np.asarray(image, dtype))
    except (OSError, SyntaxError, ValueError) as error:  # of Pillow, which decodes now
        raise JaxflError(
            f"{place}: the {key} of row {len(found)} cannot be read ({error}); repair or remove it."
        ) from error
    shapes = sorted({image.shape for image in found})
    if len(shapes) != 1:
        raise JaxflError(
            f"{place}: {key} has {len(shapes)} sizes, such as {shapes[0]} and {shapes[-1]}; bring all "
            "to one size and mode."
        )
    return np.stack(found)
