"""Segments: pieces of a prompt that are named by their content, so that they are found again at any position.

An anchor is a position that the 16 tokens before it choose by their hash, on average every 16 tokens. A segment lies
between two anchors. Equal text has equal anchors wherever it stands, so both sides compute the same few segments. The
hash only places anchors. A segment's name is keyed BLAKE3 over its tokens, so it cannot be forged without the key.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvdepot.errors import KeyFormatError
from kvdepot.keys import Namespace
from kvdepot.wire.messages import MAXIMUM_SEGMENTS, SEGMENT, SEGMENT_NAME_BYTES

_CONTEXT: Final = "kvdepot 2026-11 segments"
_WINDOW: Final = 16  # tokens that choose an anchor
_DENSITY: Final = np.uint64(16)  # mean tokens between two anchors
_LEAST_TOKENS: Final = 8  # of a segment
_MOST_TOKENS: Final = 1024  # a longer piece has no name: text without anchors repeats a few tokens over and over
_BASE: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xD1B54A32D192ED03)
_TYPE: Final = np.dtype([("name", f"V{SEGMENT_NAME_BYTES}"), ("position", "<u4"), ("length", "<u4")])


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of one prompt, ascending; `packed` are `messages.SEGMENT` records."""

    packed: bytes = b""

    def __len__(self) -> int:
        return len(self.packed) // SEGMENT.size

    def before(self, num_tokens: int) -> "Segments":
        """Return those that end within the first tokens."""
        records = np.frombuffer(self.packed, _TYPE)
        ends = records["position"] + records["length"]
        return Segments(self.packed[: int(np.searchsorted(ends, num_tokens, "right")) * SEGMENT.size])


class SegmentNamer:
    """Names the segments of prompts of one namespace; other namespaces have other names for the same tokens."""

    def __init__(self, namespace: Namespace) -> None:
        self._key = blake3(namespace.digest(0), derive_key_context=_CONTEXT).digest()

    def name(self, tokens: Sequence[int] | NDArray[Any], borders: Collection[int] = ()) -> Segments:
        """Return the first `MAXIMUM_SEGMENTS` segments of a prompt.

        Args:
            tokens: of the prompt.
            borders: positions where documents begin or end. Between two borders the anchors depend on nothing else, so
                a document is found again from its first token to its last.

        Raises:
            KeyFormatError: a token is not an integer from 0 to 2**32 - 1.
        """
        try:
            ids = np.asarray(tokens, dtype=np.uint32)
        except (OverflowError, ValueError) as error:
            raise KeyFormatError(f"token ids are integers from 0 to 4294967295: {error}") from error
        cuts = _cuts(ids, borders)
        lengths = np.diff(cuts)
        is_named = (lengths >= _LEAST_TOKENS) & (lengths <= _MOST_TOKENS)
        starts, lengths = cuts[:-1][is_named][:MAXIMUM_SEGMENTS], lengths[is_named][:MAXIMUM_SEGMENTS]
        data, key = memoryview(ids.astype("<u4").tobytes()), self._key
        names = [
            blake3(data[start:stop], key=key).digest(SEGMENT_NAME_BYTES)
            for start, stop in zip((4 * starts).tolist(), (4 * (starts + lengths)).tolist(), strict=True)
        ]
        records = np.empty(len(names), _TYPE)
        records["name"] = np.frombuffer(b"".join(names), f"V{SEGMENT_NAME_BYTES}")
        records["position"], records["length"] = starts, lengths
        return Segments(records.tobytes())


def _cuts(ids: NDArray[np.uint32], borders: Collection[int]) -> NDArray[np.int64]:
    """Return the positions where segments begin and end."""
    fixed = sorted({0, *(border for border in borders if 0 < border <= len(ids))})
    anchors = _anchors(ids)
    cuts: list[int] = []
    for border, following in zip(fixed, [*fixed[1:], len(ids) + 1], strict=True):
        cuts.append(border)
        # The first anchors behind a border are chosen by tokens in front of it as well.
        first, stop = np.searchsorted(anchors, (border + _WINDOW, following))
        last = border
        for anchor in anchors[first:stop].tolist():
            # Not right before a border either, as what is left there would have no name.
            if anchor - last >= _LEAST_TOKENS and (following > len(ids) or following - anchor >= _LEAST_TOKENS):
                cuts.append(anchor)
                last = anchor
    return np.asarray(cuts, dtype=np.int64)


def _anchors(ids: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return the positions behind each window of 16 tokens that chooses one."""
    if len(ids) < _WINDOW:
        return np.empty(0, dtype=np.intp)
    hashes, length, power = ids.astype(np.uint64) + np.uint64(1), 1, _BASE
    with np.errstate(over="ignore"):
        while length < _WINDOW:  # of windows twice as long each time
            hashes = hashes[:-length] * power + hashes[length:]
            power, length = power * power, length * 2
        hashes *= _MIX
    hashes ^= hashes >> np.uint64(32)
    return np.flatnonzero(hashes % _DENSITY == 0) + _WINDOW
