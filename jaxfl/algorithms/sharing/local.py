"""Local training: every client alone; nothing is sent.

w_i <- LocalSGD(w_i)
"""

from typing import Literal

from jaxfl import fl


@fl.options
class Local(fl.Training):
    """Options of Local."""

    local_schedule: Literal["as_sampled", "all"] = "as_sampled"
    """Clients that train: the round's cohort, or all in every round (as in CompFL's Standalone)."""


def build(config: Local) -> fl.Algorithm:
    """Keep every block."""
    algorithm = fl.sharing(config, keep=fl.every_leaf)

    def step_all(key, state, federation, cohort):
        state, info = algorithm.step(key, state, federation, fl.everyone(federation, cohort, joining=True))
        loss, up, down = (fl.gather(part, cohort) for part in (info.loss, info.up, info.down))
        return state, fl.Info(loss, up, down, trained=info.trained and fl.gather(info.trained, cohort))

    return algorithm._replace(step=step_all) if config.local_schedule == "all" else algorithm


local = fl.Method("local", build, Local)
