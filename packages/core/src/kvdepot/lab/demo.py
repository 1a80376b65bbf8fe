"""`kvdepot demo`: two engines share one depot, before your eyes, and every byte is verified.

Conversations of several turns share system prompts; each turn goes to whichever engine is free, so an engine often
needs what the other one computed. At the end the depot is killed and started again: the cache is still there.
"""

import random
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.config import format_size
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry, RequestReport
from kvdepot.lab.fleet import Fleet, Prompt
from kvdepot.lab.processes import wait_until
from kvdepot.lab.totals import Totals, live_view
from kvdepot.pool.room import available_memory_bytes

_SEED: Final = 20261121
_NUM_ENGINES: Final = 2
_NUM_SYSTEM_PROMPTS: Final = 3
_SYSTEM_TOKENS: Final = 1024
_NUM_TURNS: Final = 8


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The sizes of a demo that suit this machine."""

    geometry: Geometry
    pool_bytes: int
    engine_cache_bytes: int
    num_conversations: int


def plan_demo(memory_bytes: int) -> DemoPlan:
    """Scale the demo to the free memory: the pool holds all conversations, an engine's cache only a few."""
    pool_bytes = max(256 << 20, min(2 << 30, memory_bytes // 8))
    geometry = replace(GEOMETRY_8B, name="8B GQA, 8 of 32 layers", num_layers=8)
    tokens = pool_bytes // geometry.bytes_per_token
    conversations = max(2, int(tokens * 0.85) // 4096)
    return DemoPlan(geometry, pool_bytes, pool_bytes // 5, conversations)


def make_conversations(num_conversations: int) -> list[list[Prompt]]:
    """Return the turns of each conversation: a shared system prompt, then questions and answers that grow."""
    rng = random.Random(_SEED)
    conversations: list[list[Prompt]] = []
    for number in range(num_conversations):
        segments = [(rng.randrange(_NUM_SYSTEM_PROMPTS), _SYSTEM_TOKENS)]
        turns: list[Prompt] = []
        for turn in range(_NUM_TURNS):
            segments.append(
                (1000 + number * 100 + turn, rng.randrange(200, 800))
            )  # question, answer before it included
            turns.append(Prompt(f"conversation-{number}-turn-{turn}", tuple(segments)))
        conversations.append(turns)
    return conversations


def run_demo(*, quiet: bool = False) -> dict[str, Any]:
    """Run it; returns the summary for machines and, unless `quiet`, prints what happens.

    Raises:
        KVDepotError: something failed, bytes were wrong included.
    """
    plan = plan_demo(available_memory_bytes())
    conversations = make_conversations(plan.num_conversations)
    total = sum(len(conversation) for conversation in conversations)
    started = time.monotonic()
    if not quiet:
        print(
            f"One depot with a pool of {format_size(plan.pool_bytes)}, two engines with a KV cache of"
            f" {format_size(plan.engine_cache_bytes)} each,\n{plan.geometry.name}"
            f" ({format_size(plan.geometry.bytes_per_token)} a token); {len(conversations)} conversations of"
            f" {_NUM_TURNS} turns.\n",
            flush=True,
        )
    with Fleet(
        plan.geometry, num_engines=_NUM_ENGINES, pool_bytes=plan.pool_bytes, engine_cache_bytes=plan.engine_cache_bytes
    ) as fleet:
        totals = _serve(fleet, conversations, total, "conversations", quiet)
        if not quiet:
            print(totals.describe())
        status = fleet.depot.status()
        restart = _restart(fleet, conversations, quiet)
        after = fleet.depot.status()
    return {
        **totals.as_dict(),
        "seconds": round(time.monotonic() - started, 2),
        "pool_size_bytes": plan.pool_bytes,
        "pool_used_bytes": status.pool_used_bytes,
        "num_entries": status.num_entries,
        "num_leases": after.num_leases,
        "epoch": status.epoch,
        "restart": restart,
    }


def _serve(fleet: Fleet, conversations: list[list[Prompt]], total: int, title: str, quiet: bool) -> Totals:
    totals = Totals()
    with live_view(title, total, totals, quiet) as update:

        def on_report(_engine: int, _prompt: Prompt, report: RequestReport) -> None:
            totals.add(report)
            update()

        fleet.run(conversations, on_report)
    return totals


def _restart(fleet: Fleet, conversations: list[list[Prompt]], quiet: bool) -> dict[str, Any]:
    """Kill the depot, start it again, and ask once more for the last turn of every conversation."""
    before = fleet.depot.status()
    fleet.depot.kill()
    started = time.monotonic()
    fleet.depot.start()
    seconds = time.monotonic() - started
    # Each engine comes back by itself, with its scheduler and its worker.
    wait_until(lambda: fleet.depot.status().num_sessions == 2 * len(fleet.engines), what="engines to come back")
    back_seconds = time.monotonic() - started
    last_turns = [conversation[-1:] for conversation in conversations]
    totals = _serve(fleet, last_turns, len(last_turns), "after kill -9 of the depot", quiet)
    after = fleet.depot.status()
    if not quiet:
        print(
            f"\nThe depot was killed (SIGKILL) and started again: it answered after {seconds * 1000:.0f} ms with"
            f" {after.num_entries:,} of {before.num_entries:,} entries;\nno engine was restarted, both were back after"
            f" {back_seconds * 1000:.0f} ms; now"
            f" {totals.hit_rate:.1%} of the tokens of every last turn were not computed,"
            f" {format_size(totals.verified_bytes)} verified, {totals.wrong_bytes} bytes wrong."
        )
    return {
        "seconds": round(seconds, 3),
        "seconds_until_engines_are_back": round(back_seconds, 3),
        "entries_before": before.num_entries,
        "entries_after": after.num_entries,
        **{name: totals.as_dict()[name] for name in ("hit_rate", "verified_bytes", "wrong_bytes")},
    }
