"""Times hits in an engine's entries of another size: `python benchmarks/engine/other_size.py` in tox's `torch`.

An engine of one rank and an engine of two ranks share a depot. Each computes and stores every second prompt. Then both
empty their own prefix caches and load all prompts, so half of the hits come from an engine of the same size. Both
engines run at the same time and serve one request at a time. For each engine, prints medians of the time to the first
token for hits in entries of the same size ("same") and of the other size ("cross"), and their ratio, cross to same.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.bench import describe_machine
from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, connector, prompts, wait_until_stored
from support.vllm.models import make_model

OPTIONS: dict[str, dict[str, Any]] = {
    "one rank": {"multiprocessing": True},
    "two ranks": {
        "multiprocessing": True,
        "tensor_parallel_size": 2,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    },
}
SPIN_SECONDS = 1.2  # a vLLM worker polls for a second for its next step, on a core that the other engine needs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1500)
    options = parser.parse_args()
    wanted = prompts(options.prompts, options.tokens, seed=7)
    times: dict[str, dict[str, list[float]]] = {name: {"same": [], "cross": []} for name in OPTIONS}
    cached: set[int] = set()
    answers: dict[int, set[tuple[int, ...]]] = {}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        model = make_model(Path(directory), "large-kv")
        depot = stack.enter_context(DepotProcess(pool_size=f"{(options.prompts + 2) * options.tokens * 136}KiB"))
        engines: dict[str, Engine] = {}
        for name, own in OPTIONS.items():
            sizes = {"kv_cache_memory_bytes": 512 << 20, "max_model_len": 2048}
            engines[name] = stack.enter_context(Engine(model, connector(depot.url), **sizes, **own))
            wait_until_stored(engines[name], depot, seed=len(name))
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600, "the pool")

        def ask(name: str, number: int) -> Any:
            engines[name].reset()
            time.sleep(SPIN_SECONDS)
            answer = engines[name].ask("first_token", prompt=wanted[number], max_tokens=8)
            answers.setdefault(number, set()).add(tuple(answer["tokens"]))
            return answer

        names = list(OPTIONS)
        for number in range(len(wanted)):
            num_chunks = depot.status().num_chunks
            ask(names[number % 2], number)
            wait_until(lambda before=num_chunks: depot.status().num_chunks > before, 60, "the store")
            wait_until(lambda: depot.status().num_tickets == 0, 60, "the store")
        for turn in range(2):
            for number in range(len(wanted)):
                for name in names[:: 1 if number // 2 % 2 == turn else -1]:
                    answer = ask(name, number)
                    cached.add(answer["cached"])
                    if turn or number > 1:  # the first loads are warm-up
                        times[name]["same" if names[number % 2] == name else "cross"].append(
                            answer["first_token_seconds"]
                        )
    medians = {name: {way: statistics.median(values) for way, values in ways.items()} for name, ways in times.items()}
    result = {
        "machine": describe_machine(),
        "first_token_ms": {
            name: {way: round(1e3 * value, 1) for way, value in ways.items()} for name, ways in medians.items()
        },
        "cross / same": {name: round(ways["cross"] / ways["same"], 3) for name, ways in medians.items()},
        "tokens_reused": sorted(cached),
        "outputs_that_differ": sum(len(each) > 1 for each in answers.values()),
    }
    print(json.dumps(result, indent=2))
    return 1 if result["outputs_that_differ"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
