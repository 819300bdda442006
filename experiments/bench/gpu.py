"""Ways to convolve and pool on a GPU, timed in turn, and the kernels that take the time of a round.

    python experiments/bench/gpu.py W2 auto now added-up barrier height-first strips written
    python experiments/bench/gpu.py W3 tf32 now --kernels

The words after a workload and a strategy of `jaxfl bench` are ways; "now" is what jaxfl does.
docs/accelerators.md has the results.
"""

import argparse
import functools
import glob
import math
import statistics
import tempfile
import time
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxfl.bench.contestants import in_jaxfl
from jaxfl.bench.workloads import VARIANTS, WORKLOADS, setup_of, source_of, strategies
from jaxfl.core.cohorts import draw_cohorts
from jaxfl.folder import variant
from jaxfl.models import blocks, conv
from jaxfl.runs.prepare import prepare

REPETITIONS = 3


def added_up(x, size, place):
    """Take windows side by side as slices with a step, whose gradients are padded and added up."""
    return conv._shifted(x, size, size, place)


def height_first(x, kernel, stride):
    """Convolve by patches along the height, then the width."""
    kh, kw, channels, features = kernel.shape
    x = jnp.concatenate(conv._shifted(x, kh, stride, 1), axis=-1)
    x = jnp.concatenate(conv._shifted(x, kw, stride, 2), axis=-1)
    return jnp.tensordot(x, kernel.swapaxes(0, 1).reshape(kh * kw * channels, features), axes=1)


def strips(x, kernel, stride):
    """Convolve by patches along the width only, and the sum of one product for each row of the kernel."""
    kh, kw, channels, features = kernel.shape
    x = jnp.concatenate(conv._shifted(x, kw, stride, 2), axis=-1)
    rows = zip(conv._shifted(x, kh, stride, 1), kernel.reshape(kh, kw * channels, features), strict=True)
    return functools.reduce(jnp.add, (jnp.tensordot(x, row, axes=1) for x, row in rows))


@jax.custom_vjp
def barred(x):
    """Return x; its gradient is materialised once, before it is used."""
    return x


barred.defvjp(lambda x: (x, None), lambda _, dy: (lax.optimization_barrier(dy),))


class Barred(blocks.Conv):
    """A convolution with a barrier after the gradient of its output, for the bias and the kernel alike."""

    @nn.compact
    def __call__(self, x, *, train, mask):
        """Apply the layer as `Conv` does."""
        dtype = jnp.result_type(float)
        shape = (*self.size, x.shape[conv.axis("C")], self.features)
        start = blocks.uniform(math.prod(shape[:3]))
        x = conv.conv(x, self.param("kernel", start, shape, dtype), self.stride, self.padding)
        if self.bias:
            x = x + conv.along("C", self.param("bias", start, (self.features,), dtype))
        x = barred(x)
        return blocks.Norm(name="norm")(x, train=train, mask=mask) if self.norm else x


def written(x, kernel, stride):
    """Convolve by patches along the width, then the height, both materialised."""
    kh, kw, channels, features = kernel.shape
    x = lax.optimization_barrier(jnp.concatenate(conv._shifted(x, kw, stride, 2), axis=-1))
    x = lax.optimization_barrier(jnp.concatenate(conv._shifted(x, kh, stride, 1), axis=-1))
    return jnp.tensordot(x, kernel.reshape(kh * kw * channels, features), axes=1)


WAYS = {  # {name: (how to convolve, how to take windows side by side, the block)}
    "now": (conv._patches, conv._split, blocks.Conv),
    "added-up": (conv._patches, added_up, blocks.Conv),
    "barrier": (conv._patches, conv._split, Barred),
    "height-first": (height_first, conv._split, blocks.Conv),
    "strips": (strips, conv._split, blocks.Conv),
    "written": (written, conv._split, blocks.Conv),
}


def use(way: str) -> None:
    """Make networks use a way from here on, and forget what was compiled before."""
    patches, conv._split, blocks.Conv = WAYS[way]
    conv.CONVOLUTIONS["patches"] = conv.Convolution("BHWC", patches)
    variant._kept_programs.cache_clear()
    jax.clear_caches()


def contestant(name: str, strategy: str):
    """Return FedAvg on a workload, with a round for each repetition and two more."""
    workload = (WORKLOADS | VARIANTS)[name]
    method = variant.choose("fedavg", workload.training)
    ((_, way),) = strategies([strategy]).items()
    setup = setup_of(workload).replace(**way.setup)
    source, _ = source_of(workload, setup, lambda sentence: None)
    federation = prepare(setup, source=source).federation
    counts = [len(group.id) for group in federation.groups]
    runs = [draw_cohorts(counts, setup.run.participation, REPETITIONS + 2, setup.run.seed)]
    return in_jaxfl(strategy, way, method, setup, federation, runs, 1)


def seconds(train, number: int) -> float:
    """Return the seconds of a round."""
    begun = time.perf_counter()
    train(number)
    return time.perf_counter() - begun


def kernels(train) -> None:
    """Print the kernels of one more round, the longest first; some may run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            train(REPETITIONS + 1)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = [one for one in jax.profiler.ProfileData.from_file(path).planes if "GPU" in one.name]
    events = [
        event for plane in planes for line in plane.lines if "Stream" in line.name for event in line.events
    ]
    took, times = Counter(), Counter(event.name for event in events)
    for event in events:
        took[event.name] += event.duration_ns
    print(f"  {sum(took.values()) / 1e6:.1f} ms in {len(events):,} kernels")
    for name, ns in took.most_common(15):
        print(f"  {ns / 1e6:8.2f} ms, {times[name]:5d} of {ns / times[name] / 1e3:7.1f} us  {name[:70]}")


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload")
    parser.add_argument("strategy")
    parser.add_argument("ways", nargs="+", choices=WAYS)
    parser.add_argument("--kernels", action="store_true", help="trace one more round of each")
    asked = parser.parse_args()
    for way in asked.ways:
        use(way)
        one = contestant(asked.workload, asked.strategy)
        one.train(0)
        took = [seconds(one.train, number) for number in range(1, REPETITIONS + 1)]
        assert one.checksum
        bits = one.checksum()
        print(
            f"{asked.workload} {asked.strategy} {way}: {statistics.median(took):.4f} s a round, "
            f"compiled in {one.compile_s:.1f} s, bits {bits}"
        )
        if asked.kernels:
            kernels(one.train)


if __name__ == "__main__":
    main()
