"""Exercises of a shoulder, recorded by a smartwatch, as windows by subject: exercises.npz for the study.

    pip install --no-deps seglearn
    python experiments/tasks/exercises.py

The recordings are those of Burns et al. 2018 (arXiv:1802.01489) that the package seglearn brings along: ten
subjects do twenty repetitions of each of seven exercises, with either arm. A recording has six signals, of an
accelerometer and a gyroscope, at 50 Hz. Windows are two seconds long and do not overlap. The first quarter of
each recording is for training, the rest for testing: an exercise is recognised when it goes on.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

STEPS, TRAIN = 100, 0.25
SIDES = {0: "left", 1: "right"}


def main() -> None:
    """Write exercises.npz into the current folder."""
    package = find_spec("seglearn")  # not imported, as it wants an older NumPy
    if package is None or package.origin is None:
        raise SystemExit("Install the package that has the recordings: pip install --no-deps seglearn")
    file = Path(package.origin).parent / "data" / "watch_dataset.npy"
    recorded = np.load(file, allow_pickle=True).item()  # a dict, of a package that one has chosen to install
    windows = [signal[: len(signal) // STEPS * STEPS].reshape(-1, STEPS, 6) for signal in recorded["X"]]
    counts = [*map(len, windows)]
    np.savez(
        "exercises.npz",
        windows=np.concatenate(windows).astype(np.float32),
        labels=np.repeat(np.array(recorded["y_labels"])[recorded["y"]], counts),
        subject=np.repeat(recorded["subject"], counts),
        arm=np.repeat([SIDES[side] for side in recorded["side"]], counts),
        split=np.concatenate([np.arange(n) < TRAIN * n for n in counts]),
    )


if __name__ == "__main__":
    main()
