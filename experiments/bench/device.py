"""What to measure on an accelerator, the most useful first: `jaxfl bench` commands with limits of seconds.

    python experiments/bench/device.py FOLDER [PART ...]

A part is a process of its own, so one that hangs or runs out of memory does not end the others, and its
environment holds only for it. NAME.json has its records, NAME.log what it printed. The same command again
continues with the parts that have no NAME.json.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

LIKELY = 'auto plain bfloat16 "ten at once"'  # ways to be faster than `auto` on an accelerator
TRAINED = "W2 --methods fedavg --no-torch --repetitions 3 --checksum"
# Otherwise the second process would find what the first one has compiled, and its choices of kernels.
ANEW = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
DETERMINISTIC = ANEW | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}

# Limits follow the times of an H200 and an H100; all together take at most 25 minutes.
PARTS = {
    "W2": ("W2 --repetitions 3", 130),
    "W3": ("W3 --repetitions 2 --strategies auto tf32 bfloat16", 100),
    "W4": ("W4 --repetitions 3", 70),
    "W2-ways": (f"W2 --methods fedavg --no-torch --rounds-per-repetition 5 --strategies {LIKELY}", 70),
    "W3-ways": ('W3 --no-torch --rounds-per-repetition 2 --strategies auto plain "ten at once"', 50),
    "resnet18": ("resnet18 --no-torch --repetitions 3", 100),
    "resnet18-ways": ("resnet18 --no-torch --repetitions 3 --strategies auto tf32 bfloat16", 110),
    "resnet18-plain": ("resnet18 --no-torch --repetitions 3 --strategies auto plain", 70),
    "W1-ways": (f"W1 --methods fedavg --repetitions 3 --strategies {LIKELY}", 80),
    "W4-ways": (
        "W4 --no-torch --rounds-per-repetition 10 --strategies auto bfloat16 "
        '"one at a time" "ten at once" "devices 1..all" "5 seeds"',
        70,
    ),
    "W5": ("W5 --no-torch --repetitions 3 --strategies auto bfloat16", 110),
    "lenet5-own": ("lenet5-own --no-torch --repetitions 1 --grow 32768 262144", 170),
    "resnet18-own": (
        'resnet18-own --no-torch --repetitions 1 --strategies "ten at once" --grow 1024 4096',
        150,
    ),
    # Equal checksums of two processes mean equal bits.
    "default-1": (TRAINED, 40, ANEW),
    "default-2": (TRAINED, 40, ANEW),
    "deterministic-1": (TRAINED, 40, DETERMINISTIC),
    "deterministic-2": (TRAINED, 40, DETERMINISTIC),
    "methods": ("methods --repetitions 2", 60),
}


def main(folder: Path, names: list[str]) -> None:
    """Measure the parts that are left, or those that are named."""
    folder.mkdir(parents=True, exist_ok=True)
    left = names or [name for name in PARTS if not (folder / f"{name}.json").exists()]
    for name in left:
        words, limit_s, *environment = PARTS[name]
        command = [sys.executable, "-m", "jaxfl", "bench", *shlex.split(words)]
        with (folder / f"{name}.log").open("wb") as log:
            try:
                subprocess.run(
                    [*command, "--out", str(folder / f"{name}.json")],
                    stdout=log,
                    stderr=log,
                    env=os.environ | dict(*environment),
                    timeout=limit_s,
                    check=True,
                )
                print(f"{name}: done")
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                print(f"{name}: {error}")


main(Path(sys.argv[1]), sys.argv[2:])
