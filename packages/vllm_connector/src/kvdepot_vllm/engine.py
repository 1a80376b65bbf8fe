"""Protocols for the attributes of vLLM's objects that this package uses. Source: vLLM 0.32.0.

Only `connector`, `setup`, `events` and `blend` import vLLM when they are loaded. Everything else can be tested without
it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any, Protocol

BlockTable = Sequence[Sequence[int]]
"""Block ids of one request by position, one list for each of vLLM's KV cache groups. The null block marks a position
without a block."""


class EngineRequest(Protocol):
    """`vllm.v1.request.Request`."""

    request_id: str
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    block_hashes: list[Any]
    sampling_params: Any
    skip_reading_prefix_cache: bool
    resumable: bool
    kv_transfer_params: dict[str, Any] | None
    kv_hints: Any
    session_id: str | None
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    prompt_is_token_ids: Sequence[bool] | None  # by place of the prompt; None unless it mixes tokens and embeddings
    trace_headers: Mapping[str, str] | None

    @property
    def num_tokens(self) -> int:
        """The number of tokens whose ids are known."""
        ...

    def update_block_hashes(self) -> None:
        """Append the hashes of blocks that are full by now, each chained to the one before."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The tokens of prompt and output."""
        ...


class Block(Protocol):
    """`vllm.v1.core.kv_cache_utils.KVCacheBlock`."""

    block_id: int
    ref_cnt: int
    block_hash: Any  # set for a full block in the prefix cache; None if the block may hold anything


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`."""

    blocks: Sequence[Any]
    null_block: Any
    cached_block_hash_to_block: Sized  # the blocks in the prefix cache, by their hashes

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        ...

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take free blocks, each with one reference."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Release one reference to each block."""
        ...


class Step(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: Collection[str] | None
    kv_connector_block_state: Any
