"""What authors hand to `jaxfl.mechanisms.sharing.sharing`: refused with its line where it does not fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxfl.config.own_code import line_of, require_call
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights


def check_hooks(
    keep: Callable, train: Callable, tune: Callable | None, memory: Any, extend: Callable
) -> None:
    """Refuse a hook that cannot be called as it will be.

    Raises:
      JaxflError: with the hook's line, and what it is called with.
    """
    for what, hook, *arguments in (
        ("keep", keep, "model"),
        ("train", train, "key", "participant", "federation"),
        ("tune", tune, "key", "participant", "federation"),
        ("extend", extend, "model", "weights", "hyper"),
        ("Memory.client", memory.client, "shared"),
        ("Memory.server", memory.server, "shared"),
        ("Memory.broadcast", memory.broadcast, "server"),
        ("Memory.update", memory.update, "participant", "trained"),
        ("Memory.aggregate", memory.aggregate, "shared", "server", "means", "hyper"),
    ):
        if hook is not None:
            require_call(what, hook, *arguments)


def pair(what: str, made: Any, hook: Callable) -> tuple[Any, Any]:
    """What a hook returns.

    Raises:
      JaxflError: with the hook's line, if it is no pair.
    """
    if isinstance(made, Weights) or not isinstance(made, tuple | list) or len(made) != 2:
        raise JaxflError(f"{line_of(hook)}: {what} returns a {type(made).__name__}, and not a pair.")
    return tuple(made)


def require_weights(what: str, made: Any, hook: Callable) -> None:
    """Refuse what is to be a model and is none.

    Raises:
      JaxflError: with the hook's line.
    """
    if not isinstance(made, Weights):
        raise JaxflError(
            f"{line_of(hook)}: {what} returns a {type(made).__name__} as the shared model, and not Weights "
            "(of new parameters alone means.model._replace(params=...) makes some)."
        )


def keep_form(what: str, made: Any, before: Any, hook: Callable) -> None:
    """Refuse what a hook makes of something if it is not in the form in which that was.

    Raises:
      JaxflError: with the hook's line, and the first leaf that is otherwise.
    """

    def form(its):
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(its)}

    def seen(leaf):
        return "nothing" if leaf is None else f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"

    now, then = form(made), form(before)
    for path in [*then, *now]:
        is_now, was = seen(now.get(path)), seen(then.get(path))
        if is_now != was:
            raise JaxflError(
                f"{line_of(hook)}: {what} makes {path or 'it'} {is_now}, which was {was}; it has to keep its "
                "form (tree.like leaves out what was not there)."
            )
    if jax.tree.structure(made) != jax.tree.structure(before):
        raise JaxflError(f"{line_of(hook)}: {what} makes other containers; it has to keep the form.")


def require_floats(what: str, message: Any, hook: Callable) -> None:
    """Refuse a message that has no mean.

    Raises:
      JaxflError: with the hook's line.
    """
    for path, leaf in jax.tree.leaves_with_path(message):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise JaxflError(
                f"{line_of(hook)}: {what} sends a message{name} of {jnp.result_type(leaf)}, and the server "
                "takes the mean: make it float, such as trained.steps.astype(float)."
            )
