"""Jobs that the scheduler's side sends to the workers, and the figures that come back."""

from dataclasses import dataclass

from kvdepot.keys import KeyRun


@dataclass(frozen=True, slots=True)
class RunJob:
    """One run of reused tokens: retrieve its chunks, then move its tokens to their new positions.

    Attributes:
        key: the source's chunks.
        block_ids: a block for each block of these chunks: the request's own where the run fills it whole and aligned,
            else a staging block.
        offset: of the run's first token, in tokens from the start of `block_ids`.
        position: of that token in the request.
        source_position: of that token in the prompt whose KV it is.
        length: tokens.
    """

    key: KeyRun
    block_ids: tuple[int, ...]
    offset: int
    position: int
    source_position: int
    length: int


@dataclass(frozen=True, slots=True)
class BlendJob:
    """The blend of one request: tokens `begin` to `end` come from runs of other prompts and from recomputation.

    Attributes:
        request_id: vLLM's.
        tokens: of the whole prompt.
        table: the request's blocks, then staging blocks for the question behind `end`.
        exact: the chunks of the request's own prefix in front of `begin`, None if vLLM has them.
        exact_block_ids: the blocks that `exact` fills.
        skip_tokens: leading tokens of `exact` that vLLM has.
        loaded_from: the first token that vLLM has not.
        begin: the first token that is not exact.
        end: behind the last reused token.
        runs: ascending, not overlapping.
        policy: selects the reused tokens to recompute.
        ratio: share of them.
    """

    request_id: str
    tokens: tuple[int, ...]
    table: tuple[int, ...]
    exact: KeyRun | None
    exact_block_ids: tuple[int, ...]
    skip_tokens: int
    loaded_from: int
    begin: int
    end: int
    runs: tuple[RunJob, ...]
    policy: str
    ratio: float


@dataclass(frozen=True, slots=True)
class BlendFigures:
    """The outcome of a blend, in tokens: taken over as they were, recomputed among the reused, and between runs."""

    reused: int
    recomputed: int
    gaps: int
