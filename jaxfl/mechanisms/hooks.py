"""What `jaxfl.mechanisms.sharing.sharing` expects of the hooks that authors pass; errors name a hook's line.

`expect` checks a hook's arguments once, and by a *form* what each of its calls returns. A form is a function
``(what the hook returned, *its arguments)`` -> what is wrong with it, in the words after the hook's name, or
nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.config.own_code import line_of, require_call
from jaxfl.core import tree
from jaxfl.core.training import Trained
from jaxfl.errors import JaxflError
from jaxfl.models.model import Weights

Form = Callable[..., str]


def expect(what: str, hook: Callable, *arguments: str, form: Form | None = None) -> Callable:
    """Return a hook whose results are checked.

    Args:
      what: the hook's name.
      hook: perhaps the user's own.
      *arguments: names of what it is called with.
      form: what it must return; by default anything.

    Raises:
      JaxflError: with the hook's line, if it takes other arguments; the hook raises it if its result does not
        have the form.
    """
    require_call(what, hook, *arguments)
    if form is None:
        return hook

    def checked(*given):
        made = hook(*given)
        require(what, hook, form, made, *given)
        return made

    return checked


def require(what: str, hook: Callable, form: Form, made: Any, *given: Any) -> None:
    """Refuse what a hook has made, from the arguments `given`, if it does not have the form."""
    if wrong := form(made, *given):
        raise JaxflError(f"{line_of(hook)}: {what} {wrong}.")


def expect_keep(keep: Callable) -> Callable:
    """Return `keep`, which must return a function of a leaf's path that returns true or false."""
    checked = expect("keep", keep, "model", form=function_of_path)
    return lambda model: expect("the function that keep returns", checked(model), "path", form=true_or_false)


# ---- forms


def function_of_path(made: Any, model: Any) -> str:
    """Accept a function of a leaf's path."""
    example = 'lambda model: lambda path: path[1] == "classifier"'
    return "" if callable(made) else f"returns {made!r}, not a function of a leaf's path, as in {example}"


def true_or_false(made: Any, path: Any) -> str:
    """Accept a boolean; None, if a return is forgotten, is none."""
    is_one = isinstance(made, bool | np.bool_)
    return "" if is_one else f"gives {made!r} for {path}; it must return True or False"


def some_of(known: Sequence[str]) -> Form:
    """Return the form of a phase's blocks: some of these."""

    def blocks(made: Any, *_) -> str:
        fits = isinstance(made, tuple | list) and not set(made) - set(known)
        return "" if fits else f"trains {made!r}, not a tuple of some of {', '.join(known)}, or None for all"

    return blocks


def trained(made: Any, key: Any, participant: Any) -> str:
    """Accept a `Trained` with a model of the received one's form."""
    if not isinstance(made, Trained):
        return f"returns a {type(made).__name__}, not a Trained; descend returns one"
    return _unlike(made.weights, participant.received)


def weights(made: Any, *_) -> str:
    """Accept `Weights` of floats."""
    if not isinstance(made, Weights):
        return (
            f"returns a {type(made).__name__} as the model, not Weights (weights._replace(params=...) makes "
            "them from new parameters)"
        )
    for name, dtype in _not_floats(made):
        return f"makes {name} {dtype}; weights are floats, to be trained and averaged"
    return ""


def memory_and_message(made: Any, participant: Any, trained: Any) -> str:
    """Accept a memory of the former one's form, and a message of floats."""
    if wrong := _no_pair(made) or _unlike(made[0], participant.memory):
        return wrong
    for name, dtype in _not_floats(made[1]):
        return (
            f"sends a message{name} of {dtype}, but the server takes the mean; make it float, as in "
            "trained.steps.astype(float)"
        )
    return ""


def model_and_memory(made: Any, shared: Any, server: Any, *_) -> str:
    """Accept shared leaves and a server's memory, each of the former one's form."""
    return _no_pair(made) or weights(made[0]) or _unlike(tuple(made), (shared, server))


# ---- parts of forms


def _no_pair(made: Any) -> str:
    is_pair = isinstance(made, tuple | list) and not isinstance(made, Weights) and len(made) == 2
    return "" if is_pair else f"returns a {type(made).__name__}, not a pair"


def _unlike(made: Any, before: Any) -> str:
    """Say in which leaf a tree first differs in form from the one before."""
    if wrong := tree.unlike(jax.tree.map(jnp.asarray, made), before):
        return f"makes {wrong.strip()}; it must keep its form (tree.like leaves out what was not there)"
    same = jax.tree.structure(made) == jax.tree.structure(before)
    return "" if same else "makes other containers; it must keep their form"


def _not_floats(made: Any) -> list[tuple[str, Any]]:
    """Return the places and dtypes of the leaves that are not floats."""
    dtypes = {
        jax.tree_util.keystr(path): jnp.result_type(leaf) for path, leaf in jax.tree.leaves_with_path(made)
    }
    return [(name, dtype) for name, dtype in dtypes.items() if not jnp.issubdtype(dtype, jnp.floating)]
