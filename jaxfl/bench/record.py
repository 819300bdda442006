"""What a benchmark keeps of each contestant, in JSON."""

from typing import NamedTuple


class Record(NamedTuple):
    """One contestant. Medians are those of the repetitions, ratios are taken within each.

    Args:
      method: as it was chosen, perhaps with options.
      strategy: its name, or `TORCH`.
      samples_per_s: training rows, each as often as it is used: the median; this and the next two are None of
        methods without an entry in `PHASES`.
      steps_per_s: optimiser steps of single clients, the median.
      flops_per_sample: operations.
      flops_per_s: the median.
      flops_per_round: the mean.
      seconds_per_round: the median.
      host_s_per_round: of these, outside of compiled programs, the median.
      ratio_to_torch: of samples/s, or else of rounds/s, to the PyTorch loop's, the median; None without it.
      ratio_to_first: the same to the first contestant's.
      rival: the method beside which this one is measured; None without.
      ratio_to_rival: of seconds per operation, the median; None without.
      compile_s: see `Contestant`, as far as `peak_bytes`, `devices` to `seeds`, and `checksum`.
      peak_bytes: of its program.
      device_peak_bytes: of the process so far, where the device tells.
      mfu: `flops_per_s` as a share of `matmul_flops_per_s`.
      matmul_flops_per_s: see `matmul_flops`.
      devices: how many.
      clients_at_once: on each of them.
      convolution: which.
      precision: of products.
      seeds: how many runs.
      checksum: of what was trained; None where it is not asked for.
      models: names of the architectures.
      clients: how many there are.
      batch_size: rows of a mini-batch.
      repetitions: of each "seconds", "host_s", "flops", perhaps "samples", "rival_seconds" and "rival_flops".
      rounds_per_repetition: that are timed together.
    """

    method: str
    strategy: str
    samples_per_s: float | None
    steps_per_s: float | None
    flops_per_sample: float | None
    flops_per_s: float
    flops_per_round: float
    seconds_per_round: float
    host_s_per_round: float
    ratio_to_torch: float | None
    ratio_to_first: float
    rival: str | None
    ratio_to_rival: float | None
    compile_s: float | None
    peak_bytes: int | None
    device_peak_bytes: int | None
    mfu: float
    matmul_flops_per_s: float
    devices: int
    clients_at_once: int
    convolution: str | None
    precision: str
    seeds: int
    checksum: str | None
    models: list[str]
    clients: int
    batch_size: int
    repetitions: list[dict[str, float]]
    rounds_per_repetition: int
