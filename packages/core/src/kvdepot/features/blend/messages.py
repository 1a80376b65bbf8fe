"""Requests of engines that blend, and their replies. `docs/wire.md` describes the fate of each."""

import struct
from typing import Annotated, Final

from msgspec import Meta

from kvdepot.wire.messages import ContextRequest, Count, Digests, Text
from kvdepot.wire.operation import Reply

MAXIMUM_SEGMENTS: Final = 8192  # per request, of about 24 tokens each
MAXIMUM_SEGMENT_TOKENS: Final = 1024  # a paragraph; longer text is cut into several
SEGMENT_NAME_BYTES: Final = 16  # a digest: no two texts share one by chance
SEGMENT: Final = struct.Struct(f"<{SEGMENT_NAME_BYTES}sII")
"""One segment of a prompt, 24 bytes: its name, its first token u32, its tokens u32."""

BLEND_RUN: Final = struct.Struct("<6I")
"""Reused tokens, 24 bytes: first token in the asking prompt u32, tokens u32, first token in the source u32, first chunk
of the source u32, chunks u32, and where their digests begin among those of the reply u32, counted in digests."""

PackedSegments = Annotated[bytes, Meta(max_length=MAXIMUM_SEGMENTS * SEGMENT.size)]


class NoteContents(ContextRequest, tag="note_contents", frozen=True):
    """Report the segments that the given chunks, from chunk 0 on, hold, as sources for `BlendLookup`.

    Only chunks that were computed exactly may be reported. `segments` are packed `SEGMENT` records, ascending. Segments
    that end beyond the chunks in the pool are ignored.
    """

    digests: Digests
    segments: PackedSegments


class BlendLookup(ContextRequest, tag="blend_lookup", frozen=True):
    """Lease chunks of any prompts that hold the given segments, for a request.

    `segments` are packed `SEGMENT` records, ascending. Runs of fewer than `min_run_tokens` tokens are left out.
    """

    request_id: Text
    segments: PackedSegments
    min_run_tokens: Count = 0


class ReportBlend(ContextRequest, tag="report_blend", frozen=True):
    """Report a blended prompt: the number of its tokens that were reused unchanged, and recomputed."""

    reused_tokens: Count
    recomputed_tokens: Count


class BlendReply(Reply, tag="blend_reply", frozen=True):
    """The runs that were found, leased as `lease` for `lease_seconds`. Without runs, `lease` is 0.

    `runs` are packed `BLEND_RUN` records, ascending and without overlaps. `digests` are those of their chunks.
    """

    lease: int
    lease_seconds: float
    runs: bytes
    digests: bytes
