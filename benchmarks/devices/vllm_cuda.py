# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Measures a depot with a real vLLM on one GPU of 80 GB: `python benchmarks/devices/vllm_cuda.py --out FOLDER`.

Without `sleep`, it takes five minutes on an H200, with vLLM 0.32 and torch 2.11; docs/devices.md has the figures.
`pack_vllm.py` packs vLLM for a machine without network.

`kinds` starts tiny models of every kind of KV cache and compares the bytes of each loaded block with those stored.
`sleep` (vLLM 0.33) puts engines to sleep at both levels after loads were aborted, and compares the same bytes.
`first` and `decode` use a model of the shape of Llama 3.1 8B with random weights, in bfloat16, with CUDA graphs for
decoding. Prompts have 10,000 tokens: 1.31 GB of KV. The engines are

- `alone`: no connector. It computes a prompt, then reuses it from vLLM's own prefix cache;
- `offloading`: vLLM's own connector, with host memory of its own;
- `direct`: stores in the depot, empties its own prefix cache, and loads the prompt;
- `other`: started later. It loads what `direct` stored;
- `ipc`: stores and loads by a process of the depot. In the layout of FlashAttention it shares nothing with `direct`.

`first` measures the time to the first token. `decode` measures the steps of eight requests that decode while others
with 10,000 tokens are computed or loaded. `--small` rehearses all of it on a CPU; its figures mean nothing.
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
SMALL = "--small" in sys.argv
NUM_TOKENS = 600 if SMALL else 10_000
NUM_PROMPTS = 2 if SMALL else 5
# GB of KV per engine: three prompts, so that each of five prompts has left the cache when its turn comes again
CACHE_BYTES = (32 << 20) if SMALL else (4608 << 20)
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, options of vLLM, settings of the connector
    "grouped queries": ("gqa", {}, {}),
    "grouped queries, ipc": ("gqa", {}, {"mode": "ipc"}),
    "fp8": ("gqa", {"kv_cache_dtype": "fp8"}, {}),
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
free = (lambda: 0) if SMALL else (lambda: torch.cuda.mem_get_info()[0])
before, began = free(), time.perf_counter()
child.sleep(LEVEL, "abort") if SMALL else llm.sleep(level=LEVEL)
asleep, freed = time.perf_counter(), free() - before
wake_up = child.wake_up if SMALL else llm.wake_up
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
    # Step for a while, and keep one request of `load` in the engine. Return the steps' times and the served requests.
    times, served, is_loading, number = [], 0, False, 0
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        if load and not is_loading:
            add(f"load {number} {end}", load[number % len(load)], 1)
            is_loading, number = True, number + 1
        for output in llm.llm_engine.step():
            if output.finished and output.request_id.startswith("load"):
                is_loading, served = False, served + 1
        times.append(time.perf_counter() - began)
    while is_loading:
        is_loading = not any(o.finished and o.request_id.startswith("load") for o in llm.llm_engine.step())
    return times, served

for number, prompt in enumerate(SHORT):
    add(f"decode {number}", prompt, 100_000)
steps(1.0, [])
quiet, _ = steps(SECONDS, [])
busy, served = steps(SECONDS, LONG)
llm.llm_engine.abort_request([f"decode {number}" for number in range(len(SHORT))])
child.drain()
def told(times):
    times = sorted(times)
    return {"mean_ms": sum(times) / len(times) * 1e3, "p50_ms": times[len(times) // 2] * 1e3,
            "p99_ms": times[len(times) * 99 // 100] * 1e3, "max_ms": times[-1] * 1e3}
result = {"quiet": told(quiet), "busy": told(busy), "served": served}
"""


def report(what: str, **values: Any) -> None:
    line = json.dumps({"what": what, **values})
    print(line, flush=True)
    with (OPTIONS.out / "vllm_cuda.jsonl").open("a") as file:
        file.write(line + "\n")


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
        try:
            with (
                DepotProcess(pool_size="512MiB", new_session=True) as depot,
                Engine(models[model], connector(depot.url, **settings), **options) as engine,
            ):
                engine.ask("watch")
                cold = engine.generate(wanted, together=False)
                engine.reset()
                warm = engine.generate(wanted, together=False)
                engine.reset()
                depot.kill()
                depot.start()
                wait_until(lambda: len(depot.status().contexts) == 2, 30, "scheduler and worker to register again")
                after = engine.generate(wanted, together=False)
                contexts = [c for c in depot.status().contexts if c.role == "worker"]
                report(
                    "kind",
                    kind=kind,
                    same_tokens=sum(a == b for a, b in zip(tokens(cold), tokens(warm), strict=True)),
                    of=len(wanted),
                    cached=cached(warm),
                    same_tokens_after_a_kill=sum(a == b for a, b in zip(tokens(cold), tokens(after), strict=True)),
                    cached_after_a_kill=cached(after),
                    device=[getattr(c, "device", "") for c in contexts],
                    **engine.execute("result = child.watched"),
                    said=[line[-200:] for line in engine.log().splitlines() if "kvdepot" in line and "WARN" in line],
                )
        except BaseException as error:
            report("failed", kind=kind, why=str(error)[-4000:])

    with ThreadPoolExecutor(1 if SMALL else len(KINDS)) as pool:
        list(pool.map(one, [*KINDS][:2] if SMALL else KINDS))


def sleep(directory: Path) -> None:
    """Sleep in both modes: at level 1 with the same weights, at level 2 with other weights afterwards."""
    wanted = prompts(4, 1500, seed=80)
    model = make_model(directory, "gqa")
    on_cpu = "from vllm.platforms.cpu import CpuPlatform\nCpuPlatform.is_sleep_mode_available = lambda platform: True"
    first = on_cpu if SMALL else ""

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
                    found = engine.execute(f"RUNNING, LEVEL, SMALL = {running}, {level}, {SMALL}\n" + SLEEP)
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
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    }  # fmt: skip
    if SMALL:
        sizes |= {
            "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 2048,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    config = t.LlamaConfig(max_position_embeddings=131072, bos_token_id=0, eos_token_id=1, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    options: dict[str, Any] = {
        "dtype": "float32" if SMALL else "bfloat16",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 1024 if SMALL else 16384,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 8192,  # the default of vLLM's server on this device
        "kv_cache_memory_bytes": CACHE_BYTES,
        "gpu_memory_utilization": 0.25,  # vLLM checks that this much is free, for each of three engines
    }
    if not SMALL:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
        options |= {"enforce_eager": False, "compilation_config": graphs}
    return directory, options


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
    for name in names:
        if name != "alone":
            engines[name].reset()
        code = f"SHORT = {prompts(8, 64, seed=3)}\nLONG = {wanted}\nSECONDS = {1.0 if SMALL else 2.0}\n" + DECODE
        found = engines[name].execute(code)
        for part in ("quiet", "busy"):
            found[part] = {key: round(value, 3) for key, value in found[part].items()}
        report("decode", engine=name, **found, slower=round(found["busy"]["mean_ms"] / found["quiet"]["mean_ms"], 3))


def large(directory: Path) -> None:
    model, options = make_large_model(directory / "large")
    wanted, base = prompts(NUM_PROMPTS, NUM_TOKENS, seed=7), {}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": (1 if SMALL else 12) << 30},
    }
    with DepotProcess("--move-seconds", "20", pool_size="1GiB" if SMALL else "14GiB") as depot:
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 120, "the pool")
        rounds: list[dict[str, Any]] = [
            {"alone": None, "offloading": offloading, "direct": connector(depot.url)},
            {"other": connector(depot.url), "ipc": connector(depot.url, mode="ipc")},
        ]
        if SMALL:
            del rounds[0]["offloading"], rounds[1]["ipc"]
        for configs in rounds:
            engines: dict[str, Any] = {}
            try:
                start(engines, model, configs, options)
                names = [name for name in configs if name in engines]
                for name in names:
                    for _ in range(3):  # the first transfers come before the pool is registered
                        engines[name].ask("first_token", prompt=prompts(1, NUM_TOKENS, seed=99)[0], max_tokens=8)
                        engines[name].reset()
                time.sleep(0 if SMALL else 2)  # the registration of the pool
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


def main() -> None:
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if "kinds" in OPTIONS.only:
            kinds(Path(folder))
        if "sleep" in OPTIONS.only:
            sleep(Path(folder))
        if "large" in OPTIONS.only:
            large(Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=Path.cwd(), metavar="FOLDER")
    parser.add_argument("--only", default="kinds,sleep,large", help="of %(default)s")
    parser.add_argument("--small", action="store_true", help="rehearse on a CPU")
    OPTIONS = parser.parse_args()
    main()
