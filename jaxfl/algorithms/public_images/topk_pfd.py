"""TopK-pFD: clients of any architecture learn from the K whose predictions on public images are most alike.

Beikmohammadi et al. (MNFL), section 5.1, and KT-pFL's code (Zhang et al. 2021, arXiv:2111.02862). The rounds
are those of `jaxfl.mechanisms.exchange`, with the cosines of `sim_pfd`:

    C[n, m] = 1/K for the K clients with the greatest cos_nm, n itself among them

K = 5 is the paper's; the code takes the clients above the median.
"""

import jax
import jax.numpy as jnp

from jaxfl import fl
from jaxfl.algorithms.public_images.sim_pfd import cosines


@fl.options
class TopKPFD(fl.Exchange):
    """Options of TopK-pFD."""

    neighbours: int = fl.within("[1, inf)", 5)
    """K, number of clients that teach one; all that take part if there are fewer."""


def build(config: TopKPFD) -> fl.Algorithm:
    """Exchange predictions with equal weights for the nearest clients."""

    def weigh(matrix, i, s, hyper):
        present = i != fl.NOBODY
        # The client itself comes first, even if rounding makes its own cosine smaller than another's.
        cosine = jnp.where(jnp.eye(len(i), dtype=bool), 2, cosines(s, present))
        _, nearest = jax.lax.top_k(cosine, min(config.neighbours, len(i)))
        chosen = jax.nn.one_hot(nearest, len(i), dtype=s.dtype).sum(1)
        return fl.mixing.row_stochastic(jnp.where(present[None], chosen, 0), i, i)

    return fl.exchanging(config, weigh=weigh)


topk_pfd = fl.Method("topk-pfd", build, TopKPFD, needs=("public",))
