"""Local training: every client alone, the lower bound of any collaboration.

w_i <- LocalSGD(w_i)
"""

from typing import Literal

from jaxfl.config.options import options
from jaxfl.core.client_map import everyone, gather
from jaxfl.core.protocol import Algorithm, Info, Method
from jaxfl.core.training import Training
from jaxfl.mechanisms.sharing import partial_sharing


@options
class Local(Training):
    """Options of Local."""

    local_schedule: Literal["as_sampled", "all"] = "as_sampled"
    """Who trains: the round's cohort, or every client in every round (as CompFL's Standalone)."""


def build(config: Local) -> Algorithm:
    """Keep every block."""
    algorithm = partial_sharing(config, keep=lambda model: model.names)

    def step_all(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, everyone(federation, cohort))
        return state, Info(*(gather(reported, cohort) for reported in info[:3]))  # of the cohort alone

    return algorithm._replace(step=step_all) if config.local_schedule == "all" else algorithm


local = Method("local", build, Local, "every client alone; nothing is sent")
