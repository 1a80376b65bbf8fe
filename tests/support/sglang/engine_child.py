# pyright: basic, reportMissingImports=false
"""One SGLang engine on CPU. It takes commands as lines on its standard input and answers each with a line.

Its argument is a folder with plugins, and the first line has its options. Importing SGLang takes 12 CPU seconds in each
of an engine's three processes. So one process imports this module for a test run, and all engines and servers are forks
of it. So are their child processes, which SGLang would spawn. A start takes 1.3 CPU seconds instead of 41.
"""

import asyncio
import importlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from support.leftovers import take_own_names_in_sglang


def main() -> None:
    sys.path.insert(0, sys.argv[1])  # the folder with plugins
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang's processes inherit both
    given = sys.stdin
    engine = _engine(json.loads(given.readline()))
    print(json.dumps({"ok": True}), file=answers, flush=True)
    for line in given:
        command = json.loads(line)
        print(json.dumps(_answer(engine, command)), file=answers, flush=True)
    engine.shutdown()


def _engine(options: dict[str, Any]) -> Any:
    return importlib.import_module("sglang").Engine(
        **{
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "dtype": "float32",
            "disable_cuda_graph": True,
            "mem_fraction_static": 0.9,
            "max_total_tokens": 16384,
            "page_size": 64,
            "context_length": 8192,
            "chunked_prefill_size": 8192,
            "skip_tokenizer_init": True,
            "enable_cache_report": True,
            "sleep_on_idle": True,
            "log_level": "info",
            **options,
        }
    )


def _answer(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "flush":
        return {"ok": bool(getattr(engine.flush_cache(), "success", False))}
    if command["do"] == "update_from_disk":
        return {"ok": engine.update_weights_from_disk(command["model"])[0]}
    if command["do"] == "update_from_tensors":
        return {"ok": _update_from_tensors(engine, command["model"])}
    if command["do"] == "beside":
        return engine.loop.run_until_complete(_beside(engine, command))
    sampling = {"temperature": 0, "max_new_tokens": command["max_tokens"], "ignore_eos": True}
    extra = {name: command[name] for name in ("cache_salt",) if name in command}
    began = time.perf_counter()
    if isinstance(command["prompts"][0], list) and len(command["prompts"]) > 1:
        results = engine.generate(input_ids=command["prompts"], sampling_params=sampling, **extra)
        return {"answers": [_facts(each, 0.0) for each in results]}
    first, last = 0.0, {}
    tokens: list[int] = []
    for last in engine.generate(input_ids=command["prompts"][0], sampling_params=sampling, stream=True, **extra):
        first = first or time.perf_counter() - began
        new = last["output_ids"]
        tokens = new if len(new) >= len(tokens) else tokens + new
    return {"answers": [{**_facts(last, first), "tokens": tokens}]}


async def _beside(engine: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Decode for some prompts, while others arrive one after the other. An arrival gets one token."""

    async def generate(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return _facts(await engine.async_generate(input_ids=prompt, sampling_params=sampling), 0.0)

    decoders = [asyncio.create_task(generate(prompt, command["max_tokens"])) for prompt in command["decoders"]]
    arrivals: list[dict[str, Any]] = []
    for prompt in command["arrivals"]:
        await asyncio.sleep(command["pause"])
        arrivals.append(await generate(prompt, 1))
    return {"answers": await asyncio.gather(*decoders), "arrivals": arrivals}


def _update_from_tensors(engine: Any, model: str) -> bool:
    """Give the engine the weights of a model as a trainer does: in two parts. The last one flushes the cache."""
    safetensors = importlib.import_module("safetensors.torch")
    tensors = list(safetensors.load_file(Path(model) / "model.safetensors").items())
    done = [engine.begin_weight_update()]
    for part, is_last in ((tensors[::2], False), (tensors[1::2], True)):
        done.append(engine.update_weights_from_tensor(part, flush_cache=is_last))
    return all(ok for ok, _ in [*done, engine.end_weight_update()])


def _facts(result: dict[str, Any], seconds: float) -> dict[str, Any]:
    meta = result["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    reason = meta.get("finish_reason") or {}
    return {
        "tokens": result["output_ids"],
        "cached": meta["cached_tokens"],
        "from_depot": details.get("storage", 0),
        "first_seconds": seconds,
        "failed": reason.get("type") == "abort",
    }


if __name__ == "__main__":
    main()
else:
    for name in ("sglang", "sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler"):
        importlib.import_module(name)
    importlib.import_module("sglang.srt.models.registry").import_model_classes("sglang.srt.models")
    take_own_names_in_sglang()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
