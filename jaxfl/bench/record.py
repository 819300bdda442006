"""The record that a benchmark keeps of each contestant, in JSON."""

from typing import NamedTuple


class Record(NamedTuple):
    """The results of one contestant. Medians are over the repetitions, ratios are taken within each.

    Args:
      method: as it was chosen, perhaps with options.
      strategy: its name, or `TORCH`.
      samples_per_s: training rows per second, each as often as it is used, the median; this and the next two
        are None for methods without an entry in `PHASES`.
      steps_per_s: optimiser steps of single clients per second, the median.
      flops_per_sample: operations per training row.
      flops_per_s: operations per second, the median.
      flops_per_round: operations per round, the mean.
      seconds_per_round: seconds per round, the median.
      host_s_per_round: seconds of these outside of compiled programs, the median.
      ratio_to_torch: ratio of samples/s, or else rounds/s, to the PyTorch loop's, the median; None without.
      ratio_to_first: the same ratio to the first contestant's.
      rival: the method with which this one is compared; None without.
      ratio_to_rival: ratio of seconds per operation, the median; None without.
      compile_s: see `Contestant`, as for `peak_bytes`, `devices` to `seeds`, and `checksum`.
      peak_bytes: bytes of its program.
      device_peak_bytes: peak bytes of the process so far, if the device tells.
      mfu: `flops_per_s` as a share of `matmul_flops_per_s`.
      matmul_flops_per_s: see `matmul_flops`.
      devices: number of devices.
      clients_at_once: number of clients on each of them.
      convolution: way of convolving.
      precision: arithmetic of products.
      seeds: number of runs.
      checksum: checksum of what was trained; None if not asked for.
      models: names of the architectures.
      clients: number of clients.
      batch_size: rows of a mini-batch.
      repetitions: for each "seconds", "host_s", "flops", perhaps "samples", "rival_seconds", "rival_flops".
      rounds_per_repetition: rounds that are timed together.
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
