"""A method that treats architectures separately is written for one of them, and lifted to all.

In its functions `federation` and `cohort` hold one group, `federation.group` and `cohort.slots`. Nothing is a
tuple of groups: neither the state nor what `map_clients`, `gather` and the others take and return. Keys fold
the ids of clients and the numbers of groups, so each group computes what it would as one among several.
"""

import functools

from jax.scipy.linalg import block_diag

from jaxfl.config.own_code import line_of
from jaxfl.core.protocol import Algorithm, Info
from jaxfl.errors import JaxflError

OF_ONE = "of_one"  # attribute of a lifted function of the state


def each_architecture(one: Algorithm) -> Algorithm:
    """Lift a method of one architecture to all architectures, each of which goes through it alone.

    Every field of the state becomes a tuple with an entry per group, except `hyper`, which all share; a field
    that is itself a state is lifted like it. With a federation of one architecture the lifted functions are
    those of `one`, so that one such method can be built on another.

    Args:
      one: the method. A finding's panel is named after its architecture if there are several.

    Raises:
      JaxflError: if it has a `host`.
    """
    if one.host:
        raise JaxflError(
            f"{line_of(one.host)}: a host step sees all architectures; add it to the lifted method: "
            "each_architecture(...)._replace(host=host)."
        )

    @functools.cache  # `personal` may be `receive`, which saves a program
    def lifted(f, join):
        @functools.wraps(f)
        def of_all(key, state, federation, cohort):
            if federation.alone:
                return f(key, state, federation, cohort)
            apart = enumerate(_apart(state))
            return join([f(key, own, federation.only(g), cohort.only(g)) for g, own in apart], federation)

        return of_all

    @functools.wraps(one.init)
    def init(key, federation, hyper):
        if federation.alone:
            return one.init(key, federation, hyper)
        return _joined([one.init(key, federation.only(g), hyper) for g in range(len(federation.groups))])

    step = lifted(one.step, _done)
    same = one.averaged and one.averaged.step is one.step  # else `averaged` describes another method
    return Algorithm(
        init,
        lifted(one.receive, _predictors),
        step,
        lifted(one.personal, _predictors),
        matrices=one.matrices and _of_state(one.matrices, _block_diagonal),
        embeddings=one.embeddings and _of_state(one.embeddings, tuple),
        prepare=one.prepare and lifted(one.prepare, _done),
        averaged=one.averaged._replace(step=step) if one.averaged and same else None,
        wire=one.wire,
    )


def _predictors(found, federation) -> tuple:
    return tuple(found)


def _done(found, federation) -> tuple:
    """Return the state and the report of all groups after a step, given those of each."""
    states, infos = zip(*found, strict=True)
    return _joined(states), _reported(infos, federation)


def _is_state(field) -> bool:
    names = getattr(field, "_fields", ())
    return "hyper" in names or any(_is_state(getattr(field, name)) for name in names)


def _joined(states):
    """Return the state of all groups, given those of each."""

    def field(name, *of_groups):
        if name == "hyper":
            return of_groups[0]
        return _joined(of_groups) if _is_state(of_groups[0]) else of_groups

    return type(states[0])(*map(field, states[0]._fields, *states))


def _apart(state) -> list:
    """Undo `_joined`."""
    fields = state._asdict()
    hyper = fields.pop("hyper", None)
    of_groups = zip(*(_apart(field) if _is_state(field) else field for field in fields.values()), strict=True)
    own = [dict(zip(fields, values, strict=True)) for values in of_groups]
    return [type(state)(**(values if hyper is None else values | {"hyper": hyper})) for values in own]


def _reported(infos, federation) -> Info:
    """Return the report of a round of all groups, given those of each."""
    findings = {
        f"{panel}, {model.name}" if len(infos) > 1 else panel: lines
        for model, info in zip(federation.models, infos, strict=True)
        for panel, lines in info.findings.items()
    }
    columns = Info._make(zip(*infos, strict=True))
    absent = {
        name: None for name, of_groups in columns._asdict().items() if all(of is None for of in of_groups)
    }
    return columns._replace(findings=findings, **absent)


def _of_state(f, join):
    """Lift a function of the state of a group, unless it has been lifted already."""
    if hasattr(f, OF_ONE):
        return f

    def of_all(state):
        return join([f(of_group) for of_group in _apart(state)])

    setattr(of_all, OF_ONE, f)
    return of_all


def _block_diagonal(found) -> dict:
    """Return matrices (N, N) of pairs of clients, 0 between groups, given those of each."""
    return {name: block_diag(*(blocks[name] for blocks in found)) for name in found[0]}
