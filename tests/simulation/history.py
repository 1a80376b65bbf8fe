"""Makes histories from seeds, runs them, and shrinks those that violate an invariant."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from simulation.memory import Violation
from simulation.node import Event, random_event
from simulation.setup import Setup
from simulation.world import World

NUM_STEPS: Final = 250
_WEIGHTS: Final = {
    "start": 20, "restore": 14, "kill_server": 1.5, "turn": 8, "connect": 14, "disconnect": 0.7, "unregister": 0.5,
    "kill": 0.5, "bury": 4, "stop": 1, "prepare": 12, "copy": 24, "end_store": 24, "lookup": 10, "release": 4,
    "end_request": 1, "retrieve": 10, "read": 20, "hint": 1, "tier_begin": 24, "tier_end": 24, "tier_fails": 0.3,
    "operate": 1, "report": 0.7, "linger": 1, "check": 2, "grow": 1, "damage": 6, "lie": 2, "note": 6, "blend": 6,
}  # fmt: skip
_MOODS: Final = (dict[str, float](), {"kill_server": 10, "start": 3, "restore": 3})
_SLOW: Final = {"turn": 3, "lookup": 5, "prepare": 3, "tier_fails": 0, "operate": 0, "kill_server": 2}
_ROOMY: Final = {"note": 5, "blend": 5, "kill_server": 0.2, "operate": 0.2, "damage": 0.2}
_ALWAYS: Final = ("start", "restore", "connect", "prepare", "copy", "end_store", "tier_begin", "tier_end")


@dataclass(frozen=True)
class Outcome:
    """The result of a history."""

    events: list[Event]
    failure: str | None
    num_crashes: int
    num_reads: int


def run_seed(seed: int, num_steps: int = NUM_STEPS) -> Outcome:
    """Make and run a seed's history, then let all processes leave. Each seed prefers some kinds of events."""
    rng = random.Random(seed)
    setup = Setup.of_seed(seed)
    mood = _SLOW if setup.is_slow else _ROOMY if setup.is_roomy else rng.choice(_MOODS)
    weights = {
        name: weight * mood.get(name, rng.choice((1, 1, 3) if name in _ALWAYS else (0, 1, 1, 1, 5)))
        for name, weight in _WEIGHTS.items()
    }
    names, numbers = list(weights), list(weights.values())
    world, events, failure = World(setup), list[Event](), None
    try:
        while len(events) < num_steps:
            for name in rng.choices(names, numbers, k=50):
                event = random_event(rng, name)
                events.append(event)
                if not world.do(event):
                    events.pop()
        world.finish()
    except Violation as violation:
        failure = str(violation)
    finally:
        world.close()
    return Outcome(events, failure, world.num_crashes, world.num_reads)


def replay(setup: Setup, events: Sequence[Event], say: Callable[[str], object] | None = None) -> str | None:
    """Run a history again. Return why it fails, or None."""
    world = World(setup, say)
    try:
        for event in events:
            world.do(event)
        world.finish()
    except Violation as violation:
        return str(violation)
    finally:
        world.close()
    return None


def shrink(setup: Setup, events: list[Event]) -> list[Event]:
    """Remove every event without which a failing history still fails."""
    before = 0
    while len(events) != before:
        before = len(events)
        size = len(events) // 2
        while size:
            start = 0
            while start < len(events):
                shorter = events[:start] + events[start + size :]
                if replay(setup, shorter) is None:
                    start += size
                else:
                    events = shorter
            size //= 2
    return events


def story(seed: int) -> str:
    """Return a seed's failing history, shrunk, in words."""
    setup, outcome = Setup.of_seed(seed), run_seed(seed)
    if outcome.failure is None:
        return f"nothing fails with seed {seed}"
    events = shrink(setup, outcome.events)
    lines: list[str] = []
    failure = replay(setup, events, lines.append)
    told = [f"{number:3}. {line}" for number, line in enumerate(lines, 1)]
    kept = f"{len(events)} of {len(outcome.events)} events"
    return "\n".join([f"seed {seed} ({setup}), {kept}:", *told, f"  => {failure}"])
