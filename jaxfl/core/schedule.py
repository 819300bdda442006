"""Schedules of the clients' learning rates: a factor for every round, known before the run.

A schedule is ``(length, *, options) -> factor``: it maps the rounds of the run to a function of the number of
rounds before, as in Optax. Its factors are data of the program, so changing them does not recompile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.config import choices
from jaxfl.config.options import client_rates
from jaxfl.config.own_code import line_of, own_code, require_call
from jaxfl.core.protocol import Step
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError


def constant(length: int, *, warmup: int = 0) -> optax.Schedule:
    """Constant rates.

    Args:
      length: rounds of the run.
      warmup: first rounds, in which rates grow in equal steps.

    Raises:
      JaxflError: if `warmup` is negative.
    """
    return _after(warmup, optax.constant_schedule(1.0))


def cosine(length: int, *, final: float = 0.0, rounds: int | None = None, warmup: int = 0) -> optax.Schedule:
    """Half a cosine, from the full rates to a share of them.

    Args:
      length: rounds of the run.
      final: share of the rates at the end.
      rounds: rounds until that share is reached, warm-up included; by default all of the run. A longer run
        keeps it.
      warmup: first rounds, in which rates grow in equal steps.

    Raises:
      JaxflError: if the warm-up takes all rounds or is negative, or there are no rounds.
    """
    rounds = length if rounds is None else rounds
    if rounds < 1:
        raise JaxflError(f"rounds of a cosine is {rounds}; it needs at least one.")
    falling = rounds - warmup
    if falling < 1:
        raise JaxflError(f"A cosine over {rounds} rounds has no room for warmup={warmup}; lower it.")
    return _after(warmup, optax.cosine_decay_schedule(1.0, falling, final))


def step(length: int, *, every: int = 10, factor: float = 0.1, warmup: int = 0) -> optax.Schedule:
    """Rates multiplied by `factor` after every `every` rounds.

    Args:
      length: rounds of the run.
      every: rounds with the same rates.
      factor: ratio of the rates from one step to the next.
      warmup: first rounds, in which rates grow in equal steps.

    Raises:
      JaxflError: if `every` is below 1, `factor` is not positive, or `warmup` is negative.
    """
    if every < 1:
        raise JaxflError(f"A schedule cannot take a step every {every} rounds; write every=10.")
    if factor <= 0:  # Optax takes it for no decay
        raise JaxflError(f"A schedule cannot multiply rates by {factor:g}; write factor=0.1.")
    return _after(warmup, optax.exponential_decay(1.0, every, factor, staircase=True))


def _after(warmup: int, schedule: optax.Schedule) -> optax.Schedule:
    """Put W rounds with the factors 1/(W + 1), 2/(W + 1), ... before a schedule."""
    if warmup < 0:
        raise JaxflError(f"A schedule cannot warm up for {warmup} rounds; write warmup=5.")
    growing = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    return optax.join_schedules([growing, schedule], [warmup]) if warmup else schedule


SCHEDULES = {"constant": constant, "cosine": cosine, "step": step}


def factors(choice: str, rounds: int) -> np.ndarray | None:
    """Return the factor of every round, (rounds,) float; None for ``constant``.

    Raises:
      JaxflError: if there is no such schedule, or a factor is not positive.
    """
    if choice == "constant":
        return None
    name, make, options = choices.function("schedule", SCHEDULES, choice)
    require_call(name, make, "length", **options)
    with own_code(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        schedule = make(rounds, **options)
        require_call("a schedule", schedule, "rounds")
        found = np.asarray(schedule(jnp.arange(rounds)))
    if found.dtype.kind not in "iuf":
        raise JaxflError(f"{line_of(make)}: the factors of --schedule {choice} are not numbers.")
    if found.shape not in ((), (rounds,)):
        raise JaxflError(
            f"--schedule {choice} has factors {found.shape} for {rounds} rounds, not one for each."
        )
    found = np.broadcast_to(found, rounds).astype(jnp.result_type(float))
    bad = ~(found > 0) | ~np.isfinite(found)
    if bad.any():
        t = int(np.argmax(bad))
        raise JaxflError(
            f"--schedule {choice} multiplies the rates of round {t + 1} of {rounds} by {found[t]:g}; rates "
            "must stay positive."
        )
    return found


def at_rate(one_round: Step, factor) -> Step:
    """Return a round whose clients' learning rates are multiplied by a factor (); those of the state stay.

    These rates are the options declared by `jaxfl.config.options.client_rate`, wherever the state holds a
    method's options.
    """

    def times(hyper):
        rates = {name: rate * factor for name, rate in _rates(hyper).items() if rate is not None}
        return dataclasses.replace(hyper, **rates)

    def scaled(state):
        if not any(map(is_options, jax.tree.leaves(state, is_leaf=is_options))):
            raise JaxflError(
                "--schedule finds no learning rates: the method's state lacks the options (hyper) that its "
                "init is given; keep them in it."
            )
        return jax.tree.map(lambda leaf: times(leaf) if is_options(leaf) else leaf, state, is_leaf=is_options)

    def of_round(key, state, federation, cohort):
        after, info = one_round(key, scaled(state), federation, cohort)
        kept = jax.tree.map(
            lambda before, now: dataclasses.replace(now, **_rates(before)) if is_options(before) else now,
            state,
            after,
            is_leaf=is_options,
        )
        return kept, info

    return of_round


def is_options(leaf: Any) -> bool:
    """Return whether a node of a state is a method's options."""
    return isinstance(leaf, Training)


def _rates(hyper: Training) -> dict[str, Any]:
    """Return the clients' learning rates among a method's options, by name."""
    return {name: getattr(hyper, name) for name in client_rates(type(hyper))}
