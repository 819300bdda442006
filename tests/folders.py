"""What run folders hold, as far as two runs of the same bits share it, and copies of runs as if killed."""

import shutil
from contextlib import contextmanager

import pytest
from conftest import arrays_of, comparable

from jaxfl.folder import checkpoint, store


def metrics(folder):
    """Return what `comparable` keeps of every round."""
    return [comparable(record) for record in store.read_metrics(folder)]


def state(folder):
    """Return the arrays of the newest checkpoint, by name."""
    return arrays_of(folder.absolute() / store.CHECKPOINTS / str(checkpoint.saved(folder)[-1]))


@contextmanager
def copied_before_checkpoints(place):
    """Copy each run to `place(folder, rounds)` just before each of its checkpoints: a stopped run."""
    save = checkpoint.save

    def copy_and_save(folder, rounds, *rest):
        shutil.copytree(folder, place(folder, rounds))
        save(folder, rounds, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", copy_and_save)
        yield
