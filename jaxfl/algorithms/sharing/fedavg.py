"""FedAvg: one global model, the weighted mean of local ones.

McMahan et al. 2017, arXiv:1602.05629, Algorithm 1. With n_i training rows on client i of the cohort S_t, and
LocalSGD for E epochs over them with the training optimizer (`jaxfl.core.training`):

    w_i <- LocalSGD(w)
    w   <- sum_i n_i w_i / sum_i n_i

FedAvg-FT (Yu et al. 2020, arXiv:2002.04758): the same training, but each client fine-tunes a copy before use.
It fine-tunes the head, as in CompFL's appendix A, here for E epochs with the training optimizer;
``ft_part="all"`` fine-tunes the whole model.

FedOpt (FedAvgM, FedAdam, FedYogi): FedAvg or FedAvg-FT with a `server_optimizer`, see
`jaxfl.mechanisms.server_steps`.
"""

from typing import Literal

from jaxfl.authoring import (
    Algorithm,
    FineTuned,
    Method,
    ServerSteps,
    fine_tuning,
    options,
    server_steps,
    sharing,
)


@options
class FedAvg(ServerSteps):
    """Options of FedAvg."""


@options
class FedAvgFT(FineTuned, ServerSteps):
    """Options of FedAvg-FT."""

    ft_part: Literal["head", "all"] = "head"
    """The part that is fine-tuned."""


def build(config: FedAvg) -> Algorithm:
    """Share all leaves."""
    return sharing(config, memory=server_steps(config))


def build_ft(config: FedAvgFT) -> Algorithm:
    """Share all leaves, and fine-tune before use."""
    return sharing(config, tune=fine_tuning(config), memory=server_steps(config))


fedavg = Method(
    "fedavg",
    build,
    FedAvg,
    "one global model, the weighted mean of local ones",
    "McMahan et al. 2017, arXiv:1602.05629",
    """@inproceedings{mcmahan2017communication,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and 
          {Ag{\\"u}era y Arcas}, Blaise},
  booktitle={AISTATS}, year={2017}}""",
)

fedavg_ft = Method(
    "fedavg-ft",
    build_ft,
    FedAvgFT,
    "FedAvg, fine-tuned by each client before use",
    "Yu et al. 2020, arXiv:2002.04758",
    """@article{yu2020salvaging,
  title={Salvaging Federated Learning by Local Adaptation},
  author={Yu, Tao and Bagdasaryan, Eugene and Shmatikov, Vitaly},
  journal={arXiv:2002.04758}, year={2020}}""",
)
