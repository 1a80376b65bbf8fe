"""Segments: pieces of a prompt that are named by their content, so that they can be found at any position.

An anchor is a position that is chosen by the hash of the 16 tokens before it. A segment lies between two anchors and
has 24 tokens on average. Equal text has equal anchors at any position, so prompts that share text share segments. The
hash only places anchors. A segment's name is keyed BLAKE3 over its tokens, so it cannot be forged without the key.

Needs numpy, which every engine has.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvdepot.errors import KeyFormatError
from kvdepot.features.blend.messages import MAXIMUM_SEGMENT_TOKENS, MAXIMUM_SEGMENTS, SEGMENT, SEGMENT_NAME_BYTES
from kvdepot.keys import Namespace

_CONTEXT: Final = "kvdepot 2026-11 segments"
_WINDOW: Final = 16  # tokens that choose an anchor
_LEAST_TOKENS: Final = 8  # per segment
# Hashes below this make anchors: one in 14, of which 60 % are far enough apart.
_CHOSEN: Final = np.uint32((1 << 32) // 14)
_BASE: Final = np.uint32(0x9E3779B1)  # odd, with well-mixed bits, like the next one: both are xxHash's primes
_MIX: Final = np.uint32(0x85EBCA77)
_TYPE: Final = np.dtype([("name", f"V{SEGMENT_NAME_BYTES}"), ("position", "<u4"), ("length", "<u4")])


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one prompt, ascending; `packed` are `SEGMENT` records."""

    packed: bytes = b""

    def __len__(self) -> int:
        return len(self.packed) // SEGMENT.size

    def before(self, num_tokens: int) -> "Segments":
        """Return the segments that end within the first `num_tokens`."""
        records = np.frombuffer(self.packed, _TYPE)
        ends = records["position"] + records["length"]
        return Segments(self.packed[: int(np.searchsorted(ends, num_tokens, "right")) * SEGMENT.size])


class SegmentNamer:
    """Names the segments of prompts of one namespace. Other namespaces have other names for the same tokens."""

    def __init__(self, namespace: Namespace) -> None:
        self._key = blake3(namespace.digest(0), derive_key_context=_CONTEXT).digest()

    def name(self, tokens: Sequence[int], borders: Collection[int] = ()) -> Segments:
        """Return the first `MAXIMUM_SEGMENTS` segments of a prompt.

        Text without anchors, such as a few repeating tokens, has no segments.

        Args:
            tokens: the prompt's token ids.
            borders: positions where documents begin or end. Anchors between two borders do not depend on the text
                outside, so a document is found again from its first token to its last.

        Raises:
            KeyFormatError: a token is not an integer from 0 to 2**32 - 1.
        """
        try:
            ids = np.frombuffer(array("I", tokens), np.uint32)  # three times as fast as numpy from a list
        except (OverflowError, TypeError) as error:
            raise KeyFormatError(f"token ids are integers from 0 to 4294967295: {error}") from error
        cuts = _cuts(ids, borders)
        lengths = np.diff(cuts)
        is_named = (lengths >= _LEAST_TOKENS) & (lengths <= MAXIMUM_SEGMENT_TOKENS)
        starts, lengths = cuts[:-1][is_named][:MAXIMUM_SEGMENTS], lengths[is_named][:MAXIMUM_SEGMENTS]
        data, names = ids.astype("<u4", copy=False).tobytes(), list[bytes]()
        hasher = blake3(key=self._key)  # resetting one takes half the time of creating one per name
        reset, update, digest, name = hasher.reset, hasher.update, hasher.digest, names.append
        for start, stop in zip((4 * starts).tolist(), (4 * (starts + lengths)).tolist(), strict=True):
            reset()
            update(data[start:stop])
            name(digest(SEGMENT_NAME_BYTES))
        records = np.empty(len(starts), _TYPE)
        records["name"] = np.frombuffer(b"".join(names), f"V{SEGMENT_NAME_BYTES}")
        records["position"], records["length"] = starts, lengths
        return Segments(records.tobytes())


def _cuts(ids: NDArray[np.uint32], borders: Collection[int]) -> NDArray[Any]:
    """Return the positions where segments begin and end, ascending.

    An anchor less than `_LEAST_TOKENS` after another one does not count, even if that one does not count either. So a
    cut depends only on the tokens just before it.
    """
    fixed = sorted({0, *(border for border in borders if 0 < border <= len(ids))})
    anchors = _anchors(ids)
    cuts: list[NDArray[Any]] = []
    for border, following in zip(fixed, [*fixed[1:], len(ids) + _LEAST_TOKENS], strict=True):
        # Skip the first anchors after a border, which depend on tokens before it. The last piece before the next border
        # must also have the minimum length of a segment.
        first, stop = np.searchsorted(anchors, (border + _WINDOW, following - _LEAST_TOKENS + 1))
        inside = anchors[first:stop]
        cuts += [np.array([border]), inside[np.diff(inside, prepend=border) >= _LEAST_TOKENS]]
    return np.concatenate(cuts)


def _anchors(ids: NDArray[np.uint32]) -> NDArray[Any]:
    """Return the anchors: the positions behind windows of 16 tokens with a low hash."""
    if len(ids) < _WINDOW:
        return np.empty(0, dtype=np.int64)
    hashes, length, power = ids + np.uint32(1), 1, _BASE
    with np.errstate(over="ignore"):
        while length < _WINDOW:  # doubles the windows each time
            longer = hashes[:-length] * power
            longer += hashes[length:]  # in place: allocating another result costs more than the sum
            hashes = longer
            power, length = power * power, length * 2
        hashes *= _MIX  # makes the high bits depend on all bits
    return np.flatnonzero(hashes < _CHOSEN) + _WINDOW
