"""Local training: every client alone, in the rounds for which it is drawn."""

import jax
from conftest import assert_same, cohort
from reference import sharing

from jaxfl.registry import METHODS
from methods.cases import Case, Comparison, local_statistics
from methods.rounds import ALWAYS, TRAINING, alike, initial, reported, run


def stays(name):
    """Keep everything on its client."""
    return True


def start(clients, initial, options):
    """Start every client with a copy of its architecture's initial model."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """w_i <- SGD(w_i)."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    return sharing.averaged(state, clients, trained, stays, options), losses


def schedule_all_trains_every_client():
    everybody, _ = run("local", alike(), local_schedule="all", **TRAINING)[-1]
    always_present, _ = run("local", alike(), cohorts=ALWAYS, **TRAINING)[-1]
    assert_same(everybody.kept, always_present.kept)


def schedule_all_reports_only_the_cohort():
    config = METHODS["local"].config(local_schedule="all", **TRAINING)
    _, info = jax.eval_shape(
        METHODS["local"].build(config).step,
        jax.random.key(1),
        initial("local", alike(), **TRAINING),
        alike(),
        cohort(alike(), (1, 3), places=(2,)),
    )
    assert {leaf.shape[0] for leaf in jax.tree.leaves(info)} == {2}
    assert [leaf.shape for leaf in jax.tree.leaves(reported(info))] == [(2,)] * 3


local = Case(
    "local",
    start,
    step,
    sharing.scores,
    traffic=lambda model, models, t: 0,
    comparisons={"": Comparison(mistakes=[("momentum", 0.51)]), "local statistics": local_statistics()},
    reductions=(schedule_all_trains_every_client, schedule_all_reports_only_the_cohort),
)
