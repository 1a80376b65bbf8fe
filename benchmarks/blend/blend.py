"""Measures blends with a real vLLM engine on CPU: `python benchmarks/blend/blend.py` in tox's `torch`.

The model has the shape of SmolLM2-135M in bfloat16, with random weights, and runs on one thread. An engine stores a
prompt of documents. Then prompts have the same documents in another order, so that about 90 % of the tokens recur at
other positions. Prints the time to the first token for each policy and share, as a ratio to computing the whole prompt.
The variants take turns in the same run, and the least time of all rounds counts for each.

`--cost PAIRS` measures the cost of `kvdepot.blend` = "request" for requests that do not opt in. Two engines, one with
this setting and one without, take turns: they compute and store prompts of 1,000 tokens and load them again. Prints the
median of the ratios of each pair, in time and in the engine's CPU time, which a busy machine disturbs less.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess
from kvdepot_plan.plot import curves_as_svg
from support.vllm.engines import Engine, Prompt, connector, prompts
from support.vllm.models import make_model

ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}


def ask(engine: Engine, prompt: Prompt, blend: Any = None) -> tuple[float, dict[str, Any]]:
    """Empty vLLM's own cache and serve a prompt. Return the time to the first token and the answer."""
    engine.reset()
    began = time.perf_counter()
    params = {"kvdepot": {"blend": blend}} if blend else {"kvdepot": {"load": False, "store": False}}
    (output,) = engine.ask("generate", prompts=[prompt], max_tokens=1, params=params)["outputs"]
    return time.perf_counter() - began, output


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure_cost(pairs: int) -> None:
    """Time requests that do not opt in, on an engine that could blend and on one that could not."""
    settings: dict[str, Any] = {
        "environment": ENVIRONMENT,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 256 << 20,
    }
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory, DepotProcess(pool_size="4GiB", new_session=True) as depot:
        model = make_model(Path(directory), "smol")
        with (
            Engine(model, connector(depot.url, blend="off"), **settings) as off,
            Engine(model, connector(depot.url, blend="request"), **settings) as request,
        ):
            for turn in range(pairs + 1):
                taken: dict[tuple[str, Engine], float] = {}
                for number, engine in enumerate((request, off) if turn % 2 else (off, request)):
                    prompt = prompts(1, 1000, seed=2 * turn + number + 100)[0]
                    for kind in ("computed and stored", "loaded"):
                        engine.reset()
                        began = time.perf_counter(), cpu_seconds(engine.pid)
                        engine.ask("generate", prompts=[prompt], max_tokens=1)
                        taken[f"{kind}, time", engine] = time.perf_counter() - began[0]
                        taken[f"{kind}, CPU time", engine] = cpu_seconds(engine.pid) - began[1]
                for kind, engine in taken:
                    if turn and engine is off:  # the first pair warms up
                        ratios.setdefault(kind, []).append(taken[kind, request] / taken[kind, off])
    for kind, each in ratios.items():
        quarters = statistics.quantiles(each, n=4)
        print(f"{kind:30} {statistics.median(each):.3f}  ({quarters[0]:.3f} to {quarters[2]:.3f}, {pairs} pairs)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=950, help="of a document")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policies", nargs="*", default=["heads", "deviation", "mixkq"])
    parser.add_argument("--shares", nargs="*", type=float, default=[0.15, 0.3])
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="measure requests that do not opt in, nothing else")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--plot", type=Path, help="draw time against share here, as SVG")
    arguments = parser.parse_args()
    if arguments.cost:
        measure_cost(arguments.cost)
        return 0
    variants = [("none", 0.0), *((policy, share) for policy in arguments.policies for share in arguments.shares)]
    documents = prompts(arguments.documents, arguments.tokens, seed=1)
    system, question, other = (prompts(1, count, seed=seed)[0] for count, seed in ((20, 2), (40, 3), (30, 4)))
    source = system + [token for document in documents for token in document] + other
    moved = system + [token for document in reversed(documents) for token in document] + question
    times: dict[str, list[float]] = {}
    answers: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        DepotProcess(pool_size="4GiB", new_session=True) as depot,
        Engine(
            make_model(Path(directory), "smol"),
            connector(depot.url, blend="request"),
            environment=ENVIRONMENT,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=64,
            kv_cache_memory_bytes=1 << 30,
        ) as engine,
    ):
        ask(engine, prompts(1, 1000, seed=5)[0])  # warms the engine up
        engine.reset()
        engine.ask("generate", prompts=[source], max_tokens=1)
        ask(engine, moved, {"policy": "none"})
        for _ in range(arguments.rounds):
            seconds, _ = ask(engine, moved)
            times.setdefault("computed", []).append(seconds)
            for policy, ratio in variants:
                name = f"{policy} {ratio:.0%}"
                seconds, output = ask(engine, moved, {"policy": policy, "ratio": ratio})
                times.setdefault(name, []).append(seconds)
                said: dict[str, dict[str, Any]] = output["params"] or {}
                answers[name] = said.get("kvdepot", {}).get("blend")
            engine.reset()
            began = time.perf_counter()
            engine.ask("generate", prompts=[source], max_tokens=1)
            times.setdefault("exact hit of as many tokens", []).append(time.perf_counter() - began)
    computed = min(times["computed"])
    print(f"{len(moved):,} tokens; computed: {computed:.2f} s")
    for name, seconds in times.items():
        answer = answers.get(name)
        print(
            f"{name:30} {min(seconds) / computed:5.2f}  (median {statistics.median(seconds) / computed:.2f})  ", end=""
        )
        if answer:
            reused, again, gaps = (answer[f"{kind}_tokens"] for kind in ("reused", "recomputed", "gap"))
            print(f"reused {reused:,}, again {again:,}, gaps {gaps:,}", end="")
        print()
    if arguments.plot:
        least = {name: min(seconds) / computed for name, seconds in times.items()}
        curves = [
            (
                policy,
                [(0.0, least["none 0%"]), *((share, least[f"{policy} {share:.0%}"]) for share in arguments.shares)],
            )
            for policy in arguments.policies
        ]
        title = f"Time to the first token of {len(moved):,} tokens, computing all of them is 100%"
        label = "share of the reused tokens that is computed again"
        arguments.plot.write_text(curves_as_svg(title, curves, label, lambda share: f"{share:.0%}", float))
    if arguments.json:
        arguments.json.write_text(json.dumps({"times": times, "answers": answers, "tokens": len(moved)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
