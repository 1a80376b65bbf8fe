"""`kvdepot demo`: the same conversations with and without a depot, side by side, and a depot that is killed.

Two engines share a depot, two others have none. Conversations of several turns share system prompts. Each turn goes to
a free engine, which often needs chunks that the other one computed. Every byte from the depot is compared. In the end
the depot is killed and started again, and the cache is still there.
"""

import os
import random
import shutil
import textwrap
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.config import format_size
from kvdepot.lab.engine_model import GEOMETRY_8B, Geometry
from kvdepot.lab.fleet import Fleet, FleetEngine, Prompt
from kvdepot.lab.processes import BESIDE_POOL_BYTES, note_on_place, wait_until
from kvdepot.lab.view import Lane, View, live_view
from kvdepot.pool.inventory import SHARED_MEMORY
from kvdepot.pool.size import available_memory_bytes

_SEED: Final = 20261121  # arbitrary, but fixed: every demo has the same conversations
_LEAST_POOL_BYTES: Final = 64 << 20  # 8,192 tokens of 8 KiB, about two conversations
_NUM_ENGINES: Final = 2  # the least that can share
_NUM_SYSTEM_PROMPTS: Final = 3  # few, so that conversations share them
# A conversation has 5,000 tokens on average: 1,024, and eight turns of 200 to 799. The last turn adds a tenth.
_SYSTEM_TOKENS: Final = 1024
_NUM_TURNS: Final = 8
_MOST_TURN_TOKENS: Final = 800
# Twice the rate of an 8B model on an H100 (`cluster.PREFILL_TOKENS_PER_SECOND`), so that the demo ends sooner.
_TOKENS_PER_SECOND: Final = 20_000.0

_PAUSES_HIDE_LOAD: Final = (
    "Other work slows the copies to and from the depot, but not the pauses that stand for the model, so it hides what a"
    " depot saves: run the demo again on a quiet machine."
)

_NEXT: Final = """\
Next:
  kvdepot doctor    check this machine
  kvdepot serve     start a depot, then one or more vLLMs beside it:
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVDepotConnector",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
  kvdepot top       watch them"""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The sizes of a demo that suit this machine."""

    geometry: Geometry
    pool_bytes: int
    engine_cache_bytes: int
    num_conversations: int


def plan_demo(memory_bytes: int, shm_bytes: int) -> DemoPlan:
    """Scale the demo to the free memory: the pool holds all conversations, an engine's cache only a few, but any one.

    Args:
        memory_bytes: free memory of the machine.
        shm_bytes: free space of /dev/shm. If it is too small for the smallest pool, it does not count, as the pool will
            be elsewhere.
    """
    room = shm_bytes - BESIDE_POOL_BYTES
    most = [512 << 20, memory_bytes // 8] + [room] * (room >= _LEAST_POOL_BYTES)
    pool_bytes = max(_LEAST_POOL_BYTES, min(most))
    geometry = replace(GEOMETRY_8B, name="2 of the 32 layers of an 8B model", num_layers=2)
    tokens = pool_bytes // geometry.bytes_per_token
    conversations = max(2, int(tokens * 0.85) // 4096)
    longest_bytes = (_SYSTEM_TOKENS + _NUM_TURNS * _MOST_TURN_TOKENS) * geometry.bytes_per_token
    return DemoPlan(geometry, pool_bytes, max(pool_bytes // 5, longest_bytes), conversations)


def note_on_load(load: float, num_cores: int) -> str:
    """Return a line for people if other work keeps half of the cores busy, else ""; `load` is Linux's load average."""
    if load < num_cores / 2:
        return ""
    return f"Note: this machine is busy, with a load of {load:.1f} on {num_cores} cores. {_PAUSES_HIDE_LOAD}"


def make_conversations(num_conversations: int) -> list[list[Prompt]]:
    """Return the turns of each conversation: a shared system prompt, then questions and answers that grow."""
    rng = random.Random(_SEED)
    conversations: list[list[Prompt]] = []
    for number in range(num_conversations):
        segments = [(rng.randrange(_NUM_SYSTEM_PROMPTS), _SYSTEM_TOKENS)]
        turns: list[Prompt] = []
        for turn in range(_NUM_TURNS):
            segments.append(
                (1000 + number * 100 + turn, rng.randrange(200, _MOST_TURN_TOKENS))
            )  # a question, and the answer before it
            turns.append(Prompt(f"conversation-{number}-turn-{turn}", tuple(segments)))
        conversations.append(turns)
    return conversations


def compare(without: float, with_depot: float) -> str:
    """Return how much less, or more, a figure is with a depot."""
    if with_depot > without:
        return f"{with_depot / max(1e-9, without):6.1f} times more"
    return f"{without / max(1e-9, with_depot):6.1f} times less"


def run_demo(*, quiet: bool = False) -> dict[str, Any]:
    """Run the demo. Return its results as plain values, for JSON. Unless `quiet`, print its progress and a summary.

    Raises:
        KVDepotError: a step failed, or bytes were wrong.
    """

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    plan = plan_demo(available_memory_bytes(), shutil.disk_usage(SHARED_MEMORY).free)
    load, num_cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    conversations = make_conversations(plan.num_conversations)
    intro = (
        f"Two engines share a depot, two have none. Both pairs serve the same {len(conversations)} conversations of"
        f" {_NUM_TURNS} turns. No model runs: computing a prompt token is a pause of {1e6 / _TOKENS_PER_SECOND:.0f} µs."
        f" The KV cache is real ({plan.geometry.name}, {format_size(plan.geometry.bytes_per_token)} a token), and every"
        " byte that comes from the depot is compared."
    )
    notes = [note for note in (note_on_place(plan.pool_bytes), note_on_load(load, num_cores)) if note]
    for paragraph in (intro, *notes):
        say(textwrap.fill(paragraph, 78) + "\n")
    started = time.monotonic()
    try:
        with live_view(quiet=quiet) as view:
            view.step("starting a depot and four engines")
            with Fleet(
                plan.geometry,
                num_engines=_NUM_ENGINES,
                num_alone=_NUM_ENGINES,
                pool_bytes=plan.pool_bytes,
                engine_cache_bytes=plan.engine_cache_bytes,
                tokens_per_second=_TOKENS_PER_SECOND,
            ) as fleet:
                view.step("serving")
                alone, shared = _race(fleet, conversations, view)
                status = fleet.depot.status()
                restart, again = _restart(fleet, conversations, view)
                after = fleet.depot.status()
    except KeyboardInterrupt:
        say("\nStopped. The depot and the engines have ended, and their memory is free.")
        raise
    say(_describe(alone, shared, restart, again))
    return {
        **shared.as_dict(),
        "race_seconds": round(shared.seconds, 2),
        "without_depot": {**alone.as_dict(), "race_seconds": round(alone.seconds, 2)},
        "seconds": round(time.monotonic() - started, 2),
        "pool_size_bytes": plan.pool_bytes,
        "pool_used_bytes": status.pool_used_bytes,
        "num_entries": status.num_entries,
        "num_leases": after.num_leases,
        "epoch": status.epoch,
        "restart": restart,
    }


def _race(fleet: Fleet, conversations: list[list[Prompt]], view: View) -> tuple[Lane, Lane]:
    """Serve the conversations without a depot and with one, at the same time."""
    errors: list[Exception] = []
    total = sum(len(conversation) for conversation in conversations)

    def serve(lane: Lane, engines: list[FleetEngine]) -> None:
        try:
            fleet.run(conversations, lambda _engine, _prompt, report: lane.add(report), engines)
        except Exception as error:  # even errors of pipes that Ctrl-C closes, so that this thread prints no traceback
            errors.append(error)

    alone, shared = view.lane("without a depot", total), view.lane("with a depot", total)
    pairs = ((alone, fleet.alone), (shared, fleet.engines))
    threads = [threading.Thread(target=serve, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return alone, shared


def _restart(fleet: Fleet, conversations: list[list[Prompt]], view: View) -> tuple[dict[str, Any], Lane]:
    """Kill the depot, start it again, and ask once more for the last turn of every conversation."""
    before = fleet.depot.status()
    view.step("kill -9 of the depot, and a new one on the same memory")
    fleet.depot.kill()
    started = time.monotonic()
    fleet.depot.start()
    seconds = time.monotonic() - started
    # Until both have happened, a request may miss entries that were kept.
    fleet.wait_until_connected()
    wait_until(lambda: not fleet.depot.status().recovering, what="the depot to read its table")
    back_seconds = time.monotonic() - started
    view.step("asking for the last turns again")
    lane = view.lane("after the kill", len(conversations))
    fleet.run([conversation[-1:] for conversation in conversations], lambda _e, _p, report: lane.add(report))
    after = fleet.depot.status()
    return {
        "seconds": round(seconds, 3),
        "seconds_until_engines_are_back": round(back_seconds, 3),
        "entries_before": before.num_entries,
        "entries_after": after.num_entries,
        **{name: lane.as_dict()[name] for name in ("hit_rate", "verified_bytes", "wrong_bytes")},
    }, lane


def _describe(alone: Lane, shared: Lane, restart: dict[str, Any], again: Lane) -> str:
    """Describe the savings, in lines of at most 80 characters."""

    def row(name: str, without: float, with_depot: float, unit: str, decimals: int = 0) -> str:
        left, right = (f"{value:,.{decimals}f}{unit}" for value in (without, with_depot))
        return f"  {name:30}{left:>10} -> {right:>9}  {compare(without, with_depot)}"

    wrong = shared.total("wrong_bytes") + again.total("wrong_bytes")
    entries = f"{restart['entries_after']:,} of {restart['entries_before']:,} entries"
    verified = format_size(shared.total("verified_bytes") + again.total("verified_bytes"))
    return "\n".join(
        [
            "",
            "The same requests without and with a depot:",
            row("prompt tokens computed", alone.total("computed_tokens"), shared.total("computed_tokens"), ""),
            row("median time to first token", alone.first_token_seconds * 1e3, shared.first_token_seconds * 1e3, " ms"),
            row("time until all were served", alone.seconds, shared.seconds, " s", 1),
            *(textwrap.wrap(_PAUSES_HIDE_LOAD, 78) if shared.seconds > alone.seconds else ()),
            f"{shared.share('shared'):.0%} of the prompt tokens came from the other engine through the depot.",
            f"Killed with SIGKILL, the depot was back after {restart['seconds']:.1f} s with {entries}.",
            f"No engine restarted, and {again.hit_rate:.0%} of the tokens of the last turns were still cached.",
            f"{verified} came back from the depot; {wrong} bytes were wrong.",
            "",
            _NEXT,
        ]
    )
