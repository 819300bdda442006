"""The wire of a run, made from its options."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config import choices
from jaxfl.config.options import declared, static
from jaxfl.config.own_code import line_of, own_code, require_call
from jaxfl.config.setup import Setup
from jaxfl.core import tree
from jaxfl.data.federation import Client, Federation
from jaxfl.data.partition import rounded_down
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.wire.accounting import Accounting, least_noise
from jaxfl.mechanisms.wire.aggregation import AGGREGATORS, NormBound, of_finite
from jaxfl.mechanisms.wire.attacks import ATTACKS, Attackers, Backdoor, draw_attackers
from jaxfl.mechanisms.wire.compression import COMPRESSIONS, Feedback
from jaxfl.mechanisms.wire.messages import away, with_known
from jaxfl.mechanisms.wire.privacy import MECHANISMS, Gaussian, Rows
from jaxfl.tasks import require_classes

COMMON = (ATTACKS, Attackers), (COMPRESSIONS, Feedback)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """A function of the user's with its options, in place of an instance of a class of options.

    Args:
      function: of a key and a change, or of messages and their weights.
      options: by name.
      form: what it must return has the form of, given the same arguments.
    """

    function: Callable = static()
    options: tuple[tuple[str, Any], ...] = static()
    form: Callable = static()

    def __call__(self, *arguments):
        """Call it.

        Raises:
          JaxflError: if its result has another form, naming its line.
        """
        with own_code(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            made = self.function(*arguments, **dict(self.options))
        if wrong := tree.unlike(jax.tree.map(jnp.asarray, made), self.form(*arguments)):
            raise JaxflError(
                f"{line_of(self.function)}: {self.function.__name__} returns {wrong.strip()} in a message; "
                "it must keep its form."
            )
        return made

    def scalars(self, form) -> int:
        """Count a message of floats."""
        return tree.scalars(form)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wire:
    """What happens to messages in a run, see `jaxfl.mechanisms.wire`; None where nothing does.

    Args:
      attackers: (N,) bool, by id.
      expected: (groups,) float, the number of clients of a round on average.
      attack: what attackers do, see `attacks`.
      compress: see `compression`.
      privacy: of clients, see `privacy`.
      rows: privacy of their training rows.
      aggregate: of a server that needs all messages at once, see `aggregation`.
      bound: the largest norm of a change, which the server scales down on its arrival.
      feedback: whether clients send later what compression has lost (error feedback).
    """

    attackers: jax.Array
    expected: jax.Array
    attack: Any = None
    compress: Any = None
    privacy: Gaussian | None = None
    rows: Rows | None = None
    aggregate: Any = None
    bound: jax.Array | None = None
    feedback: bool = static(default=False)

    @property
    def adapts(self) -> bool:
        """Whether the clip norm follows the norms of changes."""
        return self.privacy is not None and self.privacy.adapt is not None

    def clipping(self, clip, number: int) -> "Wire":
        """Return the wire of a round in which one architecture's clip norm is `clip` ()."""
        assert self.privacy
        return dataclasses.replace(self, bound=clip, privacy=self.privacy.at(clip, self.expected[number]))

    @property
    def lies(self) -> bool:
        """Whether attackers send something else than what they have computed."""
        return callable(self.attack)

    @property
    def poison(self) -> Any:
        """The attack if it changes mini-batches of attackers' training rows, else None."""
        return self.attack if hasattr(self.attack, "images") else None

    def relabelled(self, clients: Client) -> Client:
        """Return clients, one or several, with the labels that attackers give to all their rows."""
        if not hasattr(self.attack, "relabelled"):
            return clients
        lies = self.attackers.at[clients.id].get(mode="fill", fill_value=False)[..., None]
        flipped = self.attack.relabelled(clients.relabel, clients.model.classes)
        return dataclasses.replace(
            clients,
            relabel=jnp.where(lies, flipped, clients.relabel),
            class_counts=jnp.where(lies, clients.class_counts[..., ::-1], clients.class_counts),
        )

    @property
    def has_backdoor(self) -> bool:
        """Whether attackers teach a trigger, whose success is scored."""
        return hasattr(self.attack, "stamped")

    def tried_out(self, federation: Federation) -> Federation:
        """Return the federation as a backdoor is tried out: test rows of other classes, all with the trigger.

        The target is then the right answer.
        """
        target = self.attack.target

        def of_group(group):
            real = jnp.arange(group.test_rows.shape[1], dtype=jnp.int32)[None] < group.test_size[:, None]
            other = real & (federation.labels[group.test_rows] != target)
            order = jnp.argsort(~other, axis=1, stable=True)
            rows = jnp.take_along_axis(group.test_rows, order, 1)
            sizes = other.sum(1, dtype=jnp.int32), jnp.zeros_like(group.validation_size)
            return dataclasses.replace(group, test_rows=rows, test_size=sizes[0], validation_size=sizes[1])

        return dataclasses.replace(
            federation,
            labels=jnp.full_like(federation.labels, target),
            groups=tuple(map(of_group, federation.groups)),
            trigger=self.attack,
        )

    def is_attacker(self, client: Client) -> jax.Array:
        """Return whether a client is an attacker, () bool."""
        return self.attackers.at[client.id].get(mode="fill", fill_value=False)

    def trusted(self, messages, weights, known):
        """Return what the server makes of messages (k, ...), one per client, and which it leaves out (k,).

        Weights are (k,) float, 0 in an empty place; for what the server knows of a message already see
        `away`.
        """
        if not isinstance(self.aggregate, Own):  # these give the same for messages as for changes
            return of_finite(self.aggregate, messages, weights)
        changes = away(messages, jax.tree.map(lambda leaf: leaf[None], known))
        change, left_out = of_finite(self.aggregate, changes, weights)
        return with_known(jnp.add, known, change), left_out


class Chosen(NamedTuple):
    """What a setup puts on the wire; None for nothing, see `Wire`."""

    attack: Any
    share: float
    compress: Any
    feedback: bool
    privacy: Gaussian | None
    rows: Rows | None
    server: Any


def chosen_of(setup: Setup) -> Chosen:
    """Return what a setup puts on the wire.

    Raises:
      JaxflError: if a choice is unknown or contradicts another option.
    """
    options, message = setup.wire, ("key", "change")
    attack, share = _chosen("attack", ATTACKS, options.attack, message, Attackers)
    compress, feedback = _chosen("compression", COMPRESSIONS, options.compress, message, Feedback)
    protects, _ = _chosen("privacy", MECHANISMS, options.privacy, message)
    privacy, rows = (None, protects) if isinstance(protects, Rows) else (protects, None)
    server, _ = _chosen("server", AGGREGATORS, options.aggregate, ("messages", "weights"), nothing="mean")
    if privacy and privacy.where == "server" and server:
        raise JaxflError(
            f"--privacy {options.privacy} adds noise to a sum, but --aggregate {options.aggregate} takes "
            "none; leave one of them out, or let clients add the noise: --privacy gaussian,where=client."
        )
    if privacy and privacy.where == "client" and privacy.adapt is not None:
        raise JaxflError(
            f"--privacy {options.privacy} adapts the clip norm, for which the server adds the noise; leave "
            "out adapt or where=client."
        )
    adapting = {"rate", "count_noise"} & choices.split(options.privacy)[1].keys()
    if privacy and privacy.adapt is None and adapting:
        raise JaxflError(
            f"--privacy {options.privacy}: {min(adapting)} is of a clip norm that adapts; add adapt=0.5, or "
            "leave it out."
        )
    target = options.target_epsilon
    if target is not None and rows:
        raise JaxflError(
            f"--target-epsilon {target:g} chooses the noise of --privacy gaussian; that of rows depends on "
            "the method's steps and the clients' rows, so write it: --privacy rows,clip=1,noise=1."
        )
    if target is not None and (not privacy or "noise" in choices.split(options.privacy)[1]):
        raise JaxflError(
            f"--target-epsilon {target:g} chooses the noise of --privacy; add --privacy gaussian,clip=1, "
            "without noise."
        )
    if privacy and (setup.run.dropout or setup.run.deadline):
        raise JaxflError(
            "--privacy counts on who takes part in a round, and with --dropout or --deadline answers are "
            "lost; leave one of them out."
        )
    return Chosen(attack, share, compress, feedback, privacy, rows, server)


def _chosen(
    kind: str,
    table: Mapping[str, Any],
    choice: str,
    arguments: Sequence[str],
    common: type | None = None,
    nothing: str = "none",
) -> tuple[Any, Any]:
    """Return what a choice names, with its options, and the value of an option that all of its kind have.

    None and the default for the choice of nothing.
    """
    (every,) = declared(common).values() if common else (None,)
    if choice == nothing:
        return None, every and every.default
    name, asked = choices.split(choice)
    found = choices.lookup(kind, table, name)
    values = choices.convert(name, declared(found) | ({every.name: every} if every else {}), asked)
    shared = every and values.pop(every.name, every.default)
    if isinstance(found, type):
        return found(**values), shared
    if every and every.name in declared(found):
        raise JaxflError(f"{choice}: {every.name} is an option of every {kind}; give your own another name.")
    require_call(name, found, *arguments, **values)
    form = _second if arguments[0] == "key" else _one
    return Own(found, tuple(values.items()), form), shared


def _second(key, change):
    return change


def _one(messages, weights):
    return tree.one(messages)


WITHOUT = {  # why an option is refused, by the part of `Algorithm.wire` that a method lacks
    "messages": "changes what clients send, but the method's messages do not pass through it",
    "mean": "is for a server that averages clients of one architecture, but the method's does something else",
    "rows": "protects what clients learn from the gradients of single rows, but the method learns from rows "
    "in other ways, too",
    "memory": "remembers something from round to round, but the method's state has no place for it",
}


def needed_of(setup: Setup) -> dict[str, str]:
    """Return which of `WITHOUT` a method must pass through, by option as it was written."""
    chosen, options, needed = chosen_of(setup), setup.wire, {}
    if callable(chosen.attack):
        needed[f"--attack {options.attack}"] = "messages"
    if chosen.compress is not None:
        needed[f"--compress {options.compress}"] = "memory" if chosen.feedback else "messages"
    if privacy := chosen.privacy:
        of_server = "mean" if privacy.adapt is None else "memory"
        needed[f"--privacy {options.privacy}"] = of_server if privacy.where == "server" else "messages"
    if chosen.rows:
        needed[f"--privacy {options.privacy}"] = "rows"
    if chosen.server is not None:
        needed[f"--aggregate {options.aggregate}"] = "mean"
    return needed


def wire_of(setup: Setup, federation: Federation, images: np.ndarray | None = None) -> Wire | None:
    """Return the wire of a run; None if nothing happens on it.

    Attacks that change images need them, raw.

    Raises:
      JaxflError: if a choice is unknown, contradicts another one, or does not fit the data.
    """
    chosen = chosen_of(setup)
    attack: Any = chosen.attack
    privacy, rows, server = chosen.privacy, chosen.rows, chosen.server
    if all(each is None for each in (attack, chosen.compress, privacy, rows, server)):
        return None
    if attack is not None and not callable(attack):  # it changes what attackers train on
        _require_fitting(setup.wire.attack, attack, federation)
    if images is not None and isinstance(attack, Backdoor) and "brightest" not in setup.wire.attack:
        attack = dataclasses.replace(attack, brightest=float(images.max()))
    if hasattr(server, "require"):
        server.require(setup.wire.aggregate, int(expected(setup, federation).min() + 1e-9))
    bound = None
    if isinstance(server, NormBound):
        server, bound = None, server.bound
    if privacy and (accounting := accounting_of(setup, federation)):
        privacy = dataclasses.replace(privacy, noise=accounting.noise)
        for clients in expected(setup, federation):
            privacy.require_count_noise(setup.wire.privacy, clients)
        bound = privacy.clip if privacy.where == "server" else bound
    floats = expected(setup, federation), attack, chosen.compress, privacy, rows, server, bound
    floats = jax.tree.map(lambda leaf: np.asarray(leaf, jnp.result_type(float)), floats)
    newcomers = np.concatenate([np.asarray(apart) for apart in federation.newcomers])
    share = 0.0 if attack is None else chosen.share
    drawn: Any = draw_attackers(newcomers, share, setup.partition.partition_seed)
    return federation.replicate(Wire(drawn, *floats, feedback=chosen.feedback))


def _require_fitting(choice: str, attack: Any, federation: Federation) -> None:
    """Raise `JaxflError` if an attack on data meets no classes, or changes images where the data are none."""
    require_classes(federation.task, f"--attack {choice}")
    if hasattr(attack, "target"):
        shape, classes = federation.images.shape[1:], federation.models[0].classes
        if min(shape[:2]) < 2:
            raise JaxflError(f"--attack {choice} changes images, but the data are none; take another attack.")
        if not federation.unified or attack.target >= classes:
            raise JaxflError(
                f"--attack {choice} has a target class that means the same to all clients, one of {classes}; "
                "lower target, or leave --labels out."
            )


def _active(setup: Setup, clients: int) -> int:
    return max(1, rounded_down(setup.run.participation, clients))


def expected(setup: Setup, federation: Federation) -> np.ndarray:
    """Return how many clients of each architecture a round has on average, (groups,)."""
    of_groups = np.asarray(federation.participants)
    clients, share = int(of_groups.sum()), setup.run.participation
    return of_groups * (share if setup.run.sampling == "poisson" else _active(setup, clients) / clients)


def accounting_of(setup: Setup, federation: Federation) -> Accounting | None:
    """Return what the accountant knows of a run, with the noise that is used; None without privacy.

    Raises:
      JaxflError: if a target epsilon cannot be reached.
    """
    privacy, run = chosen_of(setup).privacy, setup.run
    if privacy is None:
        return None
    clients = int(np.asarray(federation.participants).sum())
    sampled = run.sampling, run.participation, _active(setup, clients), clients
    found = Accounting(privacy.noise, privacy.delta, privacy.where, *sampled)
    if (target := setup.wire.target_epsilon) is None:
        return found
    return found._replace(noise=least_noise(found, target, run.rounds))
