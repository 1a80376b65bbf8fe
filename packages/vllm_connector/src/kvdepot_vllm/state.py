"""`RequestState`: everything that the scheduler's side knows about one request, from its arrival to its end.

`start_span` adds the depot's work to the request's trace. With `--otlp-traces-endpoint`, vLLM passes on the trace
context of a request (`trace_headers`), has an exporter in the engine core's process, and brings OpenTelemetry.
Otherwise there are no spans, and nothing is imported. Times are the scheduler's: a span ends in the step that learns of
the end.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvdepot.client.answers import Lease
from kvdepot.client.scheduler import PendingLookup
from kvdepot.features.blend.client import BlendHit, BlendRun, PendingBlendLookup
from kvdepot.keys import KeyRun, PrefixHasher
from kvdepot_vllm.contents import Contents
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.jobs import BlendFigures, LoadJob
from kvdepot_vllm.params import BlendParams, HandOver, Hints

if TYPE_CHECKING:
    from kvdepot.features.blend.segments import Segments  # it loads numpy


class Outcome(enum.Enum):
    """The depot's answer for a request."""

    HIT = "hit"
    PENDING = "pending"  # the depot has not answered, or others bring more: ask again in a later step
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class BlendOffer:
    """The tokens `begin` to `end` of a prompt, which a blend of `runs` would bring."""

    runs: tuple[BlendRun, ...]
    begin: int
    end: int


@dataclass(slots=True)
class BlendState:
    """The blend of one request. Its fields belong to `Blends`."""

    params: BlendParams
    segments: "Segments"
    lookup: PendingBlendLookup | None
    hit: BlendHit | None = None  # the answer, whose lease is held until the blend has ended
    figures: BlendFigures | None = None  # once blended


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. Its lookup, its load and its stores proceed independently.

    The lookup belongs to `Lookups`:

        idle --ask--> asked (`lookup`) --answer--> answered (`lease`) --drop--> idle

    It is dropped when the load is decided or has ended, and asked again if others bring more or if the answer is old.

    The load belongs to `Loads`, and each admission by vLLM (the first, and one after each preemption) has at most one:

        none --plan--> under way (`load`) --end--> none

    Stores belong to `Stores`: chunks before `num_stored` are in the depot or on their way, and `num_storing` counts the
    jobs under way. When a request ends (`has_ended`), all others forget it at once, but `Stores` calls `after_stores`
    when its last store has ended.

    Attributes:
        request: vLLM's request.
        hasher: makes the keys of the request's chunks when they are first needed.
        chunk_tokens: tokens of one chunk.
        prompt_tail_end: the end of the prompt's last chunk if it is handed over although it may be incomplete; else 0.
        contents: the weights and the adapter that the request's keys name.
        may_load: False if nothing is to be loaded.
        may_store: False once its stores are switched off. A request that stores nothing announces nothing.
        hand_over: set while a prefill engine is expected to compute the prompt.
        num_computed: tokens whose KV is computed once the steps planned so far have run.
        exact_tokens: leading tokens whose KV is exact; later tokens are never stored. None: all.
    """

    request: EngineRequest
    hasher: PrefixHasher
    chunk_tokens: int
    prompt_tail_end: int
    contents: Contents
    may_load: bool
    may_store: bool
    must_note: bool  # the depot is still to be told the contents of its chunks
    hints: Hints | None
    hand_over: HandOver | None
    num_computed: int = 0
    exact_tokens: int | None = None
    blend: BlendState | None = None  # None: not to be blended
    offer: BlendOffer | None = None  # the blend offered to vLLM, until vLLM allocates blocks
    has_ended: bool = False

    # the lookup
    lookup: PendingLookup | None = None
    lease: Lease | None = None  # the last answer
    asked_at: float = 0.0
    waits_until: float = 0.0  # the end of all waits for chunks that others compute; 0 before the first lookup
    began_at: float = 0.0  # when the first lookup was sent
    ask_at: float = 0.0  # when to ask again
    num_wanted: int = 0  # chunks of the last lookup
    num_found: int = 0  # chunks of the last answer
    num_promoted: int = 0  # of these, brought by tiers
    awaits: int = 0  # leading chunks that the last lookup expects of a prefill engine
    has_announced: bool = False  # that the engine computes or hands over chunks: withdrawn when the request ends
    lookup_span: Any = None

    # the load
    local_tokens: int = 0  # the hit in vLLM's own cache when vLLM last asked
    load: LoadJob | None = None
    load_end: int = 0  # token at which the load ends, which may be within a chunk
    load_has_failed: bool = False
    loaded_in: int = -1  # count of preemptions when a load was last planned
    load_span: Any = None

    # the stores
    num_stored: int = 0
    is_tail_stored: bool = False  # the incomplete chunk that is handed over is in the depot or on its way
    num_storing: int = 0
    after_stores: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def request_id(self) -> str:
        """The request's name in vLLM."""
        return self.request.request_id

    @property
    def num_leased(self) -> int:
        """The number of chunks that the last answer keeps for this request."""
        return self.lease.num_chunks if self.lease is not None else 0

    @property
    def tail_end(self) -> int:
        """The end of the chunks that a load may bring, if the last one may be incomplete; else 0.

        The incomplete chunk is the last one only before the first output token.
        """
        return self.prompt_tail_end if self.request.num_tokens == self.request.num_prompt_tokens else 0

    @property
    def was_loaded(self) -> bool:
        """Whether this admission has had its load. If that fails, the tokens are computed, not loaded again."""
        return self.loaded_in == self.request.num_preemptions

    def run(self, first: int, stop: int) -> KeyRun:
        """Return the key of chunks `first` to `stop`."""
        done, wanted = self.hasher.num_tokens, stop * self.chunk_tokens
        if done < wanted:
            self.hasher.extend(self.request.all_token_ids[done:wanted])
        return self.hasher.run(first, stop)

    def run_with_tail(self, first: int) -> KeyRun:
        """Return the key of the prompt's chunks from `first` to `prompt_tail_end`."""
        stop, rest = divmod(self.prompt_tail_end, self.chunk_tokens)
        run = self.run(0, stop)
        if rest:
            tail = self.request.all_token_ids[self.prompt_tail_end - rest : self.prompt_tail_end]
            run = replace(run, digests=run.digests + self.hasher.tail(stop, tail))
        return run.slice(first)

    def run_to(self, first: int, stop_tokens: int) -> KeyRun:
        """Return the key of the chunks from `first` on that hold the tokens before `stop_tokens`."""
        stop = -(-stop_tokens // self.chunk_tokens)
        if 0 < self.tail_end < stop * self.chunk_tokens:
            return self.run_with_tail(first)
        return self.run(first, stop)

    def found(self, num_chunks: int) -> None:
        """Note that the depot has `num_chunks` of the wanted chunks: they need no store."""
        whole = (self.tail_end or self.request.num_tokens) // self.chunk_tokens
        self.num_stored = min(num_chunks, whole)
        self.is_tail_stored = num_chunks > whole


@cache
def _tracing() -> tuple[Any, Any] | None:
    """Return the tracer and the reader of trace headers; None without OpenTelemetry."""
    try:
        trace = import_module("opentelemetry.trace")
        headers = import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError:
        return None
    return trace.get_tracer("kvdepot"), headers.TraceContextTextMapPropagator()


def start_span(name: str, request: EngineRequest, **attributes: int) -> Any:
    """Begin a span in a request's trace; None if it has none. Attribute names get the prefix `kvdepot.`."""
    if not request.trace_headers:
        return None
    tracing = _tracing()
    if tracing is None:
        return None
    tracer, propagator = tracing
    context = propagator.extract(carrier=request.trace_headers)
    named = {f"kvdepot.{key}": value for key, value in attributes.items()}
    return tracer.start_span(name, context=context, attributes={"gen_ai.request.id": request.request_id, **named})


def end_span(span: Any, **attributes: int | bool) -> None:
    """End a span that `start_span` returned."""
    if span is not None:
        for key, value in attributes.items():
            span.set_attribute(f"kvdepot.{key}", value)
        span.end()
