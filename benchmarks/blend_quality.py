# pyright: basic, reportMissingImports=false
"""Measures what blending costs in right answers: `python benchmarks/blend_quality.py` in tox's environment `vllm`.

Serves prompts of the task in `tests/support/vllm/recall.py` with real vLLM on one CPU thread. The KV of all documents
comes from a prompt with the same documents in another order. For each policy and share of tokens computed again, prints
the share of right answers: to NTH questions, which full reuse must fail, and to ANY questions, which it must pass.
The documents have 19 tokens, so grains and heads are single tokens here.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
)  # fmt: skip
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from vllm import LLM

from kvdepot_vllm.blend.policies import Budget
from support.vllm import recall
from support.vllm.blending import Bench, Case, blender_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=recall.RECALL)
    parser.add_argument("--cases", type=int, default=300, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--policies", nargs="*", default=["heads", "deviation", "query", "mixkq"])
    parser.add_argument("--shares", nargs="*", type=float, default=[0.05, 0.15, 0.3, 0.5])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(
        model=str(arguments.model), skip_tokenizer_init=True, dtype="float32", max_model_len=512, enforce_eager=True,
        max_num_seqs=256, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    bench = Bench(blender_of(llm))
    source = random.Random(arguments.seed)
    cases = {kind: [Case.make(source, kind) for _ in range(arguments.cases)] for kind in (recall.NTH, recall.ANY)}
    ways = [("full prefill", 1.0), ("none", 0.0), ("all", 1.0)]
    ways += [(policy, share) for policy in arguments.policies for share in arguments.shares]
    rows: list[dict[str, Any]] = []
    for policy, share in ways:
        started = time.monotonic()
        nth, any_ = (right_answers(bench, cases[kind], policy, share) for kind in (recall.NTH, recall.ANY))
        seconds = round(time.monotonic() - started, 1)
        rows.append({"policy": policy, "share": share, "nth": nth, "any": any_, "seconds": seconds})
        print(f"{policy:14} {share:4.0%}  NTH {nth:6.1%}  ANY {any_:6.1%}  {seconds} s", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"cases": arguments.cases, "seed": arguments.seed, "rows": rows}, indent=1)
        )


def right_answers(bench: Bench, cases: list[Case], policy: str, share: float) -> float:
    """Return the share of right answers."""
    budget = Budget(share, run_tokens=1 if share else 0, grain=1)
    num_right = 0
    for case in cases:
        if policy == "full prefill":
            logits = bench.logits(case.prompt, 0)
        else:
            bench.store(case.source)
            logits = bench.blend(case.prompt, case.pieces, len(case.question.tokens), policy, budget)
        num_right += int(logits[-1].argmax()) == case.question.answer
    return num_right / len(cases)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the engine's own end takes seconds
