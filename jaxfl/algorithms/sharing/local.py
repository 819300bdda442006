"""Local training: every client trains alone; the baseline for collaboration.

w_i <- LocalSGD(w_i)
"""

from typing import Literal

from jaxfl.authoring import Algorithm, Info, Method, Training, every_leaf, everyone, gather, options, sharing


@options
class Local(Training):
    """Options of Local."""

    local_schedule: Literal["as_sampled", "all"] = "as_sampled"
    """Clients that train: the round's cohort, or all in every round (as in CompFL's Standalone)."""


def build(config: Local) -> Algorithm:
    """Keep every block."""
    algorithm = sharing(config, keep=every_leaf)

    def step_all(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, everyone(federation, cohort, joining=True))
        loss, up, down = (gather(part, cohort) for part in (info.loss, info.up, info.down))
        return state, Info(loss, up, down, trained=info.trained and gather(info.trained, cohort))

    return algorithm._replace(step=step_all) if config.local_schedule == "all" else algorithm


local = Method("local", build, Local, "every client alone; nothing is sent")
