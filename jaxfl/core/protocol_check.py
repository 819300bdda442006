"""Checks that a method keeps the protocol: its functions are traced by shapes only, before compilation."""

import functools
import gc
import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxfl.config.own_code import PACKAGE, OwnCodeError, in_a_line, line_of, own_code, require_call
from jaxfl.core import flops, tree
from jaxfl.core.cohorts import all_clients
from jaxfl.core.programs import tracing
from jaxfl.core.protocol import Algorithm, Cohort, Info, Predictor, Slots, Step, messages
from jaxfl.data.federation import Federation
from jaxfl.errors import JaxflError

IMAGES = 3  # number of images that predictors are tried on
MADE_BY = "made_by"  # attribute of an algorithm's functions: the method's build
ROUND = ("key", "state", "federation", "cohort")
NONE_LEAVES = (
    "in what is shared and remembered, None is a leaf that stays on its client (kept, or a statistic with "
    "--bn-stats local): tree.combine(memory, participant.received) fills such leaves, and "
    "tree.like(trained.weights, memory) leaves them out"
)


def checked(built: Any, build: Callable) -> Algorithm:
    """Return what a method's build returned; errors in the user's code are distinguished from ours.

    Raises:
      JaxflError: if it is not an `Algorithm`, or one of its functions takes other arguments.
    """
    if not isinstance(built, Algorithm):
        raise JaxflError(f"{line_of(build)}: build returns a {type(built).__name__}, not a jaxfl.Algorithm.")
    arguments = {"init": ("key", "federation", "hyper"), "matrices": ("state",), "embeddings": ("state",)}
    functions = {
        name: f for name, f in built._asdict().items() if f is not None and name not in ("averaged", "wire")
    }
    # A method that has replaced another method's step no longer does what `averaged` describes.
    if built.averaged and built.averaged.step is not built.step:
        built = built._replace(averaged=None)
    for name, f in functions.items():
        require_call(name, f, *arguments.get(name, ROUND))
    guarded = {f: own_code()(f) for f in functions.values()}  # personal may be receive, which saves a program
    for f in guarded.values():
        setattr(f, MADE_BY, build)
    built = built._replace(**{name: guarded[f] for name, f in functions.items()})
    return built._replace(host=_keeping_form(built.host)) if built.host else built


def _keeping_form(host: Step) -> Step:
    """Return a host step that checks its result in every round, because it is never traced."""

    @functools.wraps(host)
    def step(key, state, federation, cohort):
        made = host(key, state, federation, cohort)
        _check_step("host", host, state, made, cohort)
        return made

    return step


def check(algorithm: Algorithm, federation: Federation, hyper: Any, rounds: int) -> None:
    """Raise `JaxflError` if an algorithm's functions do not return what the protocol says.

    Args:
      algorithm: from `checked`.
      federation: of the run. All its clients take part, and each architecture gets one empty place. So an
        array with an entry per place differs in length from one with an entry per client, which finds methods
        that forget to scatter.
      hyper: the method's configuration, traced.
      rounds: of the run.

    Raises:
      JaxflError: if a step changes the form of the state or reports anything but a number for every client,
        or if clients do not predict scores (B, outputs). It names the file and line of the function.
    """
    key, cohort = jax.random.key(0), _with_empty_places(all_clients(federation, rounds))
    state = _shapes("init", algorithm.init, key, federation, hyper)
    for path, leaf in jax.tree.leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise JaxflError(
                f"{_line(algorithm.init)}: init puts a random key into state{jax.tree_util.keystr(path)}; "
                "nothing random belongs there, because step is given the round's key."
            )
    for name in ("prepare", "step"):
        step = getattr(algorithm, name)
        if step:
            made = _shapes(name, step, key, state, federation, cohort)
            _check_step(name, step, state, made, cohort)
            for field in ("trained", "teacher"):
                if (told := getattr(made[1], field)) is not None:
                    _check_predictors(f"Info.{field} of {name}", step, told, federation, cohort)
    _check_about_clients(algorithm, state, federation)
    for name in ("receive", "personal"):
        predict = getattr(algorithm, name)
        predictors = _shapes(name, predict, key, state, federation, cohort)
        _check_predictors(name, predict, predictors, federation, cohort)


def _check_about_clients(algorithm: Algorithm, state: Any, federation: Federation) -> None:
    """Refuse matrices that are not of pairs of clients, and embeddings that are not of clients."""
    groups = [len(group.id) for group in federation.groups]
    if matrices := algorithm.matrices:
        made, wanted = _shapes("matrices", matrices, state), (sum(groups), sum(groups))
        if not isinstance(made, dict) or any(jnp.shape(each) != wanted for each in made.values()):
            raise JaxflError(f"{_line(matrices)}: matrices must return {{name: array {wanted}}}.")
    if embeddings := algorithm.embeddings:
        made = _shapes("embeddings", embeddings, state)
        of_clients = isinstance(made, tuple) and [jnp.shape(each)[:-1] for each in made]
        if of_clients != [(clients,) for clients in groups]:
            raise JaxflError(
                f"{_line(embeddings)}: embeddings must return a tuple with an array (clients, d) for each "
                f"architecture; the numbers of clients are {groups}."
            )


def _line(f: Callable) -> str:
    """Return the line of a function of an algorithm; of the build that asked for it if jaxfl has made it."""
    code = getattr(inspect.unwrap(f), "__code__", None)
    ours = code is not None and Path(code.co_filename).is_relative_to(PACKAGE)
    return line_of(getattr(f, MADE_BY, f) if ours else f)


def _with_empty_places(cohort: Cohort) -> Cohort:
    """Return the same clients, with an empty place after those of each architecture."""

    def of_group(slots):
        return Slots(np.append(slots.index, np.int32(len(slots.index))), np.append(slots.mask, False))

    return replace(cohort, groups=tuple(map(of_group, cohort.groups)))


def _shapes(name: str, f: Callable, *arguments) -> Any:
    """Return what a function returns, with shapes instead of arrays."""

    def counted(*arguments):
        with flops.collect() as amounts:  # as in a program of rounds, which returns them
            made = f(*arguments)
        return made, [amount for _, amount in amounts]

    gc.freeze()  # from here on the collector lists only new objects; a long process holds millions
    try:
        with tracing:  # traced values of another thread are not left over
            program, (made, _) = jax.make_jaxpr(counted, return_shape=True)(*arguments)
            if _any_traced(program.consts) or _any_lives_on():
                raise jax.errors.UnexpectedTracerError(f"in {name}")
        return made
    # Errors in the user's functions are `OwnCodeError`; errors in their callers are of any kind.
    except Exception as error:
        if isinstance(error, OwnCodeError) and "NoneType" in str(error.__cause__):
            raise OwnCodeError(f"{str(error).rstrip('.')}; {NONE_LEAVES}.") from error.__cause__
        if isinstance(error, jax.errors.UnexpectedTracerError):
            raise JaxflError(
                f"{_line(f)}: in {name} a traced value is used outside the function that traced it, or "
                "kept; around descend, fit and sweep use map_clients, fori_loop, scan and cond of "
                "jaxfl.fl, which count operations, not vmap and those of jax.lax; keep no traced "
                "value in a list or an outer variable."
            ) from None
        if isinstance(error, JaxflError):
            raise
        if "not a valid JAX type" in str(error):
            raise JaxflError(
                f"{_line(f)}: what {name} returns is not made of arrays: {in_a_line(error)}."
            ) from None
        raise JaxflError(f"{_line(f)}: {name} does not run: {in_a_line(error)}.") from error
    finally:
        gc.unfreeze()


def _any_lives_on() -> bool:
    """Return whether a traced value is left; `jax.checking_leaks` would take ten times as long."""
    if not _any_traced(gc.get_objects()):
        return False
    gc.collect()
    return _any_traced(gc.get_objects())


def _any_traced(objects: Iterable[Any]) -> bool:
    """Return whether one of the objects is a traced value."""
    return any(issubclass(type(one), Tracer) for one in objects)


def _check_step(name: str, step: Callable, before: Any, made: Any, cohort) -> None:
    def refuse(what):
        raise JaxflError(f"{_line(step)}: {name} {what}.")

    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Info)):
        refuse(f"returns {_form(made)}, not (state, Info)")
    after, info = made
    if wrong := tree.unlike(after, before):
        refuse(f"makes state{wrong}; the state must keep its form")
    if jax.tree.structure(before) != jax.tree.structure(after):
        refuse("returns a state whose containers differ from those of init; the state must keep its form")
    places = [slots.mask.shape for slots in cohort.groups]
    reported = {"loss": ("a float", "f"), "up": ("an int32", "i"), "down": ("an int32", "i")}
    if name == "host":  # it trains no client
        del reported["loss"]
    if info.idle is not None:
        reported["idle"] = "a bool", "b"
    for field, (wanted, kind) in reported.items():
        found = getattr(info, field)
        of_groups = found if isinstance(found, tuple) else ()
        counts = [list(messages(entry).values()) for entry in of_groups]
        fits = len(counts) == len(places) and all(
            getattr(leaf, "shape", None) == shape and leaf.dtype.kind == kind
            for leaves, shape in zip(counts, places, strict=True)
            for leaf in leaves
        )
        if not fits:
            refuse(
                f"reports Info.{field} as {_form(found)}, not as a tuple with {wanted} array (k,) for each "
                f"architecture: a number per client of the cohort"
            )
    if not isinstance(info.findings, dict):
        refuse(f"reports Info.findings as {_form(info.findings)}, not as {{panel: {{line: ()}}}}")
    for panel, lines in () if name == "host" else info.findings.items():
        of_panel = f"reports Info.findings[{panel!r}]"
        if not isinstance(lines, dict):
            refuse(f"{of_panel} as {_form(lines)}, not as {{line: ()}}: numbers by the names of their lines")
        for line, value in lines.items():
            if not isinstance(value, int | float) and getattr(value, "shape", None) != ():
                refuse(f"{of_panel}[{line!r}] as {_form(value)}, not as a number ()")
    if name == "host":
        if not isinstance(info.teacher, dict | None):
            refuse(f"reports Info.teacher as {_form(info.teacher)}, not as {{client id: function of images}}")
        try:
            json.dumps(info.findings, default=_listed)
        except (TypeError, ValueError) as error:
            refuse(f"reports Info.findings that JSON cannot hold ({in_a_line(error)})")


def _check_predictors(name: str, f: Callable, predictors: Any, federation: Federation, cohort) -> None:
    of_groups = predictors if isinstance(predictors, tuple) else ()
    if len(of_groups) != len(federation.groups) or not all(isinstance(one, Predictor) for one in of_groups):
        raise JaxflError(
            f"{_line(f)}: {name} gives {_form(predictors)}, not a tuple with a Predictor for each "
            "architecture."
        )
    for one, model, slots in zip(of_groups, federation.models, cohort.groups, strict=True):
        if any(leaf.shape[:1] != slots.mask.shape for leaf in jax.tree.leaves(one.stacked)):
            raise JaxflError(
                f"{_line(f)}: a Predictor of {name} has stacked leaves without an entry for each client of "
                "the cohort; put what clients share into shared."
            )
        require_call("predict", one.predict, "model", "shared", "own", "x")
        own = tree.one(one.stacked)
        x = model.examples(IMAGES)
        predict = own_code()(functools.partial(one.predict, model))
        scores = _shapes("predict", predict, one.shared, own, x)
        wanted = (IMAGES, *model.output)
        fits = getattr(scores, "shape", None) == wanted
        if not fits or not jnp.issubdtype(scores.dtype, jnp.floating):
            raise JaxflError(
                f"{line_of(one.predict)}: predict returns {_form(scores)} for {IMAGES} images, not scores "
                f"{wanted}: an array (B, outputs) of floats."
            )


def _listed(leaf: Any) -> Any:
    """Return an array in a finding as lists, which JSON can hold."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return leaf.tolist()
    raise TypeError(f"a {type(leaf).__name__}")


def _form(value: Any) -> str:
    """Describe a value in a few words."""
    match value:
        case jax.ShapeDtypeStruct() | jax.Array() | np.ndarray() | np.generic():
            return f"an array {value.shape} of {value.dtype}"
        case tuple() if type(value) is tuple:
            return f"a tuple of {', '.join(map(_form, value)) or 'nothing'}"
    return f"a {type(value).__name__}"
