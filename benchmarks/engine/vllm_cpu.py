"""Measures a depot with a real vLLM on CPU: `python benchmarks/engine/vllm_cpu.py` in tox's `torch`.

Uses a small model with KV of a realistic size (128 KiB of float32 per token). Three engines run at the same time and
serve one request at a time in turn, so that other work on the machine affects all alike. Each computes a prompt and
then reuses one:

- `alone` has no connector: it computes a prompt, then reuses it from vLLM's own prefix cache;
- `depot` stores a prompt, empties its own prefix cache, and loads the prompt;
- `other` computes an unknown prompt and stores nothing, then loads the prompt that `depot` stored;
- `disk` (with `--disk FOLDER`) has a depot whose pool holds little more than one prompt, and a tier below it. It
  stores the prompt, then another that pushes it out of the pool, and then loads it from the disk.

Prints medians of the time to the first token, and the medians of the ratios within each prompt.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess, wait_until
from support.bars import Bar, bars_as_svg
from support.vllm.engines import Engine, connector, prompts
from support.vllm.models import make_model


def serve(
    engines: dict[str, Engine],
    prompt: list[int],
    unknown: list[int],
    turn: int,
    max_tokens: int,
    settled: Callable[[], bool],
) -> Any:
    """Serve one prompt in every way. Return the times to the first token in seconds, and the reused tokens."""
    row: dict[str, Any] = {}

    def ask(name: str, engine: str) -> None:
        wanted = unknown if name == "useless" else prompt
        row[name] = engines[engine].ask("first_token", prompt=wanted, max_tokens=max_tokens)

    computing = [("no cache", "alone"), ("storing", "depot"), ("useless", "other")]
    reusing = [("own prefix cache", "alone"), ("hit", "depot"), ("hit of the other's", "other")]
    if "disk" in engines:
        computing.append(("storing to disk", "disk"))
        reusing.append(("hit from disk", "disk"))
    for ways in (computing, reusing):
        for name, engine in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            if name != "own prefix cache":
                engines[engine].reset()
            ask(name, engine)
        if "disk" in engines and ways is computing:
            engines["disk"].ask("first_token", prompt=unknown, max_tokens=max_tokens)
            wait_until(settled, 60, "the disk")
    return row


def summary(rows: list[Any]) -> dict[str, Any]:
    """Return medians, and medians of ratios within a prompt."""
    first = {name: [row[name]["first_token_seconds"] for row in rows] for name in rows[0]}
    bases = {
        "storing": "no cache", "useless": "no cache", "storing to disk": "no cache", "hit from disk": "no cache",
        "hit": "own prefix cache", "hit of the other's": "own prefix cache",
    }  # fmt: skip
    bases = {name: base for name, base in bases.items() if name in first}
    ratios = {
        f"{name} / {base}": statistics.median(a / b for a, b in zip(first[name], first[base], strict=True))
        for name, base in bases.items()
    }
    wrong = sum(row[name]["tokens"] != row["no cache"]["tokens"] for row in rows for name in row if name != "useless")
    return {
        "first_token_ms": {name: round(1e3 * statistics.median(values), 1) for name, values in first.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "tokens_reused": {name: sorted({row[name]["cached"] for row in rows}) for name in rows[0]},
        "outputs_that_differ": wrong,
    }


_LABELS = {
    "no cache": ("computed, no depot", False),
    "storing": ("computed and stored in the depot", False),
    "useless": ("computed, the depot knows nothing", False),
    "own prefix cache": ("from vLLM's own prefix cache", False),
    "hit": ("from the depot", True),
    "hit of the other's": ("from the depot, by another engine", True),
    "hit from disk": ("from the depot's disk", True),
}


def draw(rows: list[Any]) -> str:
    """Return a picture: a bar for each median time to the first token, and a dot for each request."""
    bars: list[Bar] = []
    for name, (label, is_ours) in _LABELS.items():
        if name in rows[0]:
            points = tuple(1e3 * row[name]["first_token_seconds"] for row in rows)
            median = statistics.median(points)
            bars.append(Bar(label, median, f"{median:,.0f} ms", is_ours, points))
    return bars_as_svg("Time to the first token: median, and each request", bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--pool-size", default="6GiB")
    parser.add_argument("--disk", type=Path, help="measure hits from a tier in this folder, too")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--plot", type=Path, help="draw all measurements here")
    arguments = parser.parse_args()
    room = max(4096, arguments.tokens + arguments.tokens // 4)  # tokens in an engine's own cache
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": room * (128 << 10),
        "max_model_len": max(2048, arguments.tokens + 512),
    }
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        depot = stack.enter_context(DepotProcess(pool_size=arguments.pool_size))
        model = make_model(Path(directory), "large-kv")
        configs = {
            "alone": None,
            "depot": connector(depot.url),
            "other": connector(depot.url, store="none"),
        }
        small: DepotProcess | None = None
        if arguments.disk:
            tier = f"disk://{arguments.disk.absolute()}?capacity=16GiB&queue=1GiB"
            small = stack.enter_context(DepotProcess("--tier", tier, pool_size=f"{arguments.tokens * 136}KiB"))
            configs["disk"] = connector(small.url)

        def settled() -> bool:
            return small is None or not small.status().tiers[0].queued_write_bytes

        engines: dict[str, Engine] = {}
        try:
            for name, config in configs.items():
                engines[name] = Engine(model, config, **options)
            wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600, "the pool")
            print(f"{len(engines)} engines are up, the pool is ready", flush=True)
            warm_up = prompts(2, arguments.tokens, seed=99)
            wanted = prompts(arguments.prompts, arguments.tokens, seed=7)
            unknown = prompts(arguments.prompts, arguments.tokens, seed=8)
            for turn, prompt in enumerate(warm_up):
                serve(engines, prompt, prompt[::-1], turn, arguments.output_tokens, settled)
            rows: list[Any] = []
            for turn, prompt in enumerate(wanted):
                rows.append(serve(engines, prompt, unknown[turn], turn, arguments.output_tokens, settled))
                print(
                    turn,
                    {name: round(1e3 * cell["first_token_seconds"]) for name, cell in rows[-1].items()},
                    flush=True,
                )
            metrics = {name: engines[name].ask("metrics") for name in ("depot", "other")}
        finally:
            for engine in engines.values():
                engine.close()
    result = summary(rows)
    for name, values in metrics.items():
        result[f"metrics of {name}"] = {key: value for key, value in values.items() if "kvdepot" in key}
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps({"summary": result, "rows": rows}))
    if arguments.plot:
        arguments.plot.write_text(draw(rows))
    return 1 if result["outputs_that_differ"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
