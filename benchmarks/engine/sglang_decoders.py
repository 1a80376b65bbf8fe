# pyright: basic, reportMissingImports=false
"""Measures the steps of eight decoding requests in SGLang while prompts of 10,000 tokens are loaded from a depot.

    PYTHONPATH=tests python benchmarks/engine/sglang_decoders.py --rounds 4 --kills 30

Needs an environment like that of `tox -e sglang`. Copies out of the depot take as long as over a link of 5 GB/s (66 ms
for 328 MB, float32). In each round, the decoders run alone, beside prompts that arrive and are in SGLang's own cache,
and beside the same prompts from the depot. A step is the time between two tokens of a decoder, so it includes the
computation of an arrived prompt's last tokens. With `--kills`, more rounds follow, in which the depot is killed and
restarted. Tokens are compared with those of the decoders alone, and of the prompts when they were computed. With
`--kinds`, models with other kinds of caches serve prompts before, twice, the second time from the depot.

`--device cuda` has the shape of Llama 3.1 8B with random weights, SGLang's own attention, and the device's own link (no
GPU has run it). `--fake` rehearses it on a CPU. Findings are lines of JSON.

This module is also a plugin of SGLang, which slows copies and notes the time of each step. With it, `torch_native`
computes attention for the last 100 tokens of an arriving prompt and for decoders alone, and none for other tokens. That
of 10,000 tokens takes minutes on a CPU, and SGLang's own computes it again for the last token, while decoders wait.
"""

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvdepot.backends import Copier, CopyBatch
from kvdepot.copying.runs import EXTENT_DTYPE
from kvdepot.lab.processes import DepotProcess
from kvdepot_cpu.context import PageCopier
from support.sglang.engines import Answer, Engine, linker, prompts, tokens

MODELS = Path(__file__).parents[2] / "tests" / "support" / "vllm" / "models.py"
DECODERS = 8
BYTES_PER_SECOND = 5e9
_ATTENTION: Final = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"
_RESULTS: Final = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"
FEW = 512  # tokens of prompts that are attended as a whole
KINDS = ("gqa", "mla-dense", "window-pool")
FAKE_KINDS = KINDS[:1]
WAYS = ("alone", "own cache", "depot")


class Steps:
    """The steps that the plugin notes in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def since(self, began: float) -> list[float]:
        """Return the seconds of the steps of all decoders since a time."""
        lines = [line.split() for line in self._path.read_text().splitlines()]
        steps = [(float(at), int(size)) for at, size in lines if float(at) >= began]
        return [b[0] - a[0] for a, b in itertools.pairwise(steps) if min(a[1], b[1]) >= DECODERS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=10_000, help="of an arriving prompt")
    parser.add_argument("--steps", type=int, default=300, help="of the decoders, in each way of a round")
    parser.add_argument("--arrivals", type=int, default=8, help="in each way of a round")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds before each arrival")
    parser.add_argument("--device", default="cpu", help="of SGLang (default %(default)s)")
    parser.add_argument("--kinds", action="store_true", help="other kinds of caches, too")
    parser.add_argument("--fake", action="store_true", help="rehearse a few steps on a CPU")
    parser.add_argument("--kills", type=int, default=0, help="of the depot, after the measurement")
    options = parser.parse_args()
    if options.fake:
        options.device, options.rounds, options.tokens, options.steps, options.arrivals = "cpu", 1, 1000, 40, 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # of the plugin
        os.environ["KVDEPOT_STEPS"] = str(Path(folder) / "steps")
        os.environ["KVDEPOT_LAST"] = str(options.tokens - 100)
        chosen: dict[str, Any] = {"device": options.device}
        if options.device != "cpu":
            chosen |= {"attention_backend": "triton", "dtype": "bfloat16", "load_format": "dummy"}
        if options.kinds:
            kinds(folder, chosen, FAKE_KINDS if options.fake else KINDS)
        with DepotProcess(pool_size="8GiB" if options.device != "cpu" else "2GiB", new_session=True) as depot:
            engine = Engine(
                make(folder, "long" if options.device == "cpu" else "8b"),
                plugin="sglang_decoders",
                **linker(depot.url, keep_after_reset=True, lookup_seconds=1.0, deadline_seconds=5.0, copy_threads=1),
                max_total_tokens=options.tokens + 64 * (DECODERS * (4 + options.steps // 64) + 16),
                context_length=options.tokens + 1024,
                chunked_prefill_size=2048,
                **chosen,
            )
            with engine:
                engine.wait_until_ready()
                measure(engine, depot, Steps(Path(os.environ["KVDEPOT_STEPS"])), options)


def report(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def make(folder: str, name: str) -> Path:
    command = [sys.executable, str(MODELS), folder, name, "0"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def kinds(folder: str, chosen: dict[str, Any], names: tuple[str, ...]) -> None:
    """Serve prompts with each kind of cache, and again from the depot. Compare tokens."""
    wanted = prompts(2, 900, seed=3)
    chosen = {name: value for name, value in chosen.items() if name != "load_format"}
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        for name in names:
            with Engine(make(folder, name), **linker(depot.url, keep_after_reset=True), **chosen) as engine:
                engine.wait_until_ready()
                expected = tokens(engine.each(wanted))
                engine.flush()
                again = engine.each(wanted)
                right, loaded = tokens(again) == expected, [each.from_depot for each in again]
                report("kind", kind=name, right=right and min(loaded) > 0, loaded_tokens=loaded)


def measure(engine: Engine, depot: DepotProcess, steps: Steps, options: argparse.Namespace) -> None:
    arriving = prompts(3, options.tokens, seed=1)  # each evicts the one before from SGLang's own cache
    decoding = prompts(DECODERS, 100, seed=2)
    expected = tokens(engine.each(arriving, max_tokens=1))
    alone, _ = engine.beside(decoding, [], options.steps, 0.0)
    turns = itertools.cycle(range(len(arriving)))

    def run(way: str) -> tuple[list[float], list[Answer]]:
        order = {"alone": [], "own cache": [0] * options.arrivals}.get(way)
        if order is None:
            order = [next(turns) for _ in range(options.arrivals)]
        if way == "own cache":
            engine.generate(arriving[0], max_tokens=1)
        began = time.perf_counter()
        decoded, arrived = engine.beside(decoding, [arriving[each] for each in order], options.steps, options.pause)
        assert tokens(decoded) == tokens(alone)
        assert tokens(arrived) == [expected[each] for each in order]
        assert not any(each.failed for each in (*decoded, *arrived))
        return steps.since(began), arrived

    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            gaps, arrived = run(way)
            found[way] += gaps
            loaded = sum(each.from_depot > 0 for each in arrived)
            report("round", way=way, steps=len(gaps), prompts=len(arrived), loaded=loaded)
    for way in WAYS:
        p50, p99 = (statistics.quantiles(found[way], n=100)[percent - 1] for percent in (50, 99))
        base = statistics.quantiles(found["own cache"], n=100)[98]
        ms = {"p50_ms": round(p50 * 1e3, 1), "p99_ms": round(p99 * 1e3, 1)}
        report("steps", way=way, **ms, of_own_cache_s_p99=round(p99 / base, 2))
    if options.kills:
        kill(depot, lambda: run("depot"), options.kills)


def kill(depot: DepotProcess, run: Callable[[], tuple[list[float], list[Answer]]], kills: int) -> None:
    """Kill and restart the depot while prompts are loaded, until all kills are done."""
    done = threading.Event()

    def kill_and_restart() -> None:
        try:
            for pause in itertools.islice(itertools.cycle((1.0, 2.0, 4.0)), kills):
                time.sleep(pause)
                depot.kill()
                depot.start()
        finally:
            done.set()

    threading.Thread(target=kill_and_restart).start()
    loaded = served = 0
    while not done.is_set():
        _, arrived = run()
        served += len(arrived)
        loaded += sum(each.from_depot > 0 for each in arrived)
    report("kills", kills=kills, prompts=served, loaded=loaded, aborted=0, right=True)


# --- the plugin ---------------------------------------------------------------------------------------------------


def slowly(copy: Any) -> Any:
    """Return `PageCopier.retrieve` at the speed of the link."""

    def retrieve(copier: Copier, batch: CopyBatch) -> None:
        began = time.perf_counter()
        copy(copier, batch)
        num_bytes = int(np.frombuffer(batch.extents, EXTENT_DTYPE)["num_bytes"].sum())
        time.sleep(max(0.0, num_bytes / BYTES_PER_SECOND - (time.perf_counter() - began)))

    return retrieve


def around_attention(
    original: Any, backend: Any, query: Any, output: Any, k_cache: Any, v_cache: Any, req_to_token: Any, *args: Any,
    **options: Any,
) -> Any:  # fmt: skip
    import torch

    rows, seq_lens, _, new_lens = args[:4]
    start, last = 0, int(os.environ["KVDEPOT_LAST"])
    output.zero_()
    for row, length, new in zip(rows.tolist(), seq_lens.tolist(), new_lens.tolist(), strict=True):
        first = max(length - new, last if length > last else length - new if length < FEW else length)
        if first < length:
            slots = req_to_token[row, :length]
            keys, values = (cache[slots].movedim(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
            mask = torch.ones(length - first, length, dtype=torch.bool).tril(first)
            place = slice(start + new - (length - first), start + new)
            found = torch.nn.functional.scaled_dot_product_attention(
                query[place].movedim(0, 1).unsqueeze(0), keys, values, attn_mask=mask, enable_gqa=True
            )
            output[place] = found.squeeze(0).movedim(1, 0)
        start += new
    return output


def around_results(original: Any, scheduler: Any, batch: Any, result: Any) -> None:
    original(scheduler, batch, result)
    if batch.forward_mode.is_decode():
        with open(os.environ["KVDEPOT_STEPS"], "a") as file:
            file.write(f"{time.perf_counter()} {batch.batch_size()}\n")


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for method, hook in ((_ATTENTION, around_attention), (_RESULTS, around_results)):
        hooks.HookRegistry.register(method, hook, hooks.HookType.AROUND)
    PageCopier.retrieve = slowly(PageCopier.retrieve)


if __name__ == "__main__":
    main()
