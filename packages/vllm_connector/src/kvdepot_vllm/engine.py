"""What this package needs of vLLM's objects, by their attributes: nothing here or below imports vLLM.

Only `connector` and `stats` do; the rest can be tested without it. Source: vLLM 0.32.0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdepot.keys import KeyRun

BlockTable = Sequence[Sequence[int]]
"""Block ids of one request: one list for each of vLLM's KV cache groups, by position; the null block where there is
none (any more)."""


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
        """Give one back."""
        ...


class Step(Protocol):
    """`vllm.v1.core.sched.output.SchedulerOutput`."""

    num_scheduled_tokens: Mapping[str, int]
    kv_connector_block_state: Any


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A retrieve for the workers. Without chunks in its key it is a load that is known to have failed."""

    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]
    skip_tokens: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A store for the workers; its blocks are pinned until every worker has reported `number`."""

    number: int
    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler's side tells the workers with one step."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    is_idle: bool = False  # nothing is computed in this step


@dataclass(slots=True)
class WorkerReport:
    """What workers tell the scheduler's side.

    Attributes:
        ended: for each store job how many workers ended it, and the chunks that all of them stored.
        formats: of the workers' caches, "" for one that uses no depot; each worker tells it once.
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
