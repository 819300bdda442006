"""pFedClub+: pFedClub with teachers that are hardly larger than the clients' networks.

Wang et al. 2024, "Controllable Heterogeneous Model Aggregation for Personalized Federated Learning", NeurIPS,
section 4.4. Rounds are those of `pfedclub`, with only candidates of at most (1 + eta) |w_m| parameters,
eta > -1. If no run of the search finds one, the client's own model is its teacher, whatever eta is.
"""

from jaxfl import fl
from jaxfl.algorithms.reassembly import pfedclub


@fl.options
class PFedClubPlus(pfedclub.PFedClub):
    """Options of pFedClub+."""

    eta: float = fl.within("(-1, inf)", 0.1)
    """Share by which a teacher may exceed the client's model; below 0, by which it must be smaller."""


def build(config: PFedClubPlus) -> fl.Algorithm:
    """Build pFedClub with teachers of bounded size."""
    return pfedclub.build(config, eta=lambda options: options.eta)


pfedclub_plus = pfedclub.pfedclub._replace(name="pfedclub-plus", build=build, config=PFedClubPlus)
