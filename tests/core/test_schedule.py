"""Schedules of the clients' learning rates: their factors, and the rates that they multiply."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfl.config.options import client_rate, client_rates, options, within
from jaxfl.core.schedule import at_rate, factors
from jaxfl.core.training import Training
from jaxfl.errors import JaxflError
from jaxfl.registry import METHODS


def cosine(t, over, final=0.0):
    return final + (1 - final) * (1 + math.cos(math.pi * min(t, over) / over)) / 2


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("constant,warmup=3", [1 / 4, 2 / 4, 3 / 4, *[1] * 5]),
        ("cosine", [cosine(t, 8) for t in range(8)]),
        ("cosine,rounds=4,final=0.1", [cosine(t, 4, 0.1) for t in range(8)]),
        ("cosine,warmup=2,final=0.01", [1 / 3, 2 / 3, *(cosine(t, 6, 0.01) for t in range(6))]),
        ("step,every=3,factor=0.5", [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]),
        ("step,every=2,factor=1", [1] * 8),
    ],
)
def test_factors_follow_the_formula_of_their_schedule(choice, wanted):
    found: Any = factors(choice, 8)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("linear", "There is no schedule 'linear'"),
        (
            "cosine,rounds=4",
            "--schedule cosine,rounds=4 multiplies the rates of round 5 of 8 by 0; rates must",
        ),
        ("cosine,warmup=8", "A cosine over 8 rounds has no room for warmup=8"),
        ("cosine,rounds=0", "rounds of a cosine is 0; it needs at least one"),
        ("step,every=0", "cannot take a step every 0 rounds"),
        ("step,factor=0", "cannot multiply rates by 0; write factor=0.1"),
        ("constant,warmup=-1", "cannot warm up for -1 rounds"),
    ],
)
def test_invalid_schedules_are_refused(choice, sentence):
    with pytest.raises(JaxflError, match=re.escape(sentence)):
        factors(choice, 8)


@options
class Own(Training):
    """Options of some method."""

    head_lr: float | None = client_rate("(0, inf)", 0.2)
    """Of clients."""
    other_lr: float | None = client_rate("(0, inf)", None)
    """By default lr."""
    server_lr: float = within("(0, inf)", 0.3)
    """Of the server."""


DOCUMENT = Path(__file__).parents[2] / "docs" / "rounds.md"


def test_schedules_change_the_rates_that_the_documentation_names():
    found: Any = re.search(r"It changes `lr` and the other rates .*?\((.*?)\)", DOCUMENT.read_text(), re.S)
    named = {flag.replace("-", "_") for flag in re.findall("`--([a-z-]+)`", found[1])}
    followers = {}
    for name, method in METHODS.items():
        for rate in client_rates(method.config):
            followers.setdefault(rate, []).append(name)
    assert followers.pop("lr") == list(METHODS)
    assert followers == {
        "head_lr": ["compfl", "compfl-dd", "compfl-mm"],
        "distill_lr": ["fedmd", "mnfl", "sim-pfd", "topk-pfd"],
        "public_lr": ["fccl"],
        "eta": ["pfedme"],
        "personal_lr": ["ditto"],
    }
    assert followers.keys() == named


def test_a_factor_multiplies_clients_rates_wherever_the_state_holds_options():
    seen = []

    def one_round(key, state, federation, cohort) -> Any:
        hyper = state["inner"][0]
        seen.append((hyper.lr, hyper.head_lr, hyper.other_lr, hyper.server_lr))
        return state, None

    state = {"inner": (Own(lr=0.1),), "others": 1}
    nothing: Any = None
    after, _ = at_rate(one_round, 0.5)(nothing, state, nothing, nothing)
    assert after == state and seen == [(0.05, 0.1, None, 0.3)]
    with pytest.raises(JaxflError, match="--schedule finds no learning rates"):
        at_rate(one_round, 0.5)(nothing, {"others": 1}, nothing, nothing)


def test_a_schedule_leaves_what_a_method_changes_itself():
    def step(key, state, federation, cohort):
        return dataclasses.replace(state, mu=state.mu / 2), state.lr

    hyper = METHODS["fedprox"].config(mu=0.5, lr=0.1)
    after, lr = at_rate(step, 0.5)(None, hyper, None, None)
    assert (lr, after.lr, after.mu) == (0.05, 0.1, 0.25)
