# pyright: basic, reportMissingImports=false
"""Measures how many right answers blending costs: `python benchmarks/blend/blend_quality.py` in tox's `torch`.

Serves prompts of the task in `tests/support/vllm/recall.py` with real vLLM on one CPU thread. The KV of all documents
comes from a prompt with the same documents in another order. For each policy and share of tokens computed again, prints
the share of right answers: to NTH questions, which full reuse must fail, and without a policy to ANY questions, which
full reuse must pass.
The documents have only 19 tokens, so grains and heads are single tokens here.
"""

import argparse
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from vllm import LLM

from kvdepot_plan.plot import curves_as_svg
from kvdepot_vllm.blend.policies import Budget
from support.vllm import recall
from support.vllm.blending import Bench, Case, blender_of

CONTROLS = ("full prefill", "none", "all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=recall.RECALL)
    parser.add_argument("--cases", type=int, default=300, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--policies", nargs="*", default=["heads", "deviation", "query", "mixkq"])
    parser.add_argument("--shares", nargs="*", type=float, default=[0.05, 0.15, 0.3, 0.5])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the answers to NTH questions as an SVG into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(
        model=str(arguments.model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=256,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
    )
    bench = Bench(blender_of(llm))
    source = random.Random(arguments.seed)
    cases = {kind: [Case.make(source, kind) for _ in range(arguments.cases)] for kind in (recall.NTH, recall.ANY)}
    ways = [("full prefill", 1.0), ("none", 0.0), ("all", 1.0)]
    ways += [(policy, share) for policy in arguments.policies for share in arguments.shares]
    nth = right_answers(bench, cases[recall.NTH], ways)
    any_ = right_answers(bench, cases[recall.ANY], [way for way in ways if way[0] in CONTROLS])
    rows = [
        {"policy": policy, "share": share, "nth": rate, "any": any_.get((policy, share))}
        for (policy, share), rate in nth.items()
    ]
    for row in rows:
        control = "" if row["any"] is None else f", ANY {row['any']:.1%}"
        print(f"{row['policy']:12} {row['share']:4.0%}: NTH {row['nth']:6.1%}{control}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"cases": arguments.cases, "seed": arguments.seed, "rows": rows}, indent=1)
        )
    if arguments.plot:
        arguments.plot.write_text(as_svg(rows))


def as_svg(rows: list[dict[str, Any]]) -> str:
    """Draw one curve for each policy, from no recomputation to recomputing all tokens."""
    by_way = {(row["policy"], row["share"]): row["nth"] for row in rows}
    ends = (0.0, by_way["none", 0.0]), (1.0, by_way["all", 1.0])
    policies = {policy: None for policy, _ in by_way if policy not in ("none", "all", "full prefill")}
    curves = [
        (each, [ends[0], *((share, rate) for (policy, share), rate in by_way.items() if policy == each), ends[1]])
        for each in policies
    ]
    return curves_as_svg(
        "Right answers of blended prompts",
        curves,
        "share of the reused tokens that is computed again",
        lambda share: f"{share:.0%}",
        float,
    )


def right_answers(bench: Bench, cases: list[Case], ways: list[tuple[str, float]]) -> dict[tuple[str, float], float]:
    """Return the share of right answers of each policy and share of tokens computed again."""
    num_right = Counter[tuple[str, float]]()
    for case in cases:
        bench.store(case.source)
        for policy, share in ways:
            if policy == "full prefill":
                logits = bench.logits(case.prompt, 0)
            else:
                budget = Budget(share, run_tokens=1 if share else 0, grain=1)
                logits = bench.blend(case.prompt, case.pieces, len(case.question.tokens), policy, budget)
            num_right[policy, share] += int(logits[-1].argmax()) == case.question.answer
    return {way: num_right[way] / len(cases) for way in ways}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an orderly end of the engine takes seconds
