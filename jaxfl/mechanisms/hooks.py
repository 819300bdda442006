"""Checks of hooks that authors pass to `jaxfl.mechanisms.sharing.sharing`; errors name the hook's line.

Arguments are checked once. What a hook returns is checked by a function around it, made by `checking_...`, so
that `sharing` reads without checks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.own_code import line_of, require_call
from jaxfl.core.training import Trained
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights


def check_hooks(
    keep: Callable, train: Callable, tune: Callable | None, memory: Any, extend: Callable
) -> None:
    """Refuse a hook that does not take the arguments that it will get.

    Raises:
      JaxflError: with the hook's line and these arguments.
    """
    for what, hook, *arguments in (
        ("keep", keep, "model"),
        ("train", train, "key", "participant"),
        ("tune", tune, "key", "participant"),
        ("extend", extend, "key", "model", "weights", "hyper"),
        ("Memory.client", memory.client, "model", "shared", "hyper"),
        ("Memory.server", memory.server, "model", "shared", "hyper"),
        ("Memory.broadcast", memory.broadcast, "server"),
        ("Memory.update", memory.update, "participant", "trained"),
        ("Memory.aggregate", memory.aggregate, "shared", "server", "means", "hyper"),
    ):
        if hook is not None:
            require_call(what, hook, *arguments)


def require_blocks(blocks: Any, known: Sequence[str], phases: Callable) -> None:
    """Refuse a phase that trains blocks that the model does not have.

    Raises:
      JaxflError: with the line of the phases.
    """
    if not isinstance(blocks, tuple | list) or set(blocks) - set(known):
        raise JaxflError(
            f"{line_of(phases)}: a phase trains {blocks!r}, not a tuple of some of {', '.join(known)}, or "
            "None for all."
        )


def checking_predicate(keep: Callable) -> Callable:
    """Return `keep`, whose result must be a function of a leaf's path that returns true or false."""

    def predicate(made, path):
        kept = made(path)
        if not isinstance(kept, bool | np.bool_):  # None, if a return is forgotten
            raise JaxflError(
                f"{line_of(made)}: the function that keep returns gives {kept!r} for {path}; it must return "
                "True or False."
            )
        return kept

    def checked(model):
        made = keep(model)
        if not callable(made):
            raise JaxflError(
                f"{line_of(keep)}: keep returns {made!r}, not a function of a leaf's path, as in "
                'lambda model: lambda path: path[1] == "classifier".'
            )
        return partial(predicate, made)

    return checked


def checking_trained(what: str, train: Callable) -> Callable:
    """Return local training whose result must be a `Trained` with a model of the received one's form."""

    def checked(key, participant):
        made = train(key, participant)
        if not isinstance(made, Trained):
            kind = type(made).__name__
            raise JaxflError(
                f"{line_of(train)}: {what} returns a {kind}, not a Trained; descend returns one."
            )
        _require_form(f"{what}'s weights", made.weights, participant.received, train)
        return made

    return checked


def checking_weights(extend: Callable) -> Callable:
    """Return `extend`, whose result must be `Weights` of floats."""

    def checked(key, model, weights, hyper):
        made = extend(key, model, weights, hyper)
        _require_weights("extend", made, extend)
        return made

    return checked


def checking_memories(update: Callable, aggregate: Callable) -> tuple[Callable, Callable]:
    """Return `Memory.update` and `Memory.aggregate`: pairs; memories and models keep their form."""

    def checked_update(participant, trained):
        made = update(participant, trained)
        remembered, message = _pair("Memory.update", made, update)
        _require_form("Memory.update", remembered, participant.memory, update)
        for name, dtype in _not_floats(message):
            raise JaxflError(
                f"{line_of(update)}: Memory.update sends a message{name} of {dtype}, but the server takes "
                "the mean; make it float, as in trained.steps.astype(float)."
            )
        return remembered, message

    def checked_aggregate(shared, server, means, hyper):
        made = aggregate(shared, server, means, hyper)
        after = _pair("Memory.aggregate", made, aggregate)
        _require_weights("Memory.aggregate", after[0], aggregate)
        _require_form("Memory.aggregate", after, (shared, server), aggregate)
        return after

    return checked_update, checked_aggregate


def _pair(what: str, made: Any, hook: Callable) -> tuple[Any, Any]:
    """Return what a hook returned, as a pair.

    Raises:
      JaxflError: with the hook's line, if that is no pair.
    """
    if isinstance(made, Weights) or not isinstance(made, tuple | list) or len(made) != 2:
        raise JaxflError(f"{line_of(hook)}: {what} returns a {type(made).__name__}, not a pair.")
    return tuple(made)


def _require_weights(what: str, made: Any, hook: Callable) -> None:
    """Refuse a model that is not `Weights` of floats.

    Raises:
      JaxflError: with the hook's line.
    """
    if not isinstance(made, Weights):
        raise JaxflError(
            f"{line_of(hook)}: {what} returns a {type(made).__name__} as the model, not Weights "
            "(weights._replace(params=...) makes them from new parameters)."
        )
    for name, dtype in _not_floats(made):
        raise JaxflError(
            f"{line_of(hook)}: {what} makes {name} {dtype}; weights are floats, to be trained and averaged."
        )


def _require_form(what: str, made: Any, before: Any, hook: Callable) -> None:
    """Refuse what a hook made if its form differs from the form before.

    Raises:
      JaxflError: with the hook's line and the first leaf that differs.
    """

    def form(weights):
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(weights)}

    def seen(leaf):
        return "nothing" if leaf is None else f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

    now, then = form(made), form(before)
    for path in [*then, *now]:
        is_now, was = seen(now.get(path)), seen(then.get(path))
        if is_now != was:
            raise JaxflError(
                f"{line_of(hook)}: {what} makes {path or 'it'} {is_now}, which was {was}; it must keep its "
                "form (tree.like leaves out what was not there)."
            )
    if jax.tree.structure(made) != jax.tree.structure(before):
        raise JaxflError(f"{line_of(hook)}: {what} makes other containers; it must keep their form.")


def _not_floats(tree: Any) -> list[tuple[str, Any]]:
    """Return the places and dtypes of the leaves that are not floats."""
    dtypes = {
        jax.tree_util.keystr(path): jnp.result_type(leaf) for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return [(name, dtype) for name, dtype in dtypes.items() if not jnp.issubdtype(dtype, jnp.floating)]
