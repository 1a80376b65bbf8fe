"""Spaces: all chunks of one `CacheSpec`, by key."""

from dataclasses import dataclass, field

import msgspec
from blake3 import blake3

from kvdepot.layout import GroupKind, window_chunks
from kvdepot.wire.messages import CacheSpec


def digest_of(value: object) -> bytes:
    """Return a digest of 32 bytes of a plain value."""
    return blake3(msgspec.msgpack.encode(value)).digest()


@dataclass(slots=True)
class Space:
    """All chunks of one `CacheSpec`."""

    number: int
    spec: CacheSpec
    nodes: dict[bytes, int] = field(default_factory=dict[bytes, int])
    digest: bytes = b""  # identifies the spec in keys and records
    full_mask: int = 0  # bit g: group g is full attention
    window_mask: int = 0  # bit g: group g is a sliding window or a recurrent state
    # (bit, chunks needed before a boundary), smallest first
    windows: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    # By group: chunks needed before a boundary; 0: all of them.
    chunks_needed: list[int] = field(default_factory=list[int])
    heads: list[int] = field(default_factory=list[int])  # by group: the heads of its plane
    cells: list[int] = field(default_factory=list[int])  # by group: the mask of all cells of its plane (`mask_of`)

    def __post_init__(self) -> None:
        self.digest = digest_of(self.spec)
        for number, group in enumerate(self.spec.groups):
            self.heads.append(group.heads)
            self.cells.append((1 << group.layers * group.heads) - 1)
            if group.kind is GroupKind.FULL_ATTENTION:
                self.full_mask |= 1 << number
                self.chunks_needed.append(0)
                continue
            is_window = group.kind is GroupKind.SLIDING_WINDOW
            self.chunks_needed.append(window_chunks(group.window_tokens, self.spec.chunk_tokens) if is_window else 1)
            self.windows.append((1 << number, self.chunks_needed[-1]))
            self.window_mask |= 1 << number
        self.windows.sort(key=lambda window: window[1])
