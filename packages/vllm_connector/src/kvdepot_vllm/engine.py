"""The attributes of vLLM's objects that this package uses. Source: vLLM 0.32.0.

Only `connector`, `events`, `stats` and `blend` import vLLM when they are loaded. Everything else can be tested without
it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdepot.keys import KeyRun

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
    skip_reading_prefix_cache: bool
    resumable: bool
    kv_transfer_params: dict[str, Any] | None
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    trace_headers: Mapping[str, str] | None

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output."""
        ...


class Block(Protocol):
    """`vllm.v1.core.kv_cache_utils.KVCacheBlock`."""

    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """`vllm.v1.core.block_pool.BlockPool`."""

    blocks: Sequence[Any]
    null_block: Any

    def touch(self, blocks: Sequence[Any]) -> None:
        """Take a reference to each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give one reference to each back."""
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


@dataclass(slots=True)
class WorkerReport:
    """News from the workers for the scheduler's side.

    Attributes:
        ended: for each store job, how many workers ended it and how many chunks all of them stored.
        formats: of the workers' caches, "" for a worker without a depot; each worker reports its format once.
    """

    ended: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    formats: frozenset[str] = frozenset()

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Return the report of both."""
        merged = dict(self.ended)
        for number, (count, chunks) in other.ended.items():
            known_count, known_chunks = merged.get(number, (0, chunks))
            merged[number] = (known_count + count, min(known_chunks, chunks))
        return WorkerReport(merged, self.formats | other.formats)
