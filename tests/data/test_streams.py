"""Random streams of the host: no two draws of a run share one, but for cohorts and the partition."""

import itertools

from conftest import tiny_source

from jaxfl.config.setup import Setup
from jaxfl.core.answers import draw_dropouts
from jaxfl.data import generators as streams
from jaxfl.runs.prepare import draw_shift


def test_streams_differ():
    of_partition = [(stream,) for stream in range(streams.MOST + 1)]
    numbers, tags = range(12), (streams.DROPOUTS, streams.NEWCOMERS)
    tagged = itertools.product(numbers, tags)
    amounts = [(streams.SHIFT, number, streams.AMOUNTS) for number in numbers]
    every = [*of_partition, *tagged, *amounts]
    drawn = {streams.generator(0, *stream).random() for stream in every}
    assert len(drawn) == len(every)


def test_a_second_shift_does_not_say_who_drops_out():
    """With one stream for both, the clients that drop out of round 8 would be those that turn most left."""
    setup = Setup.of(shift=["noise,std=0.1", "rotate,degrees=30"])
    angles = draw_shift(setup, tiny_source(), 40).amounts[1]
    (lost,) = draw_dropouts((40,), 0.3, 8, seed=0)
    assert set(angles.argsort()[: lost[7].sum()]) != set(lost[7].nonzero()[0])
