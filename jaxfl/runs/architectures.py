"""The network architecture of each client."""

import dataclasses

from jaxfl.config import choices
from jaxfl.config.setup import Setup
from jaxfl.data.federation import Federation, PerGroup
from jaxfl.data.generators import DEVICES, generator
from jaxfl.data.partition import Partition
from jaxfl.data.sources import kind_of, of_vectors
from jaxfl.errors import JaxflError
from jaxfl.machine.clock import of_clients, profile
from jaxfl.models import zoo
from jaxfl.models.model import Model
from jaxfl.tasks import CLASSES, Task


def build_models(
    setup: Setup,
    shape: tuple[int, ...],
    partition: Partition,
    task: Task = CLASSES,
    vocabulary: int = 0,
) -> tuple[tuple[Model, int], ...]:
    """Build pairs (model, number of clients) in the order of client ids.

    The models are for examples of a shape, (H, W, C) of an image or (T,) of tokens, of a vocabulary.

    Raises:
      JaxflError: if there is no such network, two are the same, or the numbers of clients do not add up.
    """
    named, counts = _architectures(setup, shape, len(partition.train))
    built = []
    for choice in named:
        name, texts = choices.split(choice)
        outputs = {"classes": partition.outputs, "every_token": task.every_token}
        model = zoo.build(choice, shape=shape, vocabulary=vocabulary, **outputs)
        base, some_options, _ = model.name.partition(",")
        # A name that shows an option, or is one of several with the same base, shows all that were given.
        if some_options or sum(choices.split(other)[0] == name for other in named) > 1:
            model = dataclasses.replace(model, name=choices.join(base, texts))
        how = {"precision": setup.run.precision, "convolution": setup.machine.convolution}
        built.append(dataclasses.replace(model, task=task, choice=choice, **how))
    if len({model.name for model in built}) < len(built):
        raise JaxflError("--models names one architecture twice; name it once, with clients=NUMBER.")
    return tuple(zip(built, _divide_clients(counts, len(partition.train)), strict=True))


def _architectures(setup: Setup, shape: tuple[int, ...], clients: int) -> tuple[list[str], list[str | None]]:
    """Return the model choices for examples of a shape, and the number of clients of each, None if not given.

    There are no more default models than clients.
    """
    named, counts = [], []
    for choice in setup.run.models or ("default",):
        name, texts = choices.split(choice)
        count = texts.pop("clients", None)
        for one in _by_default(shape)[:clients] if name == "default" else (name,):
            counts.append(count)
            named.append(choices.join(one, texts))
    return named, counts


def clients_of_each(setup: Setup, shape: tuple[int, ...], clients: int) -> list[int]:
    """Return the number of clients of each architecture, in the order of client ids, see `build_models`."""
    return _divide_clients(_architectures(setup, shape, clients)[1], clients)


def client_devices(setup: Setup, federation: Federation) -> PerGroup | None:
    """Return every client's device, per group with leaves (n_g,); None if they are not known.

    Raises:
      JaxflError: see `jaxfl.machine.clock.profile`; an architecture may be named as in `--models`.
    """
    models = federation.models
    names = {model.name: {model.choice, choices.without_folder(model.choice)} for model in models}
    known = profile(setup.run.device_profile, names)
    if known is None:
        return None
    devices, sizes = [known[model.name] for model in models], [len(group.id) for group in federation.groups]
    rng = generator(setup.partition.partition_seed, DEVICES)
    return of_clients(devices, sizes, setup.run.device_spread, rng)


def _by_default(shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return two default architectures that suit images or windows (H, W, C), or tokens (T,)."""
    if kind_of(shape) == "tokens":
        return "transformer", "gru"
    if of_vectors(shape):
        return "mlp", "mlp,hidden=50"
    if shape[0] == 1:
        return "mlp", "harcnn" if shape[1] > 27 else "mlp,hidden=50"
    return ("mlp", "mcmahan,padding=same") if min(shape[:2]) < 16 else ("lenet5", "mcmahan")


def _divide_clients(counts: list[str | None], clients: int) -> list[int]:
    if any(count is not None and not (count.isdecimal() and int(count)) for count in counts):
        raise JaxflError("--models: clients= takes a whole number from 1 up.")
    open_places = [i for i, count in enumerate(counts) if count is None]
    left = clients - sum(int(count) for count in counts if count is not None)
    if left < len(open_places) or (left and not open_places):
        raise JaxflError(
            f"--models cannot be given to {clients} clients: every architecture needs at least one, and "
            "the numbers must add up; change clients=NUMBER or --clients."
        )
    share, rest = divmod(left, max(1, len(open_places)))
    return [
        share + (open_places.index(i) < rest) if count is None else int(count)
        for i, count in enumerate(counts)
    ]
