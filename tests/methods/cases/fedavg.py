"""FedAvg (McMahan et al. 2017, arXiv:1602.05629, Algorithm 1), one model per architecture.

FedAvg-FT (Yu et al. 2020, arXiv:2002.04758): its head, or all of it, fine-tuned before use.
"""

import jax
import numpy as np
import optax
from conftest import SIZES, assert_same
from reference import sharing

from jaxfl.registry import METHODS
from methods import recording
from methods.cases import CONVOLVING, SMALL, Case, Comparison, local_statistics
from methods.rounds import HIDDEN, TRAINING, alike, normalised, run


def stays(name):
    """Keep nothing on a client."""
    return False


def start(clients, initial, options):
    """Start with the initial models on the server."""
    return sharing.begun(clients, initial, stays, options)


def step(state, clients, cohort, options):
    """w_i <- SGD(w); w <- sum_i n_i w_i / sum_i n_i, or a step of the server's optimiser towards it."""
    trained, losses = sharing.trained_jointly(state, clients, cohort, options)
    return sharing.served(state, clients, trained, stays, options), losses


def view(state, federation, t):
    """Return the model, and the memory of a server with an optimiser for each group that has taken part."""
    of_groups = [
        {
            name: found
            for name in ("count", "mu", "nu", "trace")
            if (found := optax.tree.get(server, name)) is not None
        }
        for server in state.server
    ]
    return recording.sharing(state, federation, t) | {"server": recording.by_group(of_groups)}


# ---- what another method computes


def fine_tuning_never_reaches_the_server():
    tuned, _ = run("fedavg-ft", alike(), ft_epochs=5, **TRAINING)[-1]
    fedavg, _ = run("fedavg", alike(), **TRAINING)[-1]
    assert_same(tuned.shared, fedavg.shared)


def fine_tuning_for_no_epochs_is_no_fine_tuning():
    fedavg_ft = METHODS["fedavg-ft"]
    algorithm = fedavg_ft.build(fedavg_ft.config(ft_epochs=0))
    assert algorithm.personal is algorithm.receive


def local_statistics_differ_and_are_never_sent():
    (model,), statistics = normalised().models, 2 * HIDDEN
    _, sent = run("fedavg", normalised(), **TRAINING)[0]
    kept, not_sent = run("fedavg", normalised(), bn_stats="local", **TRAINING)[0]
    assert sent.up[0].tolist() == sent.down[0].tolist() == [model.size + statistics] * len(SIZES)
    assert not_sent.up[0].tolist() == not_sent.down[0].tolist() == [model.size] * len(SIZES)

    assert not jax.tree.leaves([weights.stats for weights in kept.shared])
    leaves = jax.tree.leaves([weights.stats for weights in kept.kept])
    assert sum(leaf[0].size for leaf in leaves) == statistics
    for leaf in leaves:
        assert len(np.unique(leaf, axis=0)) == len(SIZES)


STEPS = {"server_lr": 0.7, "server_momentum": 0.8}
ADAM = Comparison(
    STEPS | {"server_optimizer": "adam"}, [("server_lr", 0.71), ("server_optimizer", "yogi")]
)  # of every method whose server may have an optimiser

fedavg = Case(
    "fedavg",
    start,
    step,
    sharing.scores,
    view=view,
    traffic=lambda model, models, t: model.size,
    comparisons={
        "": Comparison({}, [("momentum", 0.51)], ((SMALL, 3), (CONVOLVING, 2))),
        "adam": Comparison(
            {"optimizer": "adam", "lr": 0.01},
            [("optimizer", "adamw"), ("weight_decay", 0.011)],
            ((SMALL, 5),),
        ),
        "with momentum on the server": Comparison(
            STEPS | {"server_optimizer": "sgd"}, [("server_momentum", 0.81)], ((SMALL, 5),)
        ),
        "with adam on the server": ADAM,
        "with yogi on the server": Comparison(
            STEPS | {"server_optimizer": "yogi"}, [("server_optimizer", "adam")], ((SMALL, 5),)
        ),
        "uniform": Comparison({"weighting": "uniform"}, [("weighting", "rows")], ((SMALL, 5),)),
        "clipped": Comparison({"clip_norm": 1.2}, [("clip_norm", 1.21)], ((SMALL, 5),)),
        # With the default's cohorts a gradient is so close to 0 that Adam enlarges its rounding to 3e-9.
        "adamw, local statistics": local_statistics(
            ("weight_decay", 0.011), optimizer="adamw", lr=0.002
        )._replace(cohorts=8),
    },
    reductions=(local_statistics_differ_and_are_never_sent,),
)

fedavg_ft = fedavg._replace(
    method="fedavg-ft",
    scores=sharing.scores_after_tuning,
    draws_before_use=recording.phases(tune="ft_epochs"),
    comparisons={
        "": Comparison(mistakes=[("ft_part", "all")]),
        "all blocks": local_statistics(("ft_part", "head"), ft_part="all", ft_epochs=3),
        "with adam on the server": ADAM,
    },
    reductions=(fine_tuning_never_reaches_the_server, fine_tuning_for_no_epochs_is_no_fine_tuning),
)
