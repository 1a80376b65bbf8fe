"""Runs as a driver wants them.

A **run** is `(address on the device, offset in the pool, bytes)`, as `kvdepot.runs` makes them of a batch. Neighbours
that continue each other on both sides become one, because the driver merges nothing and each run costs it half a
microsecond; and no run crosses the end of a piece of the pool, because no copy may.
"""

import numpy as np

from kvdepot.runs import Runs


def merge(runs: Runs) -> Runs:
    """Make one run of those that follow each other and continue each other on the device and in the pool."""
    if len(runs) < 2:
        return runs
    block_ends, offset_ends = runs.blocks + runs.sizes, runs.offsets + runs.sizes
    breaks = (runs.blocks[1:] != block_ends[:-1]) | (runs.offsets[1:] != offset_ends[:-1])
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return Runs(runs.blocks[starts], runs.offsets[starts], np.add.reduceat(runs.sizes, starts))


def split(runs: Runs, piece_bytes: int) -> Runs:
    """Cut runs where a piece of the pool ends: pieces begin at multiples of `piece_bytes`."""
    piece = np.uint64(piece_bytes)
    first = runs.offsets // piece
    counts = (runs.offsets + runs.sizes - np.uint64(1)) // piece - first + np.uint64(1)
    if not len(runs) or int(counts.max()) == 1:
        return runs
    repeats = counts.astype(np.int64)
    whole = np.repeat(np.arange(len(runs)), repeats)
    nth = (np.arange(len(whole)) - np.repeat(np.cumsum(repeats) - repeats, repeats)).astype(np.uint64)
    piece_starts = (first[whole] + nth) * piece
    starts = np.maximum(runs.offsets[whole], piece_starts)
    ends = np.minimum((runs.offsets + runs.sizes)[whole], piece_starts + piece)
    return Runs(runs.blocks[whole] + (starts - runs.offsets[whole]), starts, ends - starts)
