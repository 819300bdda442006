"""Streams of random numbers: every draw has its own key, so no draw changes another one.

    run      ->  `Streams`
    weights  ->  fold_in(init, number of the architecture), or fold_in(fold_in(init, EXTENSION), the same);
                 with --initial own a client's  ->  fold_in(its architecture's key, its id)
    round t  ->  fold_in(rounds, t)
    client   ->  fold_in(its round's key, its id);  beside the clients PUBLIC, SERVER and SHARED_BATCHES
    epoch e  ->  fold_in(fold_in(its client's key, phase), e), the order of rows
    batch b  ->  fold_in(its epoch's key, b);  beside the batches FURTHER_PARTS, in one AUGMENTATION, POISON
    noisy t  ->  fold_in(fold_in(its client's key, phase), t), its sample;  its batches b, and NOISE
    row r    ->  fold_in(its noisy step's batch's key, r)
    message  ->  fold_in(its client's key, WIRE)
    server   ->  fold_in(the round's key, WIRE - 1 - number of the architecture), its noise

Keys beside those of clients or batches count down from the largest number, because ids are small.
"""

from typing import NamedTuple

import jax

PUBLIC = 2**31 - 1  # which public images a round has
SERVER = 2**31 - 2  # what the server draws
EXTENSION = 2**31 - 1  # beside the architectures' initial weights: what a method adds to them
SHARED_BATCHES = 2**31 - 3  # minus its number: a batch that all clients see at the same time
AUGMENTATION = 2**31 - 1  # folded into a batch's key
POISON = 2**31 - 2  # the same: which rows of an attacker are changed
WIRE = 2**30  # folded into a client's key: its message; less 1 and an architecture's number, a round's: noise
NOISE = 2**31 - 1  # folded into a noisy step's key
FURTHER_PARTS = 2**31  # minus its number: the order of a further list of examples in the same epoch


class Streams(NamedTuple):
    """Keys of a run."""

    init: jax.Array  # of initial weights
    rounds: jax.Array  # of all rounds
    host: jax.Array  # of host steps; that of round t is ``fold_in(host, t)``
    scores: jax.Array  # of scoring clients after a round; that of round t is ``fold_in(scores, t)``
    prepare: jax.Array  # of the phase before the first round
    join: jax.Array  # of the round in which newcomers join


def streams(run_key) -> Streams:
    """Return the streams of a run. A new stream goes to the end of `Streams`: its place is its number."""
    return Streams(*(jax.random.fold_in(run_key, number) for number in range(len(Streams._fields))))
