"""Measures the first requests after a depot starts: `python benchmarks/engine/first_request.py` in tox's `torch`.

A fresh depot zeroes its pool and each worker maps it while the model computes. Two engines of the same model, warmed up
without a depot, take turns, and nothing else runs:

- `without` has no connector, and no depot runs meanwhile;
- `depot` is new in each pair. A new depot starts, and its requests begin as soon as scheduler and worker are connected.

Each serves `--requests` unknown prompts one after the other, so that `depot` stores each of them. Every pair has the
same prompts, a new depot and the opposite order. Prints the median of the time to the first token for the first
request, the second and so on, and the median of the ratios within a pair.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, Prompt, connector, prompts
from support.vllm.models import make_model

_WARM_UP = 3  # number of requests


def serve(engine: Engine, wanted: list[Prompt], output_tokens: int) -> list[float]:
    """Return the times to the first token in milliseconds."""
    engine.reset()
    answers = [engine.ask("first_token", prompt=prompt, max_tokens=output_tokens) for prompt in wanted]
    return [1e3 * answer["first_token_seconds"] for answer in answers]


def start(model: Path, config: dict[str, Any] | None, arguments: argparse.Namespace) -> Engine:
    """Start an engine and warm it up."""
    engine = Engine(model, config, kv_cache_memory_bytes=512 << 20, max_model_len=2048, expects_depot=False)
    serve(engine, prompts(_WARM_UP, arguments.tokens, seed=99), arguments.output_tokens)
    return engine


def serve_beside_a_depot(model: Path, wanted: list[Prompt], arguments: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, then a depot, and serve. Return the times and the ready bytes of the pool before and after."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-") as directory:
        engine = start(model, connector(directory), arguments)
        try:
            with DepotProcess(pool_size=arguments.pool_size, directory=Path(directory), new_session=True) as depot:
                wait_until(lambda: len(depot.status().contexts) == 2, 60, "scheduler and worker")
                before = depot.status()
                times = serve(engine, wanted, arguments.output_tokens)
                after = depot.status()
        finally:
            engine.close()
    stored = after.counters.get("entries_stored", 0)
    return {"ms": times, "ready": [before.pool_ready_bytes, after.pool_ready_bytes], "entries_stored": stored}


def table(pairs: list[dict[str, Any]]) -> str:
    """Return a line for each request of a pair."""
    lines = [f"{'request':>7} {'without':>10} {'depot':>10}   ratio: median, least, most"]
    for place in range(len(pairs[0]["without"])):
        without = [pair["without"][place] for pair in pairs]
        depot = [pair["depot"]["ms"][place] for pair in pairs]
        ratios = [b / a for a, b in zip(without, depot, strict=True)]
        times = f"{statistics.median(without):>7,.0f} ms {statistics.median(depot):>7,.0f} ms"
        lines.append(f"{place + 1:>7} {times}   {statistics.median(ratios):.2f}, {min(ratios):.2f}, {max(ratios):.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--output-tokens", type=int, default=2)
    parser.add_argument("--model", default="large-kv", help="of tests/support/vllm/models.py")
    parser.add_argument("--pool-size", default="6GiB")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), arguments.model)
        without = start(model, None, arguments)
        try:
            for number in range(arguments.pairs):
                wanted = prompts(arguments.requests, arguments.tokens, seed=number)
                pair: dict[str, Any] = {}
                for name in ("without", "depot") if number % 2 else ("depot", "without"):
                    if name == "depot":
                        pair[name] = serve_beside_a_depot(model, wanted, arguments)
                    else:
                        pair[name] = serve(without, wanted, arguments.output_tokens)
                pairs.append({**pair, "load": os.getloadavg()[0]})
                print(json.dumps(pairs[-1]), flush=True)
        finally:
            without.close()
    print(table(pairs))
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "pairs": pairs}, indent=2, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
