"""Sim-pFD and TopK-pFD (Beikmohammadi et al., section 5.1): clients with similar predictions are teachers."""

import numpy as np
import pytest
from conftest import CLASSES, PUBLIC, assert_same
from reference import exchange, own_models

from methods.cases import UNLIKE, Case, Comparison, local_statistics, mnfl
from methods.cases.fedmd import OPTIONS, start
from methods.rounds import TRAINING, mixed, run


def stepped(weigh):
    """Return a round with these weights, which the server remembers."""

    def step(state, clients, cohort, options):
        def weights(s):
            c = np.zeros_like(state["matrix"])
            present = list(s)
            cosine = np.array([[own_models.cosine(s[n], s[m]) for m in present] for n in present])
            c[np.ix_(present, present)] = weigh(cosine.reshape(len(present), len(present)), options)
            return c

        models, losses, s, c, told = exchange.exchanged(state, clients, cohort, options, weights)
        pairs, matrix = np.ix_(list(s), list(s)), state["matrix"].copy()
        matrix[pairs] = c[pairs]
        return {"own": models, "matrix": matrix}, losses, told

    return step


def by_similarity(cosine, options):
    """Return rows that sum to 1; a client alone has weight 1."""
    if options.weights == "min-max":
        cosine = cosine - cosine.min(1, keepdims=True)
    return cosine / cosine.sum(1, keepdims=True) if len(cosine) > 1 else np.ones_like(cosine)


def by_rank(cosine, options):
    """Return 1/K for the first K."""
    weights = np.zeros_like(cosine)
    for n, row in enumerate(cosine):
        nearest = np.argsort(-row)[: options.neighbours]
        weights[n, nearest] = 1 / len(nearest)
    return weights


@pytest.mark.long
def with_all_clients_as_neighbours_it_is_fedmd():
    """With K = N all weights are equal."""
    options = TRAINING | {"distill_lr": 0.1}
    for (topk, _), (fedmd, _) in zip(
        run("topk-pfd", mixed(), neighbours=5, **options), run("fedmd", mixed(), **options), strict=True
    ):
        assert_same(topk, fedmd._replace(hyper=topk.hyper), tolerance=1e-6)


sim_pfd = Case(
    "sim-pfd",
    start,
    stepped(by_similarity),
    own_models.scores,
    draws=mnfl.draws,
    view=mnfl.view,
    images=mnfl.drawn_anew,
    traffic=lambda model, models, t: (PUBLIC * CLASSES, PUBLIC * CLASSES + PUBLIC),
    returns=False,
    short={"public_batch": 4},
    comparisons={
        "": Comparison(OPTIONS, [("weights", "plain")], UNLIKE),
        "plain cosines": local_statistics(("kl_weight", 0.91), weights="plain", **OPTIONS),
    },
)

topk_pfd = sim_pfd._replace(
    method="topk-pfd",
    step=stepped(by_rank),
    comparisons={
        "": Comparison(OPTIONS | {"neighbours": 2}, [("neighbours", 3)], UNLIKE),
        "local statistics": local_statistics(("neighbours", 1), neighbours=2, **OPTIONS),
    },
    reductions=(with_all_clients_as_neighbours_it_is_fedmd,),
)
