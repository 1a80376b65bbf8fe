"""Measures single flight and hand-over with real vLLM: `python benchmarks/engine/hand_over.py` in tox's `torch`.

Uses a small model with KV of a realistic size (128 KiB of float32 per token). `alone` has no depot; `prefill` and
`decode` share one. Each prompt is new, and each engine core has its own process. Prints, for 1,537 tokens:

- how many chunks `decode` found right after `prefill` had answered, and whether both answer with the same first token;
- the time to the first token over both engines as a ratio to `alone`, one after the other and both at once;
- with two engines that get four equal prompts each, the number of computed tokens as a ratio to one prompt, and the
  time until both have answered as a ratio to that of another prompt, which `prefill` then gets alone, without a pause
  before either (`--only-flight` prints only this);
- with `--kills N`, whether `decode` answers with the same token after a prefill engine was killed at a random moment.

The engines have vLLM's own settings; `--batched-tokens` computes a prompt in several steps. Needs 4 GiB of memory.
SIGTERM ends all its processes, as SIGINT does.

With `--own-cores`, all processes of `alone` and `prefill` run on the first core and those of `decode` on the second.
With `--own-threads`, vLLM's VLLM_CPU_OMP_THREADS_BIND binds only the threads that compute in the same way. On CPU, a
waiting engine keeps a core busy: see docs/many-nodes.md.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import pytest

from kvdepot.lab.processes import DepotProcess
from support.leftovers import own_places
from support.vllm.engines import Engine, Prompt, connector, prompts, wait_until_stored
from support.vllm.models import make_model

_POLLING_SECONDS = 1.5  # vLLM's worker polls for this long after a step, on a core that another engine may need
_POOL_SIZE = "1GiB"  # five prompts: each is needed at most once more, right after it was stored


@contextlib.contextmanager
def on_core(number: int | None) -> Generator[None]:
    """Restrict processes that start in the block to one core. None allows all."""
    cores = os.sched_getaffinity(0)
    if number is not None:
        os.sched_setaffinity(0, {sorted(cores)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def ask(engine: Engine, prompt: Prompt, params: dict[str, Any] | None = None) -> tuple[float, dict[str, Any]]:
    """Serve a prompt. Return the time to the first token and the answer."""
    if params is None or "do_remote_prefill" not in params:
        time.sleep(_POLLING_SECONDS)
    began = time.perf_counter()
    (output,) = engine.ask("generate", prompts=[prompt], max_tokens=1, params=params)["outputs"]
    return time.perf_counter() - began, output


def both_at_once(prefill: Engine, decode: Engine, prompt: Prompt) -> tuple[float, dict[str, Any]]:
    """Give a prompt to both engines. Return the time to the decode engine's first token, and its answer."""
    time.sleep(_POLLING_SECONDS)
    began = time.perf_counter()
    decode.send("generate", prompts=[prompt], max_tokens=1, params={"do_remote_prefill": True})
    prefill.send("generate", prompts=[prompt], max_tokens=1, params={"do_remote_decode": True})
    (output,) = decode.answer()["outputs"]
    seconds = time.perf_counter() - began
    prefill.answer()
    return seconds, output


def eight(prefill: Engine, decode: Engine, prompt: Prompt, other: Prompt) -> dict[str, Any]:
    """Give four equal prompts to each engine at once, and then another one to `prefill`."""
    began = time.perf_counter()
    for engine in (prefill, decode):
        engine.send("generate", prompts=[prompt] * 4, max_tokens=1)
    outputs = [output for engine in (prefill, decode) for output in engine.answer(300)["outputs"]]
    between = time.perf_counter()
    prefill.ask("generate", prompts=[other], max_tokens=1)
    return {
        "eight seconds": between - began,
        "eight seconds / one": (between - began) / (time.perf_counter() - between),
        "computed": sum(len(prompt) - output["cached"] for output in outputs) / len(prompt),
        "same of eight": all(output["tokens"] == outputs[0]["tokens"] for output in outputs),
    }


def hand_over(
    alone: Engine, prefill: Engine, decode: Engine, depot: DepotProcess, first: Prompt, second: Prompt
) -> dict[str, Any]:
    """Give one prompt to `prefill` and then to `decode`, and another one to both at once."""
    row: dict[str, Any] = {}
    row["alone"], expected = ask(alone, first)
    loaded = depot.status().counters["retrieve_chunks_hit"]
    row["prefill"], prefilled = ask(prefill, first, {"do_remote_decode": True})
    row["decode"], decoded = ask(decode, first, prefilled["params"])
    row["chunks"] = depot.status().counters["retrieve_chunks_hit"] - loaded
    row["same"] = expected["tokens"] == prefilled["tokens"] == decoded["tokens"]
    loaded = depot.status().counters["retrieve_chunks_hit"]
    row["at once"], decoded = both_at_once(prefill, decode, second)
    row["chunks at once"] = depot.status().counters["retrieve_chunks_hit"] - loaded
    row["same at once"] = decoded["tokens"] == ask(alone, second)[1]["tokens"]
    return row


def kill(
    model: Path, depot: DepotProcess, decode: Engine, prompt: Prompt, seconds: float, options: dict[str, Any]
) -> tuple[float, Any]:
    """Give a prompt to a new engine and to `decode`, and kill the former after `seconds`. Return `decode`'s answer."""
    with Engine(model, connector(depot.url), **options) as doomed:
        doomed.send("generate", prompts=[prompt], max_tokens=1)
        began = time.perf_counter()
        decode.send("generate", prompts=[prompt], max_tokens=1)
        time.sleep(seconds)
    (output,) = decode.answer(300)["outputs"]
    return time.perf_counter() - began, output["tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1537, help="of a prompt: whole chunks and one more")
    parser.add_argument("--block-tokens", type=int, default=128, help="of the engines' blocks, which are the chunks")
    parser.add_argument("--batched-tokens", type=int, help="of a step at most; default: vLLM's, the prompt in one step")
    parser.add_argument("--kv-cache-mib", type=int, default=512, help="of each engine's KV cache")
    parser.add_argument("--in-process", action="store_true", help="each engine core in the process of its caller")
    parser.add_argument("--only-flight", action="store_true", help="measure the eight equal prompts alone")
    parser.add_argument("--no-waiting", action="store_true", help="requests do not wait for others")
    parser.add_argument("--seed", type=int, default=7, help="of the prompts")
    parser.add_argument("--kills", type=int, default=0)
    cores = parser.add_mutually_exclusive_group()
    cores.add_argument("--own-cores", action="store_true", help="one core for prefill, another one for decode")
    cores.add_argument("--own-threads", action="store_true", help="the same, only for the threads that compute")
    parser.add_argument("--json", type=Path, help="write every measurement here")
    arguments = parser.parse_args()
    if arguments.kills and arguments.only_flight:
        parser.error("--kills compares with an engine alone, which --only-flight does not start")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # exits every `with` below
    rng = random.Random(7)
    wanted = (arguments.tokens - 1) // arguments.block_tokens
    if arguments.block_tokens >= 128 and (arguments.tokens - 1) % arguments.block_tokens:
        wanted += 1  # the last chunk is incomplete
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": arguments.kv_cache_mib << 20,
        "max_model_len": 2048,
        "block_size": arguments.block_tokens,
    }
    if arguments.batched_tokens:
        options["max_num_batched_tokens"] = arguments.batched_tokens
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_places(stack.enter_context(pytest.MonkeyPatch.context())))  # killed engines leave files
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        depot = stack.enter_context(DepotProcess(pool_size=_POOL_SIZE, new_session=True))
        model = make_model(Path(directory), "large-kv")
        config = connector(depot.url, wait_for_others=not arguments.no_waiting)
        engines: list[Engine] = []
        for number, each in enumerate((config, config, None)[: 2 if arguments.only_flight else 3]):
            core = int(number == 1)
            if arguments.own_threads:
                options["environment"] = {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
            with on_core(core if arguments.own_cores else None):
                engines.append(
                    stack.enter_context(Engine(model, each, multiprocessing=not arguments.in_process, **options))
                )
        prefill, decode, *others = engines
        for number, engine in enumerate((prefill, decode)):
            wait_until_stored(engine, depot, 1000 * (number + 1))
        print(f"{len(engines)} engines are up", flush=True)
        for prompt in prompts(6, arguments.tokens, seed=99):
            for engine in engines:
                ask(engine, prompt)
        rows: list[dict[str, Any]] = []
        given = iter(prompts(4 * arguments.prompts, arguments.tokens, seed=arguments.seed))
        for first, second, third, fourth in zip(given, given, given, given, strict=True):
            row = hand_over(others[0], prefill, decode, depot, first, second) if others else {}
            row |= eight(prefill, decode, third, fourth)
            rows.append(row)
            print(json.dumps(row), flush=True)
        kills: list[dict[str, Any]] = []
        for prompt in prompts(arguments.kills, arguments.tokens, seed=8):
            seconds, expected = ask(others[0], prompt)
            with on_core(0 if arguments.own_cores else None):
                took, tokens = kill(model, depot, decode, prompt, rng.uniform(0, 1.2 * seconds), options)
            kills.append({"alone": seconds, "took": took, "same": tokens == expected["tokens"]})
            print(json.dumps(kills[-1]), flush=True)
    result: dict[str, Any] = {
        "prompts": len(rows),
        "computed by eight equal requests / one prompt": statistics.median(row["computed"] for row in rows),
        "at most 1.1": sum(row["computed"] <= 1.1 for row in rows),
        "eight equal requests, median / one": statistics.median(row["eight seconds / one"] for row in rows),
        "eight equal requests, longest / one": max(row["eight seconds / one"] for row in rows),
        "at most twice one": sum(row["eight seconds / one"] <= 2 for row in rows),
        "same token, eight equal requests": sum(row["same of eight"] for row in rows),
    }
    if others:
        result |= {
            "every chunk found": sum(row["chunks"] == wanted for row in rows),
            "every chunk found, both at once": sum(row["chunks at once"] == wanted for row in rows),
            "same token": sum(row["same"] for row in rows),
            "same token, both at once": sum(row["same at once"] for row in rows),
            "prefill then decode / alone": statistics.median((r["prefill"] + r["decode"]) / r["alone"] for r in rows),
            "both at once / alone": statistics.median(row["at once"] / row["alone"] for row in rows),
        }
    if kills:
        result |= {
            "killed: same token": sum(each["same"] for each in kills),
            "killed": len(kills),
            "killed: longest wait beyond alone": max(each["took"] - each["alone"] for each in kills),
        }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "kills": kills, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
