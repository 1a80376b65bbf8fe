"""`kvdepot replay`: replays a production trace against a real depot, with real bytes, and verifies every byte.

The tokens of each 512-token block are derived from its id, so equal ids are equal prefixes, as in the trace. Only the
KV cache is scaled down: it has 512 bytes a token, and a prompt that an engine's cache cannot hold is cut.
"""

import operator
import time
from collections.abc import Iterable
from typing import Any, Final

from msgspec import structs

from kvdepot.config import format_size
from kvdepot.index.eviction import AUTO
from kvdepot.lab.engine_model import Geometry
from kvdepot.lab.fleet import Fleet, Prompt
from kvdepot.lab.processes import note_on_place
from kvdepot.lab.view import live_view
from kvdepot_plan.simulate import Workload
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest

REPLAY_GEOMETRY: Final = Geometry("scaled down", num_layers=1, num_kv_heads=2, head_dim=64)
_NUM_ENGINES: Final = 2  # the least that can share
_ENGINE_CACHE_SHARE: Final = 4  # an engine's own cache is this many times smaller than the pool


def _cut(request: TraceRequest, max_tokens: int) -> TraceRequest:
    """Return a request of at most `max_tokens`, a multiple of a block."""
    if request.input_length <= max_tokens:
        return request
    return structs.replace(request, input_length=max_tokens, hash_ids=request.hash_ids[: max_tokens // BLOCK_TOKENS])


def _prompt(number: int, request: TraceRequest) -> Prompt:
    starts = range(0, request.input_length, BLOCK_TOKENS)
    return Prompt(
        f"request-{number}",
        tuple(
            (hash_id, min(BLOCK_TOKENS, request.input_length - start))
            for start, hash_id in zip(starts, request.hash_ids, strict=False)
        ),
    )


def run_replay(
    requests: Iterable[TraceRequest], *, pool_bytes: int, policy: str = AUTO, quiet: bool = False
) -> dict[str, Any]:
    """Replay requests in order, on two engines side by side; return the results and, unless `quiet`, print them.

    Raises:
        KVDepotError: an engine failed, or the trace is unreadable or empty.
    """
    cache_bytes = pool_bytes // _ENGINE_CACHE_SHARE
    max_tokens = cache_bytes // REPLAY_GEOMETRY.bytes_per_token // BLOCK_TOKENS * BLOCK_TOKENS
    given = list(requests)
    served = [_cut(request, max_tokens) for request in given]
    prompts, num_cut = [_prompt(*each) for each in enumerate(served)], sum(map(operator.ne, served, given))
    if not prompts:
        raise TraceError("the trace has no requests with blocks")
    workload = Workload.of(served)
    repeated = workload.tokens_of(workload.repeated_chunks()) / max(1, workload.prompt_tokens)
    started = time.monotonic()
    if not quiet:
        print(
            f"{len(prompts)} requests on two engines with {format_size(cache_bytes)} each, one depot with"
            f" {format_size(pool_bytes)}; {format_size(REPLAY_GEOMETRY.bytes_per_token)} a token,"
            f" {num_cut} prompts cut to {max_tokens:,} tokens",
            flush=True,
        )
        if note := note_on_place(pool_bytes):
            print(note, flush=True)
    with Fleet(
        REPLAY_GEOMETRY,
        num_engines=_NUM_ENGINES,
        pool_bytes=pool_bytes,
        engine_cache_bytes=cache_bytes,
        policy=policy,
        chunk_tokens=BLOCK_TOKENS,
    ) as fleet:
        with live_view(quiet=quiet) as view:
            lane = view.lane("replay", len(prompts))
            fleet.run([[prompt] for prompt in prompts], lambda _engine, _prompt, report: lane.add(report))
        status = fleet.depot.status()
    if not quiet:
        print(lane.describe())
        print(f"{repeated:.1%} of the prompt tokens repeat an earlier prefix: an unlimited pool would find these")
    return {
        **lane.as_dict(),
        "repeated_share": round(repeated, 5),
        "seconds": round(time.monotonic() - started, 2),
        "num_prompts_cut": num_cut,
        "policy": policy,
        "pool_size_bytes": pool_bytes,
        "pool_used_bytes": status.pool_used_bytes,
        "num_entries": status.num_entries,
        "num_leases": status.num_leases,
        "chunks_evicted": status.counters["chunks_evicted"],
        "epoch": status.epoch,
    }
