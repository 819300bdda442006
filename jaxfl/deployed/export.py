"""Export of a run's models: arrays as safetensors, and a card that describes them."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jaxfl.config import choices
from jaxfl.core import tree
from jaxfl.data import saved_partition
from jaxfl.data.sources import kind_of
from jaxfl.deployed.client_model import Deployed
from jaxfl.deployed.models import Models, Opened
from jaxfl.errors import JaxflError
from jaxfl.folder import store
from jaxfl.folder.config import experiment
from jaxfl.machine import files
from jaxfl.machine.packages import optional
from jaxfl.machine.texts import markdown, span
from jaxfl.models.blocks import BATCH_EPSILON, LAYER_EPSILON
from jaxfl.models.model import Model
from jaxfl.tasks import Task

CARD = "README.md"


def export(
    models: Models, folder: Path, clients: Sequence[int] | int | None, own: Callable[[int], np.ndarray]
) -> list[Path]:
    """Write the models that clients of a run deploy, by default of all; return the paths of the files.

    The folder gets a card, and a file for each client, or one for all that share a model and number their
    classes alike. `own` returns some images of a client, as it sees them.

    Raises:
      JaxflError: if safetensors is not installed, the folder holds anything or cannot be written, or a model
        is not available, see `Models`.
    """
    safetensors = optional("safetensors.numpy", "safetensors", "An export")
    if isinstance(clients, int | np.integer):
        clients = [int(clients)]
    chosen = [*dict.fromkeys(map(models.number, range(len(models)) if clients is None else clients))]
    if not chosen:
        raise JaxflError("An export of no clients is empty; name some, or leave them out for all.")
    files.check_empty(folder)
    models_in: dict[str, list[Deployed]] = {}
    numbers = models.opened.partition.relabel
    alike = (numbers == numbers[0]).all()
    for model in map(models.__getitem__, chosen):
        owner = model.model.name if model.shared and alike else f"client-{model.client}"
        models_in.setdefault(f"{store.file_name(owner)}.safetensors", []).append(model)
    for name, held in models_in.items():
        if len(named := sorted({model.model.name for model in held})) > 1:
            raise JaxflError(
                f"{' and '.join(named)} would both be {name}; export the clients of each into their own "
                "folder."
            )
    for name, (first, *_) in models_in.items():
        content = safetensors.save(_arrays(first), metadata=_about(models, first))
        files.write_bytes(folder / name, content)
    files.write_bytes(folder / CARD, _card(models.opened, models.folder, models_in, own).encode())
    return [folder / name for name in (*models_in, CARD)]


def _arrays(model: Deployed) -> dict[str, np.ndarray]:
    """Return {"block/layer/name": array}."""
    leaves = tree.by_path(model.weights)
    return {"/".join(path): np.asarray(leaf, order="C") for path, leaf in leaves.items()}


def _about(models: Models, model: Deployed) -> dict[str, str]:
    run = models.opened
    about = {
        "method": run.variant.label,
        "architecture": choices.without_folder(model.model.choice),
        "shape": model.images.shape,
        "dtype": str(model.images.dtype),
        "mean": _without_axes(model.images.mean),
        "std": _without_axes(model.images.std),
        "classes": model.classes.tolist(),
        "class_names": _class_names(run),
    }
    if model.images.vocabulary:
        about["vocabulary"] = model.images.vocabulary
        about["words"] = saved_partition.words(models.folder / store.PARTITION)
    if model.target:
        about["target"] = run.config["data"]["target"]
    return {name: json.dumps(value) for name, value in about.items()}


def _card(run: Opened, folder: Path, files: dict[str, list[Deployed]], own: Callable) -> str:
    """Return the card of some files, in Markdown; each file holds one model of the clients given with it."""
    config, method = run.config, run.variant.method
    options = config["options"]
    first = {}  # model of each architecture
    for models in files.values():
        first.setdefault(models[0].model.name, models[0])
    tried = {name: _bare(value) for name, value in (experiment(config) | {"seed": options["seed"]}).items()}
    any_file, (model, *_) = next(iter(files.items()))
    task = model.model.task
    kind = kind_of(model.images.shape)
    takes = {"vectors": "Vectors, as images of one pixel", "tokens": "Tokens"}.get(kind, "Images")
    of = {"vectors": "tabular", "tokens": "text"}.get(kind, "image")
    train, test = ([*map(len, part)] for part in (run.partition.train, run.partition.test))
    sees = "as the client sees them" if model.images.shifted else "as the data set has them"
    parts = [
        FRONT.format(of=of, task=task.hub),
        f"# {run.variant.label} on {tried['dataset']}",
        f"What clients deploy after round {run.record['round']} of {options['rounds']} of a federated run, "
        f"simulated with jaxfl {config['environment'].get('jaxfl', '')} (seed {options['seed']}).",
        markdown(
            [
                "file",
                "architecture",
                "clients",
                f"their {task.title} on their own test rows{', %' if task.percent else ''}",
            ],
            [
                [file, of[0].model.name, _owners(run, of), _scores([m.accuracy for m in of], task)]
                for file, of in files.items()
            ],
        ),
        f"## Method\n\n{method.name}: {method.summary}. {method.paper}".strip(),
        f"```bibtex\n{method.bibtex}\n```" if method.bibtex else "",
        f"## Data\n\n{tried['dataset']}, divided by `{tried['partition']}` (partition seed "
        f"{options['partition_seed']}) among {len(train)} clients with {span(train)} training and "
        f"{span(test)} test rows each; labels are {options['labels']}."
        + (
            f" Each client sees images of its own: `{' '.join(options['shift'])}`; "
            f'`jaxfl.load("{folder}").seen(CLIENT, rows)` makes them.'
            if options.get("shift")
            else ""
        ),
        f"## Input and output\n\n{takes} (batch, {_shape(model.images.shape)}) of {model.images.dtype}, "
        f"{sees}; {_normalised(model)}. {_outputs(model, str(tried['dataset']))}"
        + (f" Their names are, from 0 on: {_named(names)}." if (names := _class_names(run)) else ""),
        *(_architecture(of.model, of.weights) for of in first.values()),
        "## How to load",
        PLAIN.format(
            file=any_file,
            x=("tokens" if kind == "tokens" else NORMALISED) + f"  # {sees}",
            given=(', vocabulary=about["vocabulary"]' if kind == "tokens" else "")
            + (", every_token=True" if task.every_token else ""),
            precision=repr(model.model.precision),
            answer=task.code,
        )
        + _layout([of.model.choice for of in first.values()])
        if all(of.plain(partial(own, of.client)) for models in files.values() for of in models)
        else BEYOND.format(run=folder, client=model.client),
        f"## Options of the run\n\n```json\n{json.dumps(tried, indent=1)}\n```",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _class_names(run: Opened) -> list[str]:
    return run.config.get("data", {}).get("class_names", [])


def _architecture(model: Model, weights: dict) -> str:
    """Describe a model's blocks in order: shapes in and out, and arrays, BatchNorm's statistics included."""
    ends = zip(model.shapes, (*model.shapes[1:], model.output), strict=True)
    shapes = dict(zip(model.names, ends, strict=True))
    lines = []
    for block in dict.fromkeys([*model.names, *weights]):
        leaves = tree.by_path(weights.get(block, {}))
        arrays = [f"{'/'.join(path)} ({_shape(leaf.shape)})" for path, leaf in leaves.items()]
        takes, puts_out = (f"({_shape(end)})" for end in shapes.get(block, ("", "")))
        lines.append([block, takes, puts_out, ", ".join(arrays)])
    precision = "" if model.precision == "full" else f" It computes in {model.precision}."
    title = f"## Architecture {model.name}\n\n{model.size:,} parameters.{precision}"
    return f"{title}\n\n{markdown(['block', 'takes', 'puts out', 'arrays'], lines)}"


def _layout(named: list[str]) -> str:
    """Return the layout of these architectures' arrays, or where it is described."""
    own = sorted({path.name for choice in named if (path := choices.file(choice))})
    zoo = LAYOUT if any(choices.file(choice) is None for choice in named) else ""
    return zoo + (OF_FILES.format(files=", ".join(own)) if own else "")


def _owners(run: Opened, models: list[Deployed]) -> str:
    """Return the clients of a file: their ids, and the name of a single one that has a name."""
    clients, names = [model.client for model in models], run.partition.names
    return _numbers(clients) + (f" ({names[clients[0]]})" if names and len(clients) == 1 else "")


def _numbers(clients: list[int]) -> str:
    """Return client ids as ``0-4, 7``."""
    runs = []
    for client in sorted(clients):
        if runs and client == runs[-1][1] + 1:
            runs[-1][1] = client
        else:
            runs.append([client, client])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _named(names: Sequence[str]) -> str:
    """Return names in a row, with quotes where one holds a comma or white space."""
    return ", ".join(repr(name) if re.search(r"[\s,]", name) else name for name in names)


def _without_axes(moment: np.ndarray) -> list:
    """Return a mean or deviation as lists, without its leading axes of length 1."""
    return (moment[0, 0, 0] if moment.shape[:3] == (1, 1, 1) else moment[0]).tolist()


def _normalised(model: Deployed) -> str:
    if model.images.vocabulary:
        return (
            f"they are numbers below {model.images.vocabulary}, and -1 after the end of a row; of a text, "
            "`words` in the file's metadata says what each stands for"
        )
    mean, std = _list(model.images.mean), _list(model.images.std)
    if not model.images.mean.any() and (model.images.std == 1).all():
        return "they are not normalised"
    if model.images.mean.shape[1:3] != (1, 1):
        return (
            "each value is normalised as (value - mean) / std, by its own mean and std in the file's metadata"
        )
    return f"each channel is normalised as (value - mean) / std with mean {mean} and std {std}"


def _outputs(model: Deployed, dataset: str) -> str:
    mean, std = map(_list, model.target) if model.target else ("", "")
    return model.model.task.says.format(dataset=dataset, mean=mean, std=std)


def _scores(scores: list[float | None], task: Task) -> str:
    known = [score * (100 if task.percent else 1) for score in scores if score is not None]
    if not known:
        return "-"  # newcomers
    form = ".1f" if task.percent else ".4g"
    mean, low, high = (format(score, form) for score in (np.mean(known), min(known), max(known)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _shape(shape: Sequence) -> str:
    return ", ".join(map(str, shape))


def _bare(value):
    """Return an option without the folders of absolute paths, which say where the user keeps them."""
    if isinstance(value, list):
        return [*map(_bare, value)]
    return re.sub(r"(^|[=:])/[^,]*/(?=[^,])", r"\1", value) if isinstance(value, str) else value


def _list(numbers: np.ndarray) -> str:
    return ", ".join(f"{number:.6g}" for number in np.ravel(numbers))


FRONT = """\
---
library_name: jaxfl
pipeline_tag: {of}-{task}
tags: [federated-learning, personalized-federated-learning]
---
"""

PLAIN = """\
The scores are the outputs of the network with these arrays.

```python
import dataclasses
import json

import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import safe_open

from jaxfl.models import zoo

with safe_open("{file}", "numpy") as file:
    about = {{name: json.loads(text) for name, text in file.metadata().items()}}
    arrays = {{name: file.get_tensor(name) for name in file.keys()}}

x = {x}
model = zoo.build(about["architecture"], shape=tuple(about["shape"]), classes=len(about["classes"]){given})
model = dataclasses.replace(model, precision={precision})
weights = {{name: {{}} for name in model.names}} | unflatten_dict(arrays, sep="/")
scores, _ = model.apply(weights, weights, x, train=False)  # parameters and statistics: each takes its own
{answer}
```
"""

NORMALISED = '(images - np.float32(about["mean"])) / np.float32(about["std"])'

LAYOUT = f"""
Without jaxfl: in its networks images are (batch, height, width, channels) and are flattened in this order;
kernels of dense layers are (in, out), those of convolutions (height, width, in, out). BatchNorm computes
(value - mean) / sqrt(var + {BATCH_EPSILON:g}) * scale + bias; LayerNorm, of vit, adds {LAYER_EPSILON:g}.
"""

OF_FILES = """
The networks are made by {files}, from whoever trained them, which must be in the folder where this runs; the
layout of their arrays and the epsilon of their norms are described there.
"""

BEYOND = """\
The method does more with these arrays than pass images through the network once, so they cannot predict
without the run. If it has arrays that are not weights of the network's blocks, the files lack them. A block
with several weights has them as `classifier`, `classifier-2`, in the order in which they are applied.


```python
import jaxfl

labels = jaxfl.load("{run}").models[{client}].predict(images)
```
"""
