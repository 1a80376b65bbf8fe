"""Derives a page's bytes from a chunk's key, so that a test can tell whether a KV cache holds the right bytes.

Each 8-byte word of a page is the random word of its place, XORed with a number derived from chunk key, tag, page and
block. So a shifted, torn, swapped or stale page differs.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

WORD_BYTES: Final = 8  # numpy compares whole words, eight times fewer than bytes
# Of SplitMix64 (https://prng.di.unimi.it/splitmix64.c), like the shifts in `_mix`.
_MULTIPLIERS: Final = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

Array = npt.NDArray[Any]


class PagePattern:
    """Patterns of pages of up to `page_size_bytes`, a multiple of 8."""

    def __init__(self, page_size_bytes: int) -> None:
        if page_size_bytes % WORD_BYTES:
            raise ValueError(f"pages of {page_size_bytes} bytes: a multiple of {WORD_BYTES}")
        words = np.arange(page_size_bytes // WORD_BYTES, dtype=np.uint64)
        self._base = _mix(words + np.uint64(0x1234_5678_9ABC_DEF0))

    def seeds(self, key: bytes, num_pages: int, num_blocks: int, tag: int = 0) -> Array:
        """Return one number for each page and block of a chunk, `(num_pages, num_blocks)` uint64."""
        start = np.frombuffer(key[:WORD_BYTES], np.uint64)[0] ^ np.uint64(tag * 0x1_0000_0001 & (1 << 64) - 1)
        numbers = np.arange(1, num_pages * num_blocks + 1, dtype=np.uint64)
        return _mix(numbers * np.uint64(_MULTIPLIERS[0]) + start).reshape(num_pages, num_blocks)

    def write(self, pages: Array, seeds: Array) -> None:
        """Fill pages, `(num_blocks, words)` uint64, each by its seed, `(num_blocks,)`."""
        np.bitwise_xor(self._base[: pages.shape[-1]], seeds[..., None], out=pages)

    def count_wrong_bytes(self, pages: Array, seeds: Array) -> int:
        """Return how many bytes of `pages`, `(num_blocks, words)` uint64, are in words that differ from the pattern."""
        expected = np.bitwise_xor(self._base[: pages.shape[-1]], seeds[..., None])
        return 0 if np.array_equal(pages, expected) else int(np.count_nonzero(pages != expected)) * WORD_BYTES


def _mix(numbers: Array) -> Array:
    with np.errstate(over="ignore"):
        numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(_MULTIPLIERS[1])
        numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(_MULTIPLIERS[2])
        return numbers ^ numbers >> np.uint64(31)
