"""The next token: of each token of a row what follows it; perplexity.

A network has scores of all V tokens at each place of a row, (B, T, V): those at t are to say what is at
t + 1. Labels (N, T) are the tokens moved by one place, -1 where there is none: at the end of a row and after
it. These places count in no loss and no score, and networks of the zoo have outputs of 0 after the end, so
that two of them say the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfl.errors import JaxflError
from jaxfl.tasks.task import Metric, Task


class Said(NamedTuple):
    """What is counted of some rows' tokens: of each row (k, m), or of k clients' rows together (k,).

    Args:
      loss: float, the sum of their cross-entropies.
      right: int32, how many are the likeliest ones.
      tokens: int32, how many there are.
    """

    loss: jax.Array
    right: jax.Array
    tokens: jax.Array


def said(outputs, labels) -> Said:
    """Compare outputs (B, T, V) with the tokens (B, T) that follow, by row."""
    real, true = labels >= 0, jnp.maximum(labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, true)
    right = (outputs.argmax(-1).astype(labels.dtype) == labels) & real
    return Said(losses.sum(1, where=real), right.sum(1, dtype=jnp.int32), real.sum(1, dtype=jnp.int32))


def _losses(outputs, y):
    """Return the mean over each row's tokens."""
    of_rows = said(outputs, y)
    return of_rows.loss / jnp.maximum(of_rows.tokens, 1).astype(outputs.dtype)


def _quality(outputs, y, size):
    """Return the share of tokens that are the likeliest ones, over all rows."""
    real, of_rows = jnp.arange(len(y), dtype=jnp.int32) < size, said(outputs, y)
    right, tokens = (part.sum(where=real, dtype=jnp.int32) for part in of_rows[1:])
    return right.astype(outputs.dtype) / jnp.maximum(tokens, 1).astype(outputs.dtype)


def perplexity(counts: Any) -> np.ndarray:
    """Return each client's perplexity, the exponential of the mean cross-entropy of its tokens, (n,)."""
    with np.errstate(over="ignore"):
        return np.exp(counts.loss / np.maximum(counts.tokens, 1))


def token_accuracy(counts: Any) -> np.ndarray:
    """Return the share of each client's tokens that are the likeliest ones, (n,)."""
    return counts.right / counts.tokens


def read(name: str, labels: None, examples: np.ndarray, outputs: int) -> tuple[np.ndarray, int]:
    """Return the tokens that follow, (N, T) int32, see `Task.read`."""
    if examples.ndim != 2:
        raise JaxflError(
            f"{name}: --task next-token takes tokens, but the data are of shape {examples.shape}."
        )
    following = np.pad(examples[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    if (alone := (following < 0).all(1)).any():
        raise JaxflError(
            f"{name}: {alone.sum()} of {len(examples)} rows have a single token, the first is row "
            f"{alone.argmax()}, and nothing follows it; leave them out."
        )
    return following, outputs


def chance(following: np.ndarray) -> str:
    """Return the perplexity of saying each token as often as it is there, in words."""
    share = np.bincount(following[following >= 0])
    share = share[share > 0] / share.sum()
    found = np.exp(-(share * np.log(share)).sum())
    return f"Saying each token as often as it is there has a perplexity of {found:.4g}."


NEXT_TOKEN = Task(
    name="next-token",
    what="the token that follows",
    outputs="tokens",
    form=("i", 2),
    read=read,
    strata=lambda labels: np.zeros(len(labels), np.int32),
    aim=lambda labels, relabel: labels,
    losses=_losses,
    answer=said,
    label=lambda outputs, classes, target: classes[outputs.argmax(-1)],
    count=lambda labels, relabel, std, answers, real: Said(
        *(of_rows.sum(1, where=real, dtype=of_rows.dtype) for of_rows in answers)
    ),
    each=perplexity,
    pooled=lambda counts: float(perplexity(Said(*(part.sum() for part in counts)))),
    metrics=(Metric("token-accuracy", "token accuracy", token_accuracy, recorded=("mean", "per_client")),),
    title="perplexity",
    percent=False,
    better=min,
    quality=_quality,
    soft=lambda outputs, temperature=1: jax.nn.softmax(outputs / temperature),
    apart=lambda outputs, soft, temperature=1: optax.kl_divergence(
        jax.nn.log_softmax(outputs / temperature), soft
    ).mean(1),
    hub="generation",
    says="Output k at each place is the score of token k as the next one.",
    code="following = scores.argmax(-1)",
    chance=chance,
    every_token=True,
)
