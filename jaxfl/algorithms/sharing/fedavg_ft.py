"""FedAvg-FT: FedAvg, fine-tuned by each client before use.

Yu et al. 2020, "Salvaging Federated Learning by Local Adaptation", arXiv:2002.04758. Rounds are those of
`fedavg`. Before use each client fine-tunes a copy of the global model: its head, as in CompFL's appendix A,
here for E epochs with the training optimizer; ``ft_part="all"`` fine-tunes the whole model.
"""

from typing import Literal

from jaxfl import fl


@fl.options
class FedAvgFT(fl.FineTuned, fl.ServerSteps):
    """Options of FedAvg-FT."""

    ft_part: Literal["head", "all"] = "head"
    """The part that is fine-tuned."""


def build(config: FedAvgFT) -> fl.Algorithm:
    """Share all leaves, and fine-tune before use."""
    return fl.sharing(config, tune=fl.fine_tuning(config), memory=fl.server_steps(config))


fedavg_ft = fl.Method("fedavg-ft", build, FedAvgFT)
