"""The attributes of vLLM's objects that this package uses. Source: vLLM 0.32.0.

Only `connector`, `events`, `stats` and `blend` import vLLM when they are loaded. Everything else can be tested without
it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdepot.keys import KeyRun
from kvdepot_vllm.blend.jobs import BlendFigures, BlendJob

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
    trace_headers: Mapping[str, str] | None

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        ...

    def update_block_hashes(self) -> None:
        """Append the hashes of blocks that are full by now, each chained to the one before."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output."""
        ...


class Block(Protocol):
    """`vllm.v1.core.kv_cache_utils.KVCacheBlock`."""

    block_id: int
    ref_cnt: int
    block_hash: Any  # of a full block in the prefix cache; None if it may hold anything


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`."""

    blocks: Sequence[Any]
    null_block: Any

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        ...

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Take free blocks, each with one reference."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Release one reference to each."""
        ...


class Step(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: Collection[str] | None
    kv_connector_block_state: Any


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load for the workers. A key without chunks means that the load has failed already."""

    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A store for the workers. Its blocks are held until every worker has reported `number`."""

    number: int
    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's jobs for the workers."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    is_idle: bool = False  # the step computes nothing
    blends: tuple[BlendJob, ...] = ()
    slice_of: str | None = None  # the request whose blend computes its next slice, on all workers in this step
    given_up: tuple[str, ...] = ()  # requests whose blends end as failed


@dataclass(slots=True)
class WorkerReport:
    """News from the workers for the scheduler's side.

    Attributes:
        ended: for each store job, how many workers ended it and how many chunks all of them stored.
        formats: `WorkerFormat` of the workers; each reports its own once.
        blends_loaded: for each request to blend, how many workers ended its retrieves and whether all succeeded.
        blended: figures of blends that ended.
    """

    ended: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    formats: tuple[Any, ...] = ()
    blends_loaded: dict[str, tuple[int, bool]] = field(default_factory=dict[str, tuple[int, bool]])
    blended: dict[str, BlendFigures] = field(default_factory=dict[str, BlendFigures])

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Return the report of both."""
        merged = dict(self.ended)
        for number, (count, chunks) in other.ended.items():
            known_count, known_chunks = merged.get(number, (0, chunks))
            merged[number] = (known_count + count, min(known_chunks, chunks))
        loaded = dict(self.blends_loaded)
        for request_id, (count, is_whole) in other.blends_loaded.items():
            known_count, was_whole = loaded.get(request_id, (0, True))
            loaded[request_id] = (known_count + count, was_whole and is_whole)
        return WorkerReport(merged, self.formats + other.formats, loaded, self.blended | other.blended)
