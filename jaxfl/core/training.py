"""Local training: an update folded over mini-batches.

`fit` is the loop that every method shares, LocalSGD in their formulas. It folds ``update(carry, batch, key)``
over the mini-batches of some `Examples`, only as many as the rows fill, so unequal clients need no padded
steps. It also counts their operations (see `jaxfl.core.flops`). `descend` is the update that most methods
use: it minimises a loss over some of the model's blocks with an Optax optimiser. A method gives only what
differs: another loss, another optimiser, a correction of the gradients, or a tally of values from its
batches.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.config.options import client_rate, options, within
from jaxfl.config.own_code import line_of, require_call
from jaxfl.core import flops
from jaxfl.core.batches import (
    Epochs,
    Steps,
    batch_order,
    batches_per_epoch,
    batches_per_phase,
    complete_passes,
)
from jaxfl.core.dp_sgd import noisy_descent, require_alone
from jaxfl.core.examples import Examples
from jaxfl.core.streams import FURTHER_PARTS
from jaxfl.data.federation import Batch
from jaxfl.errors import JaxflError
from jaxfl.models.model import Model, Weights
from jaxfl.models.norms import needing_two_rows


@options
class Training:
    """Local training, the same for every method. Rates are traced: changing one does not recompile."""

    epochs: int | float = within("[0.001, inf)", 5)
    """E, passes over a client's rows in a round. 0.5 is the first half of a shuffled epoch's mini-batches,
    rounded up; fractions are precise to a thousandth."""
    steps: int | None = within("[1, inf)", None)
    """Mini-batches of every client per round, instead of E epochs. They span as many shuffled epochs as
    needed."""
    batch_size: int = within("[1, inf)", 10)
    """B, rows per mini-batch; the last one of an epoch holds the remainder."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Initialised anew for each client in each round. adam and adamw need a smaller lr, such as 0.001."""
    lr: float = client_rate("(0, inf)", 0.05)
    """Learning rate of clients."""
    momentum: float = within("[0, 1)", 0.5)
    """Momentum of sgd; the others have none."""
    weight_decay: float = within("[0, inf)", 5e-4)
    """Added to the gradient as weight_decay * w (sgd, adam) or decoupled (adamw)."""
    clip_norm: float | None = within("(0, inf)", None)
    """Largest norm of a mini-batch's gradient; a larger one is scaled down to it. By default no limit."""
    bn_stats: Literal["aggregate", "local"] = "aggregate"
    """BatchNorm's running statistics: averaged with their layer, or never sent."""
    augment: tuple[Literal["crop", "flip", "rotate", "cutout", "colour"], ...] = ()
    """Random changes of a client's own training images, one after another: crop (shifted by up to an eighth,
    padded with zeros), flip (mirrored with probability 1/2), rotate (by up to 15 degrees, padded with zeros),
    cutout (zeros in a square of half the height), colour (brightness, contrast and saturation by up to 40 %,
    hue by up to 36 degrees)."""

    def __post_init__(self):
        """Raise `JaxflError` if steps are given together with epochs other than the default."""
        if self.steps is not None and self.epochs != type(self).epochs:
            raise JaxflError(
                f"--steps {self.steps} and --epochs {self.epochs} exclude each other; leave one of them out, "
                "or write --steps none."
            )

    @property
    def length(self) -> Epochs:
        """Length of local training in a round."""
        return self.epochs if self.steps is None else Steps(self.steps)


def sgd(hyper: Training, lr=None) -> optax.GradientTransformation:
    """Return SGD with the momentum and weight decay of `hyper`, and its learning rate if `lr` is None."""
    return optax.chain(
        optax.add_decayed_weights(hyper.weight_decay),
        optax.sgd(hyper.lr if lr is None else lr, hyper.momentum),
    )


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda hyper: optax.chain(optax.add_decayed_weights(hyper.weight_decay), optax.adam(hyper.lr)),
    "adamw": lambda hyper: optax.adamw(hyper.lr, weight_decay=hyper.weight_decay),
}


def local_optimizer(
    hyper: Training,
    optimizer: optax.GradientTransformation | None = None,
    correction: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Return the optimiser of local training, or another one, after clipping if `hyper` asks for it.

    Args:
      hyper: the optimiser's name, its rates, and the largest norm of a gradient.
      optimizer: used instead of the one that `hyper` names.
      correction: a change of the gradients after clipping.
    """
    clip = None if hyper.clip_norm is None else optax.clip_by_global_norm(hyper.clip_norm)
    return optax.chain(*filter(None, (clip, correction)), optimizer or OPTIMIZERS[hyper.optimizer](hyper))


def improve(
    loss: Callable, params: Any, opt_state: Any, optimizer: optax.GradientTransformation
) -> tuple[Any, Any, jax.Array, Any]:
    """Take one step of an optimiser.

    Args:
      loss: ``params -> (value, more)``.
      params: any pytree of floats.
      opt_state: the optimiser's state; at first ``optimizer.init(params)``.
      optimizer: any Optax optimiser.

    Returns:
      The new params, the optimiser's new state, the value and `more`.
    """
    (value, more), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        step, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, step), opt_state, value, more


class Fitted(NamedTuple):
    """Result of `fit`: the carry, the mean loss over all batches (0 if there are none), their number."""

    carry: Any
    loss: jax.Array
    steps: jax.Array  # () int32


def fit(
    update: Callable,
    carry,
    key,
    examples: Examples | tuple[Examples, ...],
    *,
    epochs: Epochs,
    batch_size: int,
    phase: int | None = 0,
) -> Fitted:
    """Fold an update over mini-batches, epoch after epoch.

    A last batch of one row is left out where it would train BatchNorm on single values, see
    `jaxfl.models.norms`.

    Args:
      update: ``(carry, batch, key) -> (carry, loss)``.
      carry: what the update changes.
      key: of this client in this round.
      examples: where batches are taken from. For a tuple of m, the update gets m independent batches, one
        from each, and an epoch has 1/m of the steps, at least one, so that the number of rows in all stays
        the same.
      epochs: passes over the rows; a fraction is rounded up to whole batches, see `batches_per_phase`. An
        array () int32 may differ by client and round.
      batch_size: rows of a mini-batch.
      phase: number of this local phase within the client's round; phases with other numbers draw other
        batches. None if `key` is only for this phase. For the keys of epochs and batches see
        `jaxfl.core.streams`; part i of several `examples` uses ``fold_in(batch's key, i)``.

    Raises:
      JaxflError: if batches hold one row, and all would be left out, or if single rows are private.
    """
    key = _of_phase(key, phase)
    several = not isinstance(examples, Examples)
    parts = examples if several else (examples,)
    if any(part.privacy for part in parts):
        raise JaxflError(
            "--privacy rows protects what descend learns from own_rows, but the method trains on them in "
            "another way; leave it out."
        )
    batch_size = min(batch_size, max(2, *(part.capacity for part in parts)))  # longer ones hold only padding
    places = jnp.arange(batch_size, dtype=jnp.int32)
    # Traced once, for its blocks, its operations and the loop; the partial function was never traced before.
    update = jax.jit(functools.partial(update), inline=True)

    def taken(positions, masks, key):
        """Return the batches at some positions of each part."""
        keys = [jax.random.fold_in(key, i) for i in range(len(parts))] if several else [key]
        drawn = zip(parts, positions, masks, keys, strict=True)
        found = tuple(part.take(position, mask, key) for part, position, mask, key in drawn)
        return found if several else found[0]

    whole = [places] * len(parts), [places < part.size for part in parts]
    batch = jax.eval_shape(lambda: taken(*whole, key))
    with needing_two_rows() as blocks:
        operations = flops.of(update, carry, batch, key)
    if blocks and batch_size == 1:
        raise JaxflError(
            f"A network has BatchNorm (in its block {min(blocks)!r}), which needs batches of two rows or "
            "more; raise --batch-size, or the method's own option for these batches, or build it with "
            "norm=none."
        )
    counts = [batches_per_epoch(part.size, batch_size, skip_single_row=bool(blocks)) for part in parts]
    fewest = jnp.stack(counts).min()
    count = jnp.maximum(fewest // len(parts), jnp.minimum(fewest, 1))
    smallest = jnp.stack([part.size for part in parts]).min()
    total = batches_per_phase(epochs, count)
    rows_of_epoch = jnp.minimum(smallest, count * batch_size)
    complete = complete_passes(epochs)
    if complete is None:
        passes, rest = jnp.divmod(total, jnp.maximum(count, 1))
        rows = passes * rows_of_epoch + jnp.minimum(smallest, rest * batch_size)
        passes += (rest > 0).astype(rest.dtype)
    else:
        passes = complete
        rows = passes * rows_of_epoch
    flops.add(operations / batch_size * rows.astype(float))

    def epoch(e, carried):
        epoch_key = jax.random.fold_in(key, e)
        orders = [
            # The first part's order is the one that it would have alone.
            batch_order(
                jax.random.fold_in(epoch_key, FURTHER_PARTS - i) if i else epoch_key, part.size, part.capacity
            )
            for i, part in enumerate(parts)
        ]

        def step(b, carried):
            carry, so_far = carried
            place = b * batch_size + places
            positions = [order.at[place].get(mode="clip") for order in orders]
            masks = [place < part.size for part in parts]
            batch_key = jax.random.fold_in(epoch_key, b)
            carry, loss = update(carry, taken(positions, masks, batch_key), batch_key)
            return carry, so_far + loss

        left = jnp.minimum(count, total - e * count) if complete is None else count
        return jax.lax.fori_loop(jnp.zeros_like(left), left, step, carried)

    zero = jnp.zeros((), jnp.result_type(float))
    carry, loss = jax.lax.fori_loop(0, passes, epoch, (carry, zero))
    return Fitted(carry, loss / jnp.maximum(total, 1).astype(loss.dtype), total)


def _of_phase(key, phase: int | None):
    return key if phase is None else jax.random.fold_in(key, phase)


def steps_of(size, model: Model, hyper: Training):
    """Return the number of mini-batches, () int32, of a round in which a model trains on `size` rows."""
    count = batches_per_epoch(size, hyper.batch_size, skip_single_row=bool(model.needing_two_rows))
    return batches_per_phase(hyper.length, count)


class Trained(NamedTuple):
    """Result of `descend`.

    Args:
      weights: the trained model.
      loss: (), the mean over all batches; 0 if there are none.
      steps: () int32, number of mini-batches.
      tally: the sum of what the loss observed, if a tally was asked for.
    """

    weights: Weights
    loss: jax.Array
    steps: jax.Array
    tally: Any = None


def descend(
    loss: Callable,
    weights: Weights,
    key,
    examples: Examples | tuple[Examples, ...],
    hyper: Training,
    *,
    blocks: Collection[str] | None = None,
    epochs: Epochs | None = None,
    batch_size: int | None = None,
    phase: int | None = 0,
    optimizer: optax.GradientTransformation | None = None,
    correction: optax.GradientTransformation | None = None,
    tally: Any = None,
) -> Trained:
    """Minimise a loss over some blocks by mini-batch steps of a new optimiser.

    Other blocks keep their parameters bit for bit: they get neither gradients nor weight decay. Private rows
    get the noisy steps of `jaxfl.core.dp_sgd`.

    Args:
      loss: ``(weights, batch, key) -> (value, stats)``, the mean over the batch's real rows; with a `tally`
        ``-> (value, stats, observed)``.
      weights: the model before training.
      key: of this client in this round.
      examples: where batches are taken from, see `fit`.
      hyper: optimiser, rates, epochs and batch size, unless given below.
      blocks: names of the blocks that train; all by default.
      epochs: passes over the examples, see `fit`; by default the epochs or steps of `hyper`.
      batch_size: rows of a mini-batch.
      phase: number of this local phase within the client's round, see `fit`.
      optimizer: any Optax optimiser; by default the one that `hyper` names.
      correction: a change of the gradients before the optimiser (control variates), after clipping if `hyper`
        asks for it.
      tally: initial value of the sum of what the loss observes; not differentiated.

    Raises:
      JaxflError: as `fit`, if the loss returns something else, naming its file and line, or if private rows
        meet BatchNorm, a tally, or batches of another size than the accountant's.
    """
    require_call("loss", loss, "weights", "batch", "key")
    blocks = weights.params.keys() if blocks is None else blocks
    batch_size = batch_size or hyper.batch_size
    optimizer = local_optimizer(hyper, optimizer, correction)
    frozen = {name: leaves for name, leaves in weights.params.items() if name not in blocks}
    free = {name: leaves for name, leaves in weights.params.items() if name in blocks}

    length = hyper.length if epochs is None else epochs

    def objective(free, stats, batch, key):
        found = loss(Weights(frozen | free, stats), batch, key)
        _check_loss(loss, found, stats, tally)
        value, *rest = found
        return value, rest

    if isinstance(examples, Examples) and examples.privacy:
        require_alone(weights.stats, counted=tally is None and batch_size == hyper.batch_size)
        free, value, taken = noisy_descent(
            lambda free, row, key: objective(free, weights.stats, row, key)[0],
            free,
            optimizer,
            _of_phase(key, phase),
            examples,
            epochs=length,
            batch_size=batch_size,
        )
        return Trained(Weights(frozen | free, weights.stats), value, taken)

    def update(carry, batch, key):
        free, stats, opt_state, tally = carry
        free, opt_state, value, (stats, *observed) = improve(
            lambda free: objective(free, stats, batch, key), free, opt_state, optimizer
        )
        tally = jax.tree.map(jnp.add, tally, *observed)
        return (free, stats, opt_state, tally), value

    carry = free, weights.stats, optimizer.init(free), tally
    (free, stats, _, tally), value, taken = fit(
        update, carry, key, examples, epochs=length, batch_size=batch_size, phase=phase
    )
    return Trained(Weights(frozen | free, stats), value, taken, tally)


def _check_loss(loss: Callable, found: Any, stats: Any, tally: Any) -> None:
    """Raise `JaxflError`, naming file and line, if a loss does not return what `descend` needs."""
    parts = ("value", "statistics") if tally is None else ("value", "statistics", "observed")
    if not isinstance(found, tuple) or len(found) != len(parts):
        raise JaxflError(f"{line_of(loss)}: a loss must return ({', '.join(parts)}) and nothing else.")
    shape, dtype = jnp.shape(found[0]), jnp.result_type(found[0])
    if shape or not jnp.issubdtype(dtype, jnp.floating):
        raise JaxflError(
            f"{line_of(loss)}: a loss must return one number, a mean over rows such as mean(losses, batch), "
            f"but its value is {dtype.name}{list(shape)}."
        )
    if jax.tree.structure(found[1]) != jax.tree.structure(stats):
        raise JaxflError(
            f"{line_of(loss)}: after its value, a loss must return the statistics of all blocks: as "
            "model.apply returns them, or unchanged for a block that it does not apply."
        )


def mean(values, batch: Batch):
    """Return the mean of per-row values (B,) over the batch's real rows; any others raise a ValueError."""
    if values.shape != batch.mask.shape:
        raise ValueError(f"a mean is of one value per row, {batch.mask.shape}, not of {values.shape}")
    mask = batch.mask.astype(values.dtype)
    return jnp.sum(values * mask) / jnp.maximum(mask.sum(), 1)


def forward(model: Model, weights: Weights, batch: Batch, key) -> tuple[jax.Array, Any]:
    """Apply a whole model in training mode to a mini-batch: logits (B, classes), and new statistics."""
    logits, stats = model.apply(weights.params, weights.stats, batch.x, train=True, key=key, mask=batch.mask)
    return logits, weights.stats | stats


def task_loss(model: Model, blocks: Collection[str] | None = None) -> Callable:
    """Return the task's loss, such as cross-entropy, with `blocks` (all by default) in training mode."""
    trains = model.names if blocks is None else tuple(blocks)

    def loss(w, batch, key):
        logits, stats = model.apply(w.params, w.stats, batch.x, train=trains, key=key, mask=batch.mask)
        return mean(model.task.losses(logits, batch.y), batch), w.stats | stats

    return loss
