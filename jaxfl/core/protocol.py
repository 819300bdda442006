"""The words that the rest of jaxfl speaks: clients, cohorts, predictors and the algorithm protocol.

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
Array = Any  # of JAX, or of NumPy before a program is given it
BYTES_PER_SCALAR = 4  # of what clients send
State = Any  # an algorithm's own NamedTuple of pytrees


class Slots(NamedTuple):
    """Some clients of one group, in a fixed number of places ``k``.

    Args:
      index: (k,) int32, positions within the group; one past the last client where a place is empty.
      mask: (k,) bool, True where the place is taken.
    """

    index: Array
    mask: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cohort:
    """Who takes part in a round, and which round it is (warm-ups and schedules read it here)."""

    round: Array  # () int32, from 0
    groups: PerGroup  # of Slots
    rounds: int = static()  # of the whole run
    part: bool = static(default=False)  # whether others matter, too: as clients are scored in parts, or join


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Predictor:
    """How the clients of one group predict. A shared model is not copied per client.

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

    Args:
      loss: per group (k,), mean training loss of each client over the steps of its last local phase; empty
        of a host step.
      up: per group (k,) int32, scalars (4 bytes each) that each client sent. Where it sends so often
        that these may exceed an int32, {scalars of a message: (k,) int32, how many messages}.
      down: per group the same of what each client received.
      findings: what the method itself finds out, {panel: {line: ()}}: numbers that are written down every
        round and drawn as one panel of lines each. A host step may add entries of any JSON form.
      trained: per group a `Predictor` of the cohort's models as local training left them, before anything is
        averaged. It is scored where somebody asks for it, and costs nothing otherwise.
      idle: per group (k_g,) bool, clients that trained nothing in the round: their loss is left out. None
        where everybody trains.
    """

    loss: PerGroup
    up: PerGroup
    down: PerGroup
    findings: dict = {}
    trained: PerGroup | None = None
    idle: PerGroup | None = None


def messages(counts) -> dict:
    """The counts of one group, see `Info.up`, as {scalars of a message: (k,) messages}."""
    return counts if isinstance(counts, dict) else {1: counts}


class Init(Protocol):
    """The state before the first round."""

    def __call__(self, key: Key, federation: Any, hyper: Any) -> State:
        """`hyper` is the method's configuration, its float fields traced scalars: the state carries it."""
        ...


class Step(Protocol):
    """One round, pure and scannable: `State` in, `State` of the same structure out."""

    def __call__(self, key: Key, state: State, federation: Any, cohort: Cohort) -> tuple[State, Info]:
        """`key` is the round's; a client's own key is folded from it with the client's id."""
        ...


class Predict(Protocol):
    """The models that the given clients hold at some moment, one `Predictor` per group."""

    def __call__(self, key: Key, state: State, federation: Any, cohort: Cohort) -> PerGroup:
        """`cohort` says which clients to build; all clients are scored in parts, with `cohort.part` set."""
        ...


class Averaged(NamedTuple):
    """What a server averages that does nothing else: a client's round is then its own affair.

    Args:
      sent: the field of the state, per group, of what all clients receive, and send as they have trained it.
      kept: the field, per group (n_g, ...), of what each client keeps.
      by_rows: whether the mean is by training rows, rather than uniform.
      step: the round of which this holds: an algorithm that replaces it may do something else.
    """

    sent: str
    kept: str
    by_rows: bool
    step: Callable


class Algorithm(NamedTuple):
    """A federated method: pure functions; what selects a program is closed over, the rest is state.

    Args:
      init: the state before the first round.
      receive: what clients start a round from, before local training.
      step: one round.
      personal: what clients deploy; this is scored. It may fine-tune a copy.
      host: a step between rounds outside of jit, after `step` with the same cohort; its `Info` adds to
        the round's traffic. None for most methods. What it keeps must be in the state: nothing else is
        saved.
      matrices: ``state -> {name: (N, N)}``, what the method knows about pairs of clients, by their ids. They
        are saved with every checkpoint and drawn. None for most methods.
      embeddings: ``state -> per group (n_g, d)``, a vector for each client. Saved and drawn as matrices are.
        None for most methods.
      prepare: a phase before the first round, with a cohort of all clients but newcomers: pre-training, a
        pass over all clients. What it sends and computes counts for the first round. None for most methods.
      averaged: where the server does nothing but average, and remembers nothing, what it averages. None for
        all other methods.
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


class Method(NamedTuple):
    """A method as users meet it: a name, its options, how to build it, and whom to cite.

    Args:
      name: on the command line and in tables.
      build: ``config -> Algorithm``.
      config: frozen dataclass, a subclass of `jaxfl.core.training.Training`. Its float fields are traced
        hyper-parameters, all others select a program.
      summary: one line.
      paper: authors, year and where to find it.
      bibtex: the same for a bibliography.
      needs: ``config -> names`` of what the method cannot do without: "public" images, "validation" rows,
        "links" between clients.
        Where the user chose none, the command provides them.
      pictures: file name -> ``findings of the last round -> figure``, what the method draws itself.
    """

    name: str
    build: Callable[[Any], Algorithm]
    config: type
    summary: str
    paper: str = ""
    bibtex: str = ""
    needs: Callable[[Any], Collection[str]] = lambda config: ()
    pictures: Mapping[str, Callable[[dict], Any]] = MappingProxyType({})
