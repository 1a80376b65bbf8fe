# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Measures a depot with a real vLLM on one GPU of 80 GB: `python benchmarks/devices/vllm_cuda.py [--only PART,..]`.

`cuda_gpu.py` runs its parts as phases. README.md beside it says what to expect, and how to run it without network.

`kinds` starts tiny models of every kind of KV cache, and drafters with layers of their own, and compares the bytes of
each loaded block with those stored, and the accepted drafts. `sleep` (vLLM 0.33) puts engines to sleep at both levels
after loads were aborted, and compares the same bytes. `kills` kills the depot while prompts are loaded.
`large` uses a model of the shape of Llama 3.1 8B with random weights, in bfloat16, with CUDA graphs for decoding.
Prompts have 10,000 tokens: 1.31 GB of KV. `--engines` chooses among

- `alone`: no connector. It computes a prompt, then reuses it from vLLM's own prefix cache;
- `offloading`: vLLM's own connector, with host memory of its own;
- `direct`: stores in the depot, empties its own prefix cache, and loads the prompt;
- `other`: started later. It loads what `direct` stored;
- `ipc`: stores and loads by a process of the depot. In the layout of FlashAttention it shares nothing with `direct`.

It measures the time to the first token, and then the steps of eight requests that decode while others with 10,000
tokens are computed or loaded, and how many of these are served. The engines take turns, a second each, in six rounds.
`--fake` rehearses all of it on a CPU; its figures mean nothing.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, cached, connector, prompts, tokens
from support.vllm.models import make_model

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # no request here samples, and FlashInfer may be missing
FAKE = "--fake" in sys.argv
NUM_TOKENS = 600 if FAKE else 10_000
NUM_PROMPTS = 2 if FAKE else 5
NUM_KILLS = 2 if FAKE else 10
ROUNDS = 1 if FAKE else 6  # so that at least 30 prompts are served beside decoders
# GB of KV per engine: three prompts, so that each of five prompts has left the cache when its turn comes again
CACHE_BYTES = (32 << 20) if FAKE else (4608 << 20)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, options of vLLM, settings of the connector
    "grouped queries": ("gqa", {}, {}),
    "grouped queries, ipc": ("gqa", {}, {"mode": "ipc"}),
    "fp8": ("gqa", {"kv_cache_dtype": "fp8"}, {}),
    "EAGLE": ("eagle", {"speculative_config": {"method": "eagle", "num_speculative_tokens": 3}}, {}),
    "MTP": ("mtp", {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}, {}),
    "windows and full attention": ("windows", {}, {}),
    "windows alone": ("only-windows", {}, {}),
    "latent attention": ("mla-dense", {}, {}),
    "latent attention and experts": ("mla", {}, {}),
    "recurrent states": (
        "recurrent",
        {
            "mamba_ssm_cache_dtype": "float32",
            "kv_cache_memory_bytes": 256 << 20,
            "additional_config": {"gdn_prefill_backend": "triton"},  # by default a kernel of FlashInfer, on Hopper
        },
        {},
    ),
}
SLEEP = """
import time
import torch

def update_weights():
    generator = torch.Generator().manual_seed(5)
    model = child.core.model_executor.driver_worker.worker.model_runner.get_model()
    for name, parameter in sorted(model.named_parameters()):
        fresh = torch.ones(parameter.shape, dtype=torch.float32)
        if parameter.dim() >= 2:
            fresh.normal_(0, 0.06, generator=generator)
        parameter.data.copy_(fresh)

child.submit(RUNNING, 16, 1)
llm.llm_engine.abort_request([*RUNNING])
child.drain()
free = (lambda: 0) if FAKE else (lambda: torch.cuda.mem_get_info()[0])
before, began = free(), time.perf_counter()
child.sleep(LEVEL, "abort") if FAKE else llm.sleep(level=LEVEL)
asleep, freed = time.perf_counter(), free() - before
wake_up = child.wake_up if FAKE else llm.wake_up
if LEVEL == 2:
    wake_up(["weights"])
    update_weights()
    wake_up(["kv_cache"])
else:
    wake_up()
child.wait_for_the_depot()
result = {"freed_mib": freed >> 20, "sleep_ms": (asleep - began) * 1e3, "wake_ms": (time.perf_counter() - asleep) * 1e3}
"""
DECODE = """
import time
from vllm import SamplingParams

def add(name, prompt, count):
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

def steps(seconds, load):
    # Step for a while, and keep one request of `load` in the engine. Return the times of steps and of served requests.
    times, served, is_loading, number = [], [], False, 0
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        if load and not is_loading:
            add(f"load {number} {end}", load[(FIRST + number) % len(load)], 1)
            is_loading, number, arrived = True, number + 1, began
        for output in llm.llm_engine.step():
            if output.finished and output.request_id.startswith("load"):
                is_loading = False
                served.append(time.perf_counter() - arrived)
        times.append(time.perf_counter() - began)
    while is_loading:
        is_loading = not any(o.finished and o.request_id.startswith("load") for o in llm.llm_engine.step())
    return times, served

for number, prompt in enumerate(SHORT):
    add(f"decode {number}", prompt, 100_000)
steps(0.3, [])
quiet, _ = steps(SECONDS / 2, [])
busy, served = steps(SECONDS, LONG)
llm.llm_engine.abort_request([f"decode {number}" for number in range(len(SHORT))])
child.drain()
result = {"quiet": quiet, "busy": busy, "served": served}
"""


def report(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def start(engines: dict[str, Any], model: Path, configs: dict[str, Any], options: dict[str, Any]) -> None:
    """Start engines at the same time. Report each one that fails."""

    def one(name: str) -> None:
        began = time.monotonic()
        try:
            engines[name] = Engine(model, configs[name], **options)
        except AssertionError as error:
            report("failed", engine=name, why=str(error)[-4000:])
            return
        lines = [line for line in engines[name].log().splitlines() if "kvdepot" in line or "layout" in line]
        report("started", engine=name, seconds=round(time.monotonic() - began, 1), said=[x[-300:] for x in lines[-12:]])

    with ThreadPoolExecutor(len(configs)) as pool:
        list(pool.map(one, configs))


def kinds(directory: Path) -> None:
    """Serve prompts three times with every kind of cache, the last time after the depot was killed and restarted.

    Compare tokens, and the bytes of loaded blocks with stored ones.
    """
    wanted = prompts(2, 1500) + prompts(2, 1000, seed=1, shared=600)
    models = {name: make_model(directory, name) for name in {model for model, _, _ in KINDS.values()}}

    def one(kind: str) -> None:
        model, options, settings = KINDS[kind]
        options = {"kv_cache_memory_bytes": 128 << 20, "gpu_memory_utilization": 0.05, **options}
        if kind == "EAGLE":
            options["speculative_config"] = {**options["speculative_config"], "model": str(models[model] / "drafter")}
        accepted: list[int] = []

        def serve(engine: Engine) -> list[dict[str, Any]]:
            before, outputs = drafts(engine), engine.generate(wanted, together=False)
            accepted.append(drafts(engine) - before)
            return outputs

        try:
            with (
                DepotProcess(pool_size="512MiB", new_session=True) as depot,
                Engine(models[model], connector(depot.url, **settings), **options) as engine,
            ):
                engine.ask("watch")
                cold = serve(engine)
                engine.reset()
                warm = serve(engine)
                engine.reset()
                depot.kill()
                depot.start()
                wait_until(lambda: len(depot.status().contexts) == 2, 30, "scheduler and worker to register again")
                after = serve(engine)
                watched = engine.execute("result = child.watched")
                contexts = [c for c in depot.status().contexts if c.role == "worker"]
                report(
                    "kind",
                    kind=kind,
                    right=watched["wrong"] == watched["unknown"] == 0 < watched["loaded"],
                    same_tokens=sum(a == b for a, b in zip(tokens(cold), tokens(warm), strict=True)),
                    of=len(wanted),
                    cached=cached(warm),
                    same_tokens_after_a_kill=sum(a == b for a, b in zip(tokens(cold), tokens(after), strict=True)),
                    cached_after_a_kill=cached(after),
                    device=[getattr(c, "device", "") for c in contexts],
                    accepted_drafts=accepted,
                    **watched,
                    said=[line[-200:] for line in engine.log().splitlines() if "kvdepot" in line and "WARN" in line],
                )
        except BaseException as error:
            report("failed", kind=kind, why=str(error)[-4000:])

    with ThreadPoolExecutor(1 if FAKE else len(KINDS)) as pool:
        list(pool.map(one, ("grouped queries", "EAGLE") if FAKE else KINDS))


def drafts(engine: Engine) -> int:
    """Return how many drafts an engine has accepted."""
    return int(engine.ask("metrics").get("vllm:spec_decode_num_accepted_tokens", 0))


def kills(directory: Path) -> None:
    """Kill the depot while prompts are loaded, each time a little later, and compare tokens and bytes."""
    wanted = prompts(4, NUM_TOKENS, seed=90)
    options = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, "max_model_len": 16384}
    with (
        DepotProcess(pool_size="512MiB" if FAKE else "4GiB", new_session=True) as depot,
        Engine(make_model(directory, "long"), connector(depot.url, deadline_seconds=2.0), **options) as engine,
    ):
        engine.ask("watch")
        expected, same = tokens(engine.generate(wanted, together=False)), 0
        for number in range(NUM_KILLS):
            engine.reset()
            engine.send("generate", prompts=wanted, max_tokens=engine.max_tokens)
            time.sleep(0.005 * number)
            depot.kill()
            same += tokens(engine.answer(120)["outputs"]) == expected
            depot.start()
            wait_until(lambda: len(depot.status().contexts) == 2, 30, "scheduler and worker to register again")
            engine.reset()
            engine.generate(wanted, together=False)  # stores them again
        watched = engine.execute("result = child.watched")
        right = same == NUM_KILLS and watched["wrong"] == watched["unknown"] == 0
        report("kills", right=right, kills=NUM_KILLS, same_tokens=same, **watched)


def sleep(directory: Path) -> None:
    """Sleep in both modes: at level 1 with the same weights, at level 2 with other weights afterwards."""
    wanted = prompts(4, 1500, seed=80)
    model = make_model(directory, "gqa")
    on_cpu = "from vllm.platforms.cpu import CpuPlatform\nCpuPlatform.is_sleep_mode_available = lambda platform: True"
    first = on_cpu if FAKE else ""

    def one(mode: str) -> None:
        options: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "gpu_memory_utilization": 0.05}
        try:
            with (
                DepotProcess(pool_size="512MiB", new_session=True) as depot,
                Engine(
                    model, connector(depot.url, mode=mode), enable_sleep_mode=True, first=first, **options
                ) as engine,
            ):
                engine.ask("watch")
                expected = tokens(engine.generate(wanted, together=False))
                engine.reset()
                for night, level in enumerate((1, 1, 2, 1)):
                    running = {f"{night} {number}": prompt for number, prompt in enumerate(wanted)}
                    found = engine.execute(f"RUNNING, LEVEL, FAKE = {running}, {level}, {FAKE}\n" + SLEEP)
                    if level == 2:
                        without = {"kvdepot": {"load": False, "store": False}}
                        expected = tokens(engine.generate(wanted, together=False, params=without))
                        engine.reset()
                    woken = engine.generate(wanted, together=False)
                    engine.reset()
                    again = engine.generate(wanted, together=False)
                    engine.reset()
                    same = [tokens(each) == expected for each in (woken, again)]
                    report("night", mode=mode, level=level, same=same, cached=[cached(woken), cached(again)], **found)
                said = [line[-300:] for line in engine.log().splitlines() if "kvdepot" in line]
                report("slept", mode=mode, **engine.execute("result = child.watched"), said=said[-12:])
        except BaseException as error:
            report("failed", mode=mode, why=str(error)[-4000:])

    for mode in ("direct", "ipc"):  # in turn, as the freed memory is measured on the whole device
        one(mode)


def make_large_model(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Write the configuration of Llama 3.1 8B. Return its folder and the options of vLLM."""
    options: dict[str, Any] = {
        "dtype": "float32" if FAKE else "bfloat16",
        "load_format": "auto" if FAKE else "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024 if FAKE else 16384,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,  # the default of vLLM's server on this device
        "kv_cache_memory_bytes": CACHE_BYTES,
        "gpu_memory_utilization": 0.25,  # vLLM checks that this much is free, for each of three engines
    }
    if not FAKE:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options |= {"enforce_eager": False, "compilation_config": graphs}
    return make_model(directory, "gqa" if FAKE else "8b"), options


def first(engines: dict[str, Any], names: list[str], wanted: list[list[int]], base: dict[int, Any]) -> None:
    """Serve prompts with each engine twice: an engine with a connector forgets its own prefix cache in between."""
    rows: dict[str, list[Any]] = {}
    for number, prompt in enumerate(wanted):
        for name in names:
            again = ("loaded",) if name == "other" else ("computed", "reused" if name == "alone" else "loaded")
            for way in again:
                if way != "reused":
                    engines[name].reset()
                row = engines[name].ask("first_token", prompt=prompt, max_tokens=8)
                rows.setdefault(f"{name}: {way}", []).append(row)
                if name == "alone":
                    base.setdefault(number, {})[way] = row["tokens"]
    for name, found in rows.items():
        times = [1e3 * row["first_token_seconds"] for row in found]
        settled = [1e3 * row["settled_seconds"] for row in found]
        same = {
            way: sum(row["tokens"] == base.get(number, {}).get(way) for number, row in enumerate(found))
            for way in ("computed", "reused")
        }
        report(
            "first token",
            way=name,
            median_ms=round(statistics.median(times), 2),
            all_ms=[round(each, 2) for each in times],
            settled_ms=round(statistics.median(settled), 2),
            cached=sorted({row["cached"] for row in found}),
            same_tokens_as=same,
        )


def decode(engines: dict[str, Any], names: list[str], wanted: list[list[int]]) -> None:
    found: dict[str, dict[str, list[float]]] = {name: {"quiet": [], "busy": [], "served": []} for name in names}
    for name in names * ROUNDS:
        if name != "alone":
            engines[name].reset()
        first = len(found[name]["served"])
        code = f"SHORT, LONG, FIRST, SECONDS = {prompts(8, 64, seed=3)}, {wanted}, {first}, 1.0\n"
        for part, times in engines[name].execute(code + DECODE).items():
            found[name][part] += times
    for name, parts in found.items():
        row: dict[str, Any] = {"engine": name, "seconds": ROUNDS, "served": len(parts["served"])}
        for part, times in parts.items():
            ms = sorted(1e3 * each for each in times) or [0.0]
            row |= {f"{part}_mean_ms": sum(ms) / len(ms), f"{part}_p99_ms": ms[len(ms) * 99 // 100]}
        report("decode", **{key: round(each, 2) if isinstance(each, float) else each for key, each in row.items()})


def large(directory: Path) -> None:
    model, options = make_large_model(directory)
    wanted, base = prompts(NUM_PROMPTS, NUM_TOKENS, seed=7), {}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": (1 if FAKE else 12) << 30},
    }
    with DepotProcess("--move-seconds", "20", pool_size="1GiB" if FAKE else "14GiB") as depot:
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 120, "the pool")
        rounds: list[dict[str, Any]] = [
            {"alone": None, "offloading": offloading, "direct": connector(depot.url)},
            {"other": connector(depot.url), "ipc": connector(depot.url, mode="ipc")},
        ]
        chosen = set(OPTIONS.engines.split(",")) - ({"offloading", "ipc"} if FAKE else set())
        for configs in [{name: configs[name] for name in configs if name in chosen} for configs in rounds]:
            engines: dict[str, Any] = {}
            try:
                start(engines, model, configs, options)
                names = [name for name in configs if name in engines]
                for name in names:
                    for _ in range(3):  # the first transfers come before the pool is registered
                        engines[name].ask("first_token", prompt=prompts(1, NUM_TOKENS, seed=99)[0], max_tokens=8)
                        engines[name].reset()
                time.sleep(0 if FAKE else 2)  # the registration of the pool
                first(engines, names, wanted, base)
                decode(engines, names, wanted)
                for name in names:
                    values = engines[name].ask("metrics") if name not in ("alone", "offloading") else {}
                    report("metrics", engine=name, **{key: each for key, each in values.items() if "kvdepot" in key})
            except Exception as error:
                report("failed", engines=[*configs], why=str(error)[-4000:])
            finally:
                for engine in engines.values():
                    engine.close()
        report("depot", **{key: value for key, value in depot.status().counters.items() if value})


PARTS = {"kinds": kinds, "sleep": sleep, "large": large, "kills": kills}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name in OPTIONS.only.split(","):
            PARTS[name](Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,..", help="of %(default)s")
    parser.add_argument("--engines", default="alone,offloading,direct,other,ipc", help="of the part large")
    parser.add_argument("--fake", action="store_true", help="rehearse on a CPU")
    OPTIONS = parser.parse_args()
    main()
