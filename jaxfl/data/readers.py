"""The kinds of data sources: how the names of each look, and what reads it."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxfl.config import choices
from jaxfl.config.options import declared
from jaxfl.config.own_code import own_code, require_call
from jaxfl.config.values import alternatives, as_path
from jaxfl.data import folder, hf, leaf, npz, pfllib, tables, text, tfds
from jaxfl.data.kept import How, kept
from jaxfl.data.sources import Source, from_arrays, of_classes
from jaxfl.errors import JaxflError
from jaxfl.machine.files import below

CLASSES = "classes"  # option of every data set
OF_TEXTS = "length", "tokens", "tokenizer"  # options that only texts read
SOME = re.compile(rf"(.*?)\s*,\s*{CLASSES}\s*=([^,/]*)(|,.*)")  # a path does not go on after its value

# UCI's optical recognition of handwritten digits (E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49, CC BY
# 4.0), the part that scikit-learn has, with a fixed stratified fifth to test on.
DIGITS = Path(__file__).with_name("digits.npz")


class Reader(NamedTuple):
    """What reads one kind of data source.

    Attributes:
      examples: names of such sources, and what they are.
      takes: ``name -> bool``, whether a name is that of such a source.
      read: ``(place, how, **options) -> Source``; a place is a name without its options, which are this
        function's keyword-only arguments, besides ``classes``.
      absolute: ``place -> place`` of the same source in every directory.
    """

    examples: Mapping[str, str]
    takes: Callable[[str], bool]
    read: Callable[..., Source]
    absolute: Callable[[str], str] = lambda place: place

    def parted(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the place of a name, and its options as text."""
        return choices.split(name) if declared(self.read) else (name, {})


def _read_own(name: str, how: How) -> Source:
    function = choices.lookup("data set", {}, name)
    require_call(name.partition(":")[0], function, "data_dir")
    with own_code():
        made = function(how.data_dir)
    if not isinstance(made, Source):
        raise JaxflError(f"{name} returns a {type(made).__name__}, not a jaxfl.data.sources.Source.")
    return from_arrays(*made, task=how.task)


def _read_prepared(name: str, how: How) -> Source:
    """Read a set of tensorflow-datasets, unless a file is meant."""
    path = as_path(name)
    if path.suffix and path.is_file():
        raise JaxflError(
            f"{name} is a file, but only .npz, .csv, .parquet and .txt files are read; write an .npz by "
            "numpy.savez, with arrays images or features, and labels."
        )
    return kept(how, tfds.files(name, how.data_dir), lambda: tfds.read_source(name, how.data_dir))


def _read_folder(name: str, how: How) -> Source:
    path = as_path(name)
    return kept(how, below(path, linked=True), lambda: folder.read_source(name, path, how.labelled))


def _read_pfllib(name: str, how: How) -> Source:
    path = as_path(name.removeprefix(pfllib.PREFIX))
    return kept(how, below(path, linked=True), lambda: pfllib.read_source(name, path))


def _resolved(place: str, prefix: str = "") -> str:
    return prefix + str(as_path(place.removeprefix(prefix)).resolve())


READERS = (  # the first that takes a name reads it; the last one takes every name
    Reader(
        {"digits": "1,797 handwritten digits, 8x8, ten classes; comes with jaxfl"},
        takes=lambda name: name == "digits",
        read=lambda name, how: npz.read_source(name, DIGITS),
    ),
    Reader(
        {
            "hf:uoft-cs/cifar10": "a data set of the Hugging Face hub",
            "hf:path/to/folder": "one in a folder: of save_to_disk, of parquet files, ...",
        },
        takes=lambda name: name.startswith(hf.PREFIX),
        read=hf.read_source,
        absolute=hf.absolute,
    ),
    Reader(
        {"pfllib:path/to/folder": "PFLlib's folder of a data set: its clients (a column client), its split"},
        takes=lambda name: name.startswith(pfllib.PREFIX),
        read=_read_pfllib,
        absolute=partial(_resolved, prefix=pfllib.PREFIX),
    ),
    Reader(
        {"leaf:path/to/folder": "LEAF's folder of a data set: its users (a column client), its split"},
        takes=lambda name: name.startswith(leaf.PREFIX),
        read=leaf.read_source,
        absolute=partial(_resolved, prefix=leaf.PREFIX),
    ),
    Reader(
        {
            "path/to/file.npz": "arrays images (N, H, W[, C]), features (N, d), windows (N, T, C) or tokens "
            "(N, T), labels (N,), and perhaps split"
        },
        takes=lambda name: name.endswith(".npz"),
        read=lambda name, how: npz.read_source(name, as_path(name), how.labelled, how.task),
        absolute=_resolved,
    ),
    Reader(
        {
            "path/to/file.csv,target=COLUMN": "a table with named columns, or a .parquet",
            "path/to/file.csv,text=COLUMN,target=COLUMN": "texts as tokens",
        },
        takes=lambda name: name.partition(",")[0].endswith(tables.SUFFIXES),
        read=tables.read_source,
        absolute=_resolved,
    ),
    Reader(
        {"path/to/file.txt": "a text, whose next character is to be predicted"},
        takes=lambda name: name.partition(",")[0].endswith(text.SUFFIX),
        read=text.read_source,
        absolute=_resolved,
    ),
    Reader(
        {"path/to/folder": "a sub-folder of images per class, perhaps below train/ and test/"},
        takes=lambda name: as_path(name).is_dir(),
        read=_read_folder,
        absolute=_resolved,
    ),
    Reader(
        {"path/to/my.py:source": "a function of your own: data_dir -> jaxfl.data.sources.Source"},
        takes=lambda name: name.partition(":")[0].endswith(".py"),
        read=_read_own,
        absolute=choices.absolute,
    ),
    Reader(
        {
            "cifar10, mnist, fashion_mnist, svhn_cropped, ...": "any image classification set of "
            "tensorflow-datasets, by its name",
            "emnist/byclass": "a configuration of a set",
            "cifar100:coarse_label": "another label of a set",
            "cifar10,classes=0-4+8": "some classes of any of these, numbered anew",
        },
        takes=lambda name: True,
        read=_read_prepared,
    ),
)


def reader_of(name: str) -> Reader:
    """Return the reader of a data set's name."""
    return next(reader for reader in READERS if reader.takes(name))


def whole(name: str) -> tuple[str, str | None]:
    """Return the name of the whole data set, and which of its classes are meant; None for all.

    >>> whole("emnist/letters,classes=10-19")
    ('emnist/letters', '10-19')
    >>> whole("hf:cifar100,classes=0+3,label=fine_label")
    ('hf:cifar100,label=fine_label', '0+3')
    >>> whole("a,classes=2/b.npz")
    ('a,classes=2/b.npz', None)

    Raises:
      JaxflError: if the name gives classes twice.
    """
    found = SOME.fullmatch(name)
    if not found:
        return name, None
    everything, chosen = found[1] + found[3], found[2].strip()
    if SOME.fullmatch(everything):
        raise JaxflError(f"{name!r} gives {CLASSES} twice; give it once.")
    return everything, chosen


def absolute(name: str) -> str:
    """Return a name of the same data set that holds in every directory."""
    everything, chosen = whole(name)
    reader = reader_of(everything)
    place, options = reader.parted(everything)
    for key, option in declared(reader.read).items():
        if key in options and Path in alternatives(option.type):
            options[key] = str(as_path(options[key]).resolve())
    found = choices.join(reader.absolute(place), options)
    return found if chosen is None else f"{found},{CLASSES}={chosen}"


def load(name: str, data_dir: Path | None = None, labelled: bool = True, task: str = "auto") -> Source:
    """Load a data set by its name or path.

    Args:
      name: as the examples of `READERS`, and perhaps ``,classes=10-19``: only images of these classes.
      data_dir: folder of tensorflow-datasets' sets, ``~/tensorflow_datasets`` by default.
      labelled: whether images must have labels. If not, an ``.npz`` may lack them, and a folder may hold
        images without sub-folders: all are training rows of class 0 then.
      task: what labels are, a name in `jaxfl.tasks.TASKS`; "auto" takes it from their type.

    Returns:
      The source. Without a test part, a fixed stratified fifth of the rows becomes it.

    Raises:
      JaxflError: if the data set is unknown, not prepared, unreadable or malformed, lacks a class, or
        has labels for another task.
    """
    everything, chosen = whole(name)
    reader, labelled = reader_of(everything), labelled or chosen is not None
    place, options = reader.parted(everything)
    how = How(everything, f"{absolute(everything)} {data_dir} {labelled} {task}", data_dir, labelled, task)
    given = choices.convert(place, declared(reader.read), options)
    unread = [key for key in OF_TEXTS if key in given] if "text" in declared(reader.read) else []
    if unread and "text" not in given:
        raise JaxflError(f"{name}: {unread[0]} is of texts; name their columns by text=, or leave it out.")
    source = reader.read(place, how, **given)
    if task not in ("auto", source.task.name):
        raise JaxflError(
            f"--task {task}: {name} has labels for {source.task.name}: {source.task.what}; leave it out, or "
            "write an .npz file."
        )
    return source if chosen is None else of_classes(source, chosen)._replace(name=name)
