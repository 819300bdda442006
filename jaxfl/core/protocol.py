"""The vocabulary of jaxfl: cohorts, predictors, a round's report and the algorithm protocol.

A *federation* has one group per architecture. Whatever belongs to clients is stacked: a leaf of group
``g`` is ``(n_g, ...)`` for all its clients, ``(k_g, ...)`` for those of a cohort. Whatever differs per
group is a tuple with one entry per group, in the federation's order.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax

from jaxfl.config.options import static
from jaxfl.data.federation import PerGroup

Key = jax.Array  # a typed key, `jax.random.key`
Array = Any  # a JAX array, or a NumPy array that is an argument of a program
BYTES_PER_SCALAR = 4  # of messages: float32 or int32
State = Any  # an algorithm's own NamedTuple of pytrees
WIRE = ("messages", "mean", "memory", "rows")  # what of the wire a method takes, see `Algorithm.wire`


class Slots(NamedTuple):
    """A selection of one group's clients in a fixed number ``k`` of places.

    Args:
      index: (k,) int32, positions within the group; one past the last client where a place is empty.
      mask: (k,) bool, True where the place is taken.
    """

    index: Array
    mask: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohort:
    """The clients of a round, and the round's number, which warm-ups and schedules read."""

    round: Array  # () int32, from 0
    groups: PerGroup  # of Slots
    rounds: int = static()  # of the whole run
    among_all: bool = static(default=False)  # models are mixed among all: to score, or to join
    alone: bool = static(default=False)  # one group of several, see `jaxfl.mechanisms.each_architecture`

    def only(self, g: int) -> "Cohort":
        """Return the cohort of one group."""
        return dataclasses.replace(self, groups=(self.groups[g],), alone=True)

    @property
    def slots(self) -> Slots:
        """The clients of the only group."""
        (slots,) = self.groups
        return slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictor:
    """The models of one group's clients. A shared model is not copied per client.

    Args:
      shared: leaves that all clients use.
      stacked: leaves ``(k, ...)``, one entry per client.
      predict: ``(model, shared, own, x) -> scores (B, outputs)``; the largest score is the prediction.
    """

    shared: Any
    stacked: Any
    predict: Callable = static()


class Info(NamedTuple):
    """What a round reports. Nothing here is read by the next round.

    What is per group is the group's own, without a tuple, in a method of `each_architecture`.

    Args:
      loss: per group (k,), mean training loss of each client over the steps of its last local phase; empty
        of a host step.
      up: per group (k,) int32, scalars (4 bytes each) that each client sent. Or, where a sum may not fit an
        int32, {scalars of a message: (k,) int32, how many such messages it sent}.
      down: per group what each client received, in one of the same two forms.
      findings: the method's own measurements, {panel: {line: ()}}: numbers that are logged every round, and
        drawn as one panel of lines each. A host step may add entries of any JSON form.
      trained: per group a `Predictor` of the cohort's models right after local training, before averaging.
        It is scored on request, and costs nothing otherwise.
      teacher: per group a `Predictor` of what teaches the cohort's clients, such as a mixture of their
        models; NaN of a client that has no teacher. Scored on these clients' rows, as `trained`. Of a host
        step {client id: ``images (n, ...) -> scores (n, outputs)``}.
      idle: per group (k_g,) bool, clients of the cohort that did not train: their loss is left out. None if
        all trained.
    """

    loss: PerGroup | Array
    up: PerGroup | Array
    down: PerGroup | Array
    findings: dict = {}
    trained: PerGroup | Predictor | None = None
    teacher: PerGroup | Predictor | dict[int, Callable] | None = None
    idle: PerGroup | Array | None = None


def messages(counts) -> dict:
    """The counts of one group, see `Info.up`, as {scalars of a message: (k,) messages}."""
    return counts if isinstance(counts, dict) else {1: counts}


class Init(Protocol):
    """The state before the first round."""

    def __call__(self, key: Key, federation: Any, hyper: Any) -> State:
        """`hyper` is the method's configuration with its floats as traced scalars; the state carries it."""
        ...


class Step(Protocol):
    """One round, pure and scannable: `State` in, `State` of the same structure out."""

    def __call__(self, key: Key, state: State, federation: Any, cohort: Cohort) -> tuple[State, Info]:
        """`key` is the round's; a client's own key is folded from it with the client's id."""
        ...


class Predict(Protocol):
    """The models of some clients at some moment, one `Predictor` per group."""

    def __call__(self, key: Key, state: State, federation: Any, cohort: Cohort) -> Any:
        """`cohort` holds the clients to build; all are scored in slices, with `cohort.among_all` set."""
        ...


class Averaged(NamedTuple):
    """Fields of the state in a method whose server only averages, so that a client can play alone."""

    sent: str  # name of the field, per group, that all clients receive, train and send back
    kept: str  # name of the field, per group (n_g, ...), that each client keeps
    by_rows: bool  # whether the mean is weighted by training rows; else it is uniform
    step: Callable  # the round that this describes; an algorithm with another step may do something else


class Algorithm(NamedTuple):
    """A federated method as pure functions: options that select a program are closed over, the rest is state.

    Args:
      init: the state before the first round.
      receive: the models from which clients start a round, before local training.
      step: one round.
      personal: the models that clients deploy; these are scored. It may fine-tune a copy.
      host: a step between rounds outside of jit, after `step` with the same cohort; its `Info` adds to
        the round's traffic. None for most methods. It must keep everything in the state: nothing else is
        saved.
      matrices: ``state -> {name: (N, N)}``, a number for each pair of clients, by their ids. Saved with every
        checkpoint and drawn. None for most methods.
      embeddings: ``state -> per group (n_g, d)``, a vector for each client. Saved and drawn like matrices.
        None for most methods.
      prepare: a phase before the first round, with a cohort of all clients except newcomers: pre-training, or
        a pass over all clients. Its traffic and operations count for the first round. None for most methods.
      averaged: of a method whose server only averages and has no memory. None for all other methods.
      wire: what of `jaxfl.mechanisms.wire` its rounds pass through, some of `WIRE`: clients' messages go
        through `sent`; the server's mean is the wire's, `averaged`; the state holds what clients owe and an
        adaptive clip norm; and all that is made of training rows, except their number and what is reported,
        are steps of `descend` on `own_rows`, whose noise protects them. Options that need more are refused.
    """

    init: Init
    receive: Predict
    step: Step
    personal: Predict
    host: Step | None = None
    matrices: Callable[[State], dict[str, jax.Array]] | None = None
    embeddings: Callable[[State], PerGroup] | None = None
    prepare: Step | None = None
    averaged: Averaged | None = None
    wire: tuple[str, ...] = ()


class Method(NamedTuple):
    """A method as users see it: its name, its options, how to build it and what to cite.

    Args:
      name: on the command line and in tables.
      build: ``config -> Algorithm``.
      config: frozen dataclass, a subclass of `jaxfl.core.training.Training`. Its float fields are traced
        hyper-parameters, all others select a program.
      summary: one line; by default the first of the file's docstring, after the name.
      paper: authors, year and where to find it; by default the first sentence after that.
      bibtex: BibTeX entries; by default those of references.bib.
      needs: names of what the method requires: "public" images, "validation" rows, "links" between clients,
        equally many "features" in all networks. If the user chose none, the command provides them. Or
        "classes": the method refuses data for another task.
        ``config -> names`` where it depends on options.
      pictures: the method's own pictures, file name -> ``findings of the last round -> figure``.
    """

    name: str
    build: Callable[[Any], Algorithm]
    config: type
    summary: str = ""
    paper: str = ""
    bibtex: str = ""
    needs: Collection[str] | Callable[[Any], Collection[str]] = ()
    pictures: Mapping[str, Callable[[dict], Any]] = MappingProxyType({})
