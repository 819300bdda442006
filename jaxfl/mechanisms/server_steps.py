"""Server optimisers: the server steps towards the mean of the clients' models instead of taking it.

Reddi et al. 2021, "Adaptive Federated Optimization", arXiv:2003.00295, Algorithms 1 and 2. x is the shared
model, x_i client i's model after its training:

    Delta <- sum_i n_i (x_i - x) / sum_i n_i
    x     <- x + a step of SGD with momentum, Adam or Yogi along Delta, of rate server_lr

The steps are Optax's: unlike the paper, Adam and Yogi correct the bias of their moments, and Yogi's first
moment starts at 1e-6, as its second one does; beta_2 is 0.99 and tau 1e-3 as there. BatchNorm's running
statistics are averaged.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import options, within
from jaxfl.errors import JaxflError
from jaxfl.mechanisms.sharing import Averaging, Means, Memory
from jaxfl.models.model import Model, Weights


@options
class ServerSteps(Averaging):
    """Options of methods whose server may have an optimiser."""

    server_optimizer: Literal["none", "sgd", "adam", "yogi"] = "none"
    """How the server steps towards the mean of the clients' models; none: it takes that mean."""
    server_lr: float | None = within("(0, inf)", None)
    """The server's learning rate; by default 1 for sgd, 0.01 for adam and yogi."""
    server_momentum: float | None = within("[0, 1)", None)
    """Momentum of sgd, beta_1 of adam and yogi; by default 0.9."""


OPTIMIZERS = {
    "sgd": optax.sgd,
    "adam": lambda lr, momentum: optax.adam(lr, momentum, 0.99, 1e-3),
    "yogi": lambda lr, momentum: optax.yogi(lr, momentum, 0.99, 1e-3),
}
RATES = {"sgd": 1.0, "adam": 0.01, "yogi": 0.01}


def server_steps(config: ServerSteps) -> Memory:
    """Return the `Memory`, for `sharing`, of a server that steps towards its clients' mean.

    Raises:
      JaxflError: if a server without an optimiser is given a rate.
    """
    name = config.server_optimizer
    if name == "none":
        for option in ("server_lr", "server_momentum"):
            if getattr(config, option) is not None:
                flag = option.replace("_", "-")
                raise JaxflError(
                    f"--{flag} is a rate of the server's optimiser, but there is none; add "
                    f"--server-optimizer sgd, adam or yogi, or leave --{flag} out."
                )
        return Memory()

    def optimizer(hyper: ServerSteps) -> optax.GradientTransformation:
        lr = RATES[name] if hyper.server_lr is None else hyper.server_lr
        momentum = 0.9 if hyper.server_momentum is None else hyper.server_momentum
        return OPTIMIZERS[name](lr, momentum)

    def start(model: Model, x: Weights, hyper: ServerSteps) -> Any:
        return optimizer(hyper).init(x.params)

    def step(x: Weights, opt_state: Any, means: Means, hyper: ServerSteps) -> tuple[Weights, Any]:
        mean = means.shared
        downhill = jax.tree.map(jnp.subtract, x.params, mean.params)
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
            change, opt_state = optimizer(hyper).update(downhill, opt_state, x.params)
        return mean._replace(params=optax.apply_updates(x.params, change)), opt_state

    return Memory(server=start, aggregate=step)
