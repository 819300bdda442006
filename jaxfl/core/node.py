"""One client's part of a run, for methods whose server only averages.

It is the engine's round of a federation with no other client. After such a round the shared leaves are the
mean over one client, which is what the client sends.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.core import tree
from jaxfl.core.cohorts import these_clients
from jaxfl.core.engine import evaluate
from jaxfl.core.protocol import Averaged
from jaxfl.core.rounds import Conditions, Programs
from jaxfl.core.schedule import factors
from jaxfl.core.streams import streams
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError

Arrays = dict[str, np.ndarray]  # leaves by their paths, such as params/conv1/conv/kernel


class Trained(NamedTuple):
    """Results of a client's round.

    Args:
      sent: what the server averages.
      kept: what the client keeps until its next round.
      loss: mean training loss over the steps of its last local phase.
    """

    sent: Arrays
    kept: Arrays
    loss: float


class Scored(NamedTuple):
    """A client's score on its test rows by its task, see `jaxfl.tasks.Task.each`, and their number."""

    value: float
    rows: int


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A single client."""

    programs: Programs
    averaged: Averaged  # what its server averages
    federation: Federation  # of only this client, see `jaxfl.data.one_client.of_one_client`
    state: Any  # of the method in this federation
    run_key: Any  # of the run, which decides the client's batches
    schedule: str  # of the run's learning rates, see `jaxfl.core.schedule`

    @property
    def weight(self) -> int:
        """Weight of this client in the server's average."""
        return int(self.federation.groups[0].size[0]) if self.averaged.by_rows else 1

    @property
    def kept(self) -> Arrays:
        """Arrays that the client keeps before its first round."""
        return kept_by(self.averaged, self.state, 0)

    def train(self, sent: Arrays, kept: Arrays, t: int, rounds: int) -> Trained:
        """Run round `t`, from 0, of `rounds`, given what the server sends and what the client has kept.

        Raises:
          JaxflError: if these are not the arrays of this method and network.
        """
        cohort = these_clients(self.federation, [np.ones(1, bool)], rounds, t)
        cohort = jax.tree.map(lambda leaf: np.asarray(leaf)[None], cohort)
        rate = factors(self.schedule, rounds)
        conditions = Conditions(None if rate is None else rate[t : t + 1])
        state = jax.tree.map(jnp.copy, self._with(sent, kept))  # it is donated
        key = streams(self.run_key).rounds
        state, reports = self.programs.rounds(key, state, self.federation, cohort, None, conditions)
        loss = float(reports.info.loss[0][0, 0])
        return Trained(sent_to_all(self.averaged, state), kept_by(self.averaged, state, 0), loss)

    def score(self, sent: Arrays, kept: Arrays, t: int, rounds: int) -> Scored:
        """Score what the client deploys after round `t` on its test rows; arguments are those of `train`."""
        state, key = self._with(sent, kept), streams(self.run_key).scores
        (score,) = evaluate(self.programs, self.federation, state, key, t, rounds)["personal"]
        rows = int(self.federation.groups[0].test_size[0])
        return Scored(float(self.federation.task.each(score.test)[0]) if rows else 0.0, rows)

    def _with(self, sent: Arrays, kept: Arrays) -> Any:
        """Return the state with these leaves."""
        given = {self.averaged.sent: sent, self.averaged.kept: kept}
        return self.state._replace(
            **{field: (_like(getattr(self.state, field)[0], arrays),) for field, arrays in given.items()}
        )


def sent_to_all(averaged: Averaged, state: Any) -> Arrays:
    """Return what the server of one architecture sends."""
    return _named(getattr(state, averaged.sent)[0])


def kept_by(averaged: Averaged, state: Any, place: int) -> Arrays:
    """Return what the client at a place of the only group keeps."""
    return _named(jax.tree.map(lambda leaf: leaf[place], getattr(state, averaged.kept)[0]))


def of_client(averaged: Averaged, state: Any, place: int) -> Any:
    """Return the state of a federation with only the client at this place of the only group."""
    (kept,) = getattr(state, averaged.kept)
    return state._replace(**{averaged.kept: (jax.tree.map(lambda leaf: leaf[place][None], kept),)})


def _named(leaves: Any) -> Arrays:
    """Return the leaves of a tree by their paths, as NumPy arrays."""
    return {"/".join(path): np.asarray(leaf) for path, leaf in tree.by_path(leaves).items()}


def _like(leaves: Any, arrays: Arrays) -> Any:
    """Put arrays in the places of the leaves with the same names."""
    sizes = {name: leaf.size for name, leaf in _named(leaves).items()}
    given = {name: np.size(array) for name, array in arrays.items()}
    if sizes != given:
        apart = sorted(name for name, _ in sizes.items() ^ given.items())
        raise JaxflError(
            f"The arrays of a round are not those of the run: {apart[0]} differs; give the server and all "
            "clients the same run."
        )

    def found(path, leaf):
        return jnp.asarray(arrays["/".join(tree.names(path))], leaf.dtype).reshape(leaf.shape)

    return jax.tree.map_with_path(found, leaves)
