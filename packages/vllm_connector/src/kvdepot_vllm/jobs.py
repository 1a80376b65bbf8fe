"""The messages between the two sides: the jobs of a step for the workers, and their reports."""

from dataclasses import dataclass, field
from typing import Any

from kvdepot.keys import KeyRun
from kvdepot_vllm.contents import ORIGINAL, Changes, Contents


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run of reused tokens: retrieve its chunks, then move its tokens to their new positions.

    Attributes:
        key: the source's chunks.
        block_ids: a block for each block of these chunks: the request's own where the run fills it whole and aligned,
            else a staging block.
        offset: where the run begins, in tokens from the start of `block_ids`.
        position: where the run begins in the request.
        source_position: where the run begins in the prompt that the KV comes from.
        length: the number of tokens.
    """

    key: KeyRun
    block_ids: tuple[int, ...]
    offset: int
    position: int
    source_position: int
    length: int


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load for the workers. A key without chunks means that the load has failed already."""

    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]
    skip_tokens: int
    contents: Contents = ORIGINAL  # a worker that would compute with others fails the load


@dataclass(frozen=True, slots=True)
class BlendJob:
    """The blend of one request: tokens `begin` to `end` come from runs of other prompts and from recomputation.

    Attributes:
        request_id: vLLM's name for the request.
        tokens: the tokens of the whole prompt.
        table: the request's blocks, then staging blocks for the question behind `end`.
        exact: loads the chunks of the request's own prefix in front of `begin`, None if vLLM has them.
        loaded_from: the first token that vLLM does not have.
        begin: the first token that is not exact.
        end: the position behind the last reused token.
        runs: ascending, without overlap.
        policy: selects the reused tokens to recompute.
        ratio: the share of the reused tokens to recompute.
    """

    request_id: str
    tokens: tuple[int, ...]
    table: tuple[int, ...]
    exact: LoadJob | None
    loaded_from: int
    begin: int
    end: int
    runs: tuple[RunJob, ...]
    policy: str
    ratio: float


@dataclass(frozen=True, slots=True)
class BlendFigures:
    """The outcome of a blend: tokens reused unchanged, reused but recomputed, and computed between runs."""

    reused: int
    recomputed: int
    gaps: int


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A store for the workers. Its blocks are held until every worker has reported `number`."""

    number: int
    request_id: str
    key: KeyRun
    block_ids: tuple[list[int], ...]
    contents: Contents = ORIGINAL  # a worker that computed with others stores nothing


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's jobs for the workers."""

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    is_idle: bool = False  # the step computes nothing
    blends: tuple[BlendJob, ...] = ()
    slice_of: str | None = None  # the request whose blend computes its next slice, on all workers in this step
    given_up: tuple[str, ...] = ()  # requests whose blends end as failed
    asks_for_weights: int = 0  # number of a question that all workers answer with digests of their weights; 0: none
    step: int = 0  # counts the planned steps from 1 on; 0: this one could not be planned


@dataclass(slots=True)
class WorkerReport:
    """The report of one or more workers to the scheduler's side.

    Attributes:
        ended: for each store job, how many workers ended it and how many chunks all of them stored.
        formats: `WorkerFormat` of the workers; each reports its own once.
        blends_loaded: for each request to blend, how many workers ended its retrieves and whether all succeeded.
        blended: figures of blends that ended.
        weights: by worker, the number of the question and a digest of its weights, "" if it has no digest.
        has_slept: whether one of these workers has slept since its last answer.
        changes: the contents with which the workers compute by now, if these have changed.
    """

    ended: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    formats: tuple[Any, ...] = ()
    blends_loaded: dict[str, tuple[int, bool]] = field(default_factory=dict[str, tuple[int, bool]])
    blended: dict[str, BlendFigures] = field(default_factory=dict[str, BlendFigures])
    weights: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    has_slept: bool = False
    changes: Changes | None = None

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
        changes = self.changes or other.changes
        if self.changes is not None and other.changes is not None:
            changes = self.changes.merge(other.changes)
        return WorkerReport(
            merged,
            self.formats + other.formats,
            loaded,
            self.blended | other.blended,
            self.weights | other.weights,
            self.has_slept or other.has_slept,
            changes,
        )
