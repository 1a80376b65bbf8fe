"""`Description`: the tokens of a run of chunks and the ids of its blocks, as events report them to routers."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdepot.keys import KeyRun
from kvdepot.wire import messages as m

_ID_BYTES = 8  # as `operators.holdings` keeps ids
_LARGEST_ID = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Description:
    """Describes the chunks of one run.

    Attributes:
        namespace: the digest of the namespace, equal for engines that share chunks.
        tokens: the token ids of whole chunks.
        block_ids: one id of 64 bits per block.
        parent_id: the id of the block before the run, None if the run begins with the first block.
        groups: the engine's KV cache groups that are reported to routers.
        lora_name: the name of the request's adapter, "" without one.
        extra_keys: one item per block, or empty if no block has any.
    """

    namespace: bytes
    tokens: Sequence[int]
    block_ids: Sequence[int]
    parent_id: int | None = None
    groups: tuple[m.DescribedGroup, ...] = ()
    lora_name: str = ""
    extra_keys: tuple[tuple[m.ExtraKey, ...] | None, ...] = ()

    def requests(self, context: int, key: KeyRun) -> Iterator[m.DescribeChunks]:
        """Yield the messages that describe a run, each with as many chunks as fit."""
        num_chunks = key.num_chunks
        if not num_chunks:
            return
        tokens, blocks = len(self.tokens) // num_chunks, len(self.block_ids) // num_chunks
        step = max(1, min(m.MAXIMUM_DESCRIBED_CHUNKS, m.MAXIMUM_DESCRIBED_TOKENS // max(1, tokens)))
        for start, stop in pairwise([*range(0, num_chunks, step), num_chunks]):
            ids = self.block_ids[start * blocks : stop * blocks]
            own = self.tokens[start * tokens : stop * tokens]
            before = self.block_ids[start * blocks - 1] if start else self.parent_id
            extra_keys = self.extra_keys[start * blocks : stop * blocks]
            yield m.DescribeChunks(
                context,
                self.namespace,
                key.slice(start, stop).digests,
                key.first_chunk + start,
                struct.pack(f"<{len(own)}I", *own),
                struct.pack(f"<{len(ids)}Q", *(each & _LARGEST_ID for each in ids)),
                b"" if before is None else (before & _LARGEST_ID).to_bytes(_ID_BYTES, "little"),
                self.groups,
                self.lora_name[:256],
                extra_keys if any(extra_keys) else (),
            )
