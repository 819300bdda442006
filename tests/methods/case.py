"""The form of a method's case; `methods.cases` explains what it states."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from conftest import CLASSES, SHAPE, tiny_cnn

from jaxfl.models import zoo
from jaxfl.models.blocks import DenseBlock
from jaxfl.models.build import plain_cnn
from methods import recording


def on_batch_norm(model):
    """Return a model with BatchNorm under its name in `reference.nets`."""
    return dataclasses.replace(model, name=f"{model.name} of BatchNorm")


SMALL = zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=4)
NORMALISED = on_batch_norm(zoo.mlp(shape=SHAPE, classes=CLASSES, hidden=5, norm="batch"))
CONVOLVING = on_batch_norm(tiny_cnn("cnn", norm=True))
TWO_LAYERS, THREE_LAYERS = (  # they begin with the layer of NORMALISED
    plain_cnn(name, [], [DenseBlock(5, norm=True)] * depth, shape=SHAPE, classes=CLASSES)
    for name, depth in [("two layers", 2), ("three layers", 3)]
)
ALIKE = ((NORMALISED, 5),)
UNLIKE = ((SMALL, 3), (NORMALISED, 2))


class Comparison(NamedTuple):
    """One way of running a method against its reference.

    Args:
      options: of the method, in addition to `test_reference.TRAINING`.
      mistakes: pairs (option, another value) with which the reference must disagree.
      models: of the federation, pairs (model, clients), with names of `reference.nets.NETS`. By default one
        architecture with BatchNorm, for methods that keep architectures apart; others compare `UNLIKE` ones.
      cohorts: seed of the cohorts. The default's are described by
        `test_cohorts_ask_something_of_every_comparison`; another serves where a mistake shows only by chance,
        in a draw or a vote, or where rounding is enlarged.
    """

    options: dict = {}
    mistakes: tuple | list = ()
    models: tuple = ALIKE
    cohorts: int = 182


def local_statistics(*mistakes, models=ALIKE, **options) -> Comparison:
    """Return a comparison in which BatchNorm's running statistics are never sent.

    Args:
      *mistakes: see `Comparison`.
      models: of the federation.
      **options: of the method.
    """
    return Comparison(options | {"bn_stats": "local"}, mistakes or [("momentum", 0.51)], models)


class Case(NamedTuple):
    """The tests' knowledge of one method.

    Args:
      method: its name.
      start: ``(clients, initial, options) -> state``, the reference's state before the first round.
      step: ``(state, clients, cohort, options) -> state, {client: mean training loss}``; of a method that
        reports what teaches clients, also {client: its teacher's scores of ``cohort.x``}.
      scores: ``(state, clients, draws, options, x) -> {"received": [...], "deployed": [...]}``, logits of
        every client before and after its personalisation.
      traffic: ``(model, models, t) -> scalars`` that a client with this model sends and receives in round t,
        or a pair where these differ; where clients differ, functions of their ids. `models`
        are those of the federation. None where it depends on chance; then a reduction counts it.
      draws: ``(key, client, models, options) -> what a client draws in a round``.
      draws_before_use: the same for predicting.
      draws_of_server: ``(key of the round, options) -> what the server draws in it``.
      view: ``(state, federation, t) -> jaxfl's state`` in the form of the reference's.
      prepare: ``(state, clients, draws, options, rounds) -> state`` after the phase before the first round.
      draws_of_preparation: ``(key, clients, options, rounds) -> draws`` for it.
      given: ``(state, federation) -> state``, adds what the server's step between rounds would have left.
      images: ``(key of the run, key of the round, federation, options) -> rows``, a round's public images.
      comparisons: by their names. The first runs with every change, and on four devices.
      short: options with which the method does everything it does within a few rounds of tiny clients.
      traffic_rates: other rates for counting traffic, where it depends on chance under the default ones.
      idle_rates: float options that have no effect in `test_protocol`; a comment says why.
      returns: whether a client that is alone in a round gets back, or deploys, the model that it has trained.
        False where the server does more than average, or clients are taught after training.
      all_clients: whether a round uses more clients than its cohort; it is refused where the others are
        unavailable.
      reductions: functions without arguments that compare it with another method, see `methods.rounds`.
    """

    method: str
    start: Callable
    step: Callable
    scores: Callable
    traffic: Callable | None
    draws: Callable = recording.phases(train="epochs")
    draws_before_use: Callable = recording.phases()
    draws_of_server: Callable = lambda key, options: None
    view: Callable = recording.sharing
    prepare: Callable = lambda state, clients, draws, options, rounds: state
    draws_of_preparation: Callable = lambda key, clients, options, rounds: None
    given: Callable = lambda state, federation: state
    images: Callable = lambda init_key, round_key, federation, options: federation.public[:0]
    comparisons: dict[str, Comparison] = {"": Comparison()}
    short: dict[str, Any] = {}
    traffic_rates: dict[str, float] = {}
    idle_rates: Collection[str] = ()
    all_clients: bool = False
    returns: bool = True
    reductions: tuple[Callable, ...] = ()
