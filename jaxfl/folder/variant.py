"""Variants: methods with their options, each a row in the table of a comparison."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import jax

from jaxfl import registry
from jaxfl.config import choices
from jaxfl.config.asked import Asked, read_options
from jaxfl.config.options import Unread, declared
from jaxfl.config.own_code import line_of, own_code, require_call
from jaxfl.config.setup import Setup, is_saved
from jaxfl.config.values import text
from jaxfl.core.protocol import Algorithm, Method
from jaxfl.core.protocol_check import checked
from jaxfl.core.rounds import Programs, as_programs
from jaxfl.core.training import Training
from jaxfl.data.partitioners import rule_of_test
from jaxfl.errors import JaxflError

NEEDS = ("public", "validation", "links", "features", "classes")
AS_MANY_FEATURES = ("default,features=50",)


class Variant(NamedTuple):
    """A method with its options, ready to run."""

    name: str | None  # finds the method again: ``fedper``, ``/path/to/my.py:my_method``; None for an object
    label: str  # name in tables: the method's name, and the options that distinguish it
    method: Method  # the method
    config: Any  # its options
    programs: Programs  # its compiled programs, shared by runs with other seeds or other rates

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that the method builds; rates are read from the state."""
        return self.programs.algorithm

    @property
    def built_in(self) -> bool:
        """Whether the method is jaxfl's, rather than the user's own."""
        return registry.METHODS.get(self.method.name) == self.method


def choose(
    choice: str | Method,
    common: Asked | None = None,
    own: Asked | None = None,
    /,
    **options,  # of any names: the user's methods have their own
) -> Variant:
    """Find a method, check its options, label it and prepare its programs.

    Options in the choice are in the label, as are the method's own options that are not at their defaults,
    and its `own` ones here. Those that are `common` to several methods may be overridden by the choice.

    Raises:
      JaxflError: if there is no such method, or an option is of another type or out of range.
    """
    (method, given), own = registry.method(choice), own or {}
    if twice := sorted(given.keys() & {*own, *options}):
        raise JaxflError(f"{choice} gives {twice[0]}, which is given once more beside it; leave one out.")
    asked = {**(common or {}), **given, **own, **options}
    config = method.config(**read_options(method.name, declared(method.config), asked))
    return variant_of(choice if isinstance(choice, str) else None, method, config, told=own)


def variant_of(choice: str | None, method: Method, config: Any, told: Collection[str] = ()) -> Variant:
    """Return the variant of a known method and configuration; options in `told` are always in its label."""
    name, given = choices.split(choices.absolute(choice)) if choice else (None, {})
    shown = {
        option.name: text(getattr(config, option.name))
        for option in declared(method.config).values()
        if option.name in {*given, *told}
        or (option.name not in declared(Training) and getattr(config, option.name) != option.default)
    }
    # An object is built anew each time: functions that it calls may have been redefined since, in a notebook.
    programs = (_kept_programs if name else _programs)(method.build, jax.tree.structure(config))
    return Variant(name, choices.join(method.name, shown), method, config, programs)


RATE_WHILE_BUILDING = Unread(
    "build computes with a float option, which is traced and may change without a new program; read it from "
    "the configuration that init is given as hyper (a Participant has it; predict gets what a Predictor's "
    "shared holds)"
)


def _programs(build: Callable, options: Any) -> Programs:
    """Return a method's programs, which are the same for all configurations that differ only in rates."""
    require_call("build", build, "config")
    with own_code():
        made = build(jax.tree.unflatten(options, [RATE_WHILE_BUILDING] * options.num_leaves))
        return as_programs(checked(made, build))


_kept_programs = functools.lru_cache(maxsize=64)(_programs)


def provided(setup: Setup, variants: Iterable[Variant]) -> Setup:
    """Replace what the user has not chosen: by what the methods need, and by the rule for test rows."""
    variants = list(variants)
    needed = {name for variant in variants for name in needs_of(variant)}
    if "links" in needed and setup.run.topology == "none":
        setup = setup.replace(topology="complete")
    if "features" in needed and not setup.run.models:
        setup = setup.replace(models=AS_MANY_FEATURES)
    if "links" not in needed and setup.run.topology != "none":
        labels = " and ".join(variant.label for variant in variants)
        raise JaxflError(
            f"--topology {setup.run.topology} is of no use to {labels}, whose clients are not linked; leave "
            "it out."
        )
    public, validation = setup.data.public, setup.partition.validation_fraction
    if is_saved(setup.partition.partition):  # its content is fixed
        return setup
    return setup.replace(
        public=("held-out" if "public" in needed else "none") if public == "auto" else public,
        validation_fraction=(0.2 if "validation" in needed else 0.0) if validation is None else validation,
        test=rule_of_test(setup.partition),
    )


def needs_of(variant: Variant) -> Collection[str]:
    """Return what a method needs, some of `NEEDS`."""
    stated = variant.method.needs
    needs = stated(variant.config) if callable(stated) else stated
    named = isinstance(needs, Collection) and not isinstance(needs, str)
    if not (named and all(isinstance(name, str) and name in NEEDS for name in needs)):
        who = f"{line_of(stated)}: needs returns" if callable(stated) else f"{variant.label}: needs is"
        raise JaxflError(f"{who} {needs!r}; it must have some of {', '.join(NEEDS)}.")
    return needs


def own_setup(setup: Setup, variant: Variant) -> Setup:
    """Return one method's part of the setup of several: without links if it does not use them."""
    linked = "links" in needs_of(variant)
    return setup if linked else setup.replace(topology="none")
