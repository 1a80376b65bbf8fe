# pyright: basic, reportMissingImports=false
"""Measures the divergence of blends of real text: `python benchmarks/blend/blend_text.py MODEL` in tox's `torch`.

MODEL is the folder of an instruction model, SmolLM2-135M for example. The documents are descriptions of installed
packages. The KV of each prompt's documents comes from a prompt with the same documents in another order. The blended
and the unblended prompt are both continued with the unblended answer. For each policy and share, prints the divergence
of their predictions (KL, nats a token) and the share of tokens with the same likeliest prediction. With `--limit`,
fails if the default's divergence at 15 % exceeds that share of the divergence without recomputation.
"""

import argparse
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from transformers import AutoTokenizer
from vllm import LLM

from kvdepot_vllm.blend.policies import DEFAULT, Budget
from support.vllm.blending import Bench, Piece, blender_of

WAYS = [
    ("none", 0.0),
    *((policy, share) for share in (0.15, 0.3) for policy in ("heads", "deviation", "query", "mixkq")),
]


def descriptions(tokenizer: Any, count: int, length: int) -> list[tuple[str, list[int]]]:
    """Return names of installed packages, each with `length` tokens of its description."""
    found: list[tuple[str, list[int]]] = []
    for path in sorted(Path(str(torch.__file__)).parents[1].glob("*.dist-info/METADATA")):
        text = path.read_text(errors="ignore").split("\n\n", 1)[-1]
        text = re.sub(r"<[^>]+>|https?://\S+|!?\[[^\]]*\]\([^)]*\)|[=*`#|-]{2,}", " ", text)
        ids = tokenizer.encode(re.sub(r"\s+", " ", text), add_special_tokens=False)
        if len(ids) > length + 200:
            found.append((path.parent.name.split("-")[0], ids[100 : 100 + length]))
    if len(found) < count:
        raise SystemExit(f"only {len(found)} of {count} packages here have a description of {length + 200} tokens")
    return found[:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out, to confirm a choice on fresh ones")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=260, help="of a document")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    llm = LLM(
        model=str(arguments.model),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=256,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )
    bench = Bench(blender_of(llm), 2048)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    count = arguments.documents
    documents = descriptions(tokenizer, count * (arguments.cases + arguments.skip), arguments.tokens)
    system = encode("<|im_start|>system\nYou answer from the documents.<|im_end|>\n<|im_start|>user\n")
    rng = random.Random(5)
    sums: dict[tuple[str, float], tuple[float, int]] = dict.fromkeys(WAYS, (0.0, 0))
    num_tokens = 0
    for start in range(count * arguments.skip, len(documents), count):
        mine = documents[start : start + count]
        pieces = [encode(f"\n\nDocument {name}:\n") + ids for name, ids in mine]
        order = list(range(count))
        while order == sorted(order):
            rng.shuffle(order)
        name = rng.choice(mine)[0]
        question = encode(
            f"\n\nQuestion: According to the documents, what is {name} for? Name two features.<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        source = system + [token for piece in pieces for token in piece]
        prompt, places = list(system), list[Piece]()
        for number in order:
            before = len(system) + sum(map(len, pieces[:number]))
            places.append(Piece(before, len(prompt), len(pieces[number])))
            prompt += pieces[number]
        prompt += question
        answer: list[int] = []
        for _ in range(arguments.answer):
            first = 0 if not answer else len(prompt) + len(answer) - 1
            answer.append(int(bench.logits(prompt + answer, first)[-1].argmax()))
        tail = len(question) + len(answer) - 1
        tokens = prompt + answer[:-1]
        right = bench.logits(tokens, 0)[-len(answer) :].log_softmax(-1)
        bench.store(source)
        num_tokens += len(answer)
        for policy, share in WAYS:
            found = bench.blend(tokens, places, tail, policy, Budget(share, run_tokens=0 if not share else 16))
            found = found[-len(answer) :].log_softmax(-1)
            divergence, same = sums[policy, share]
            sums[policy, share] = (
                divergence + float((right.exp() * (right - found)).sum()),
                same + int((right.argmax(-1) == found.argmax(-1)).sum()),
            )
    rows = [
        {"policy": policy, "share": share, "kl": divergence / num_tokens, "same": same / num_tokens}
        for (policy, share), (divergence, same) in sums.items()
    ]
    for row in rows:
        print(
            f"{row['policy']:10} {row['share']:4.0%}: KL {row['kl']:.4f}, the same token {row['same']:.1%}", flush=True
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "cases": arguments.cases, "skip": arguments.skip}))
    by_way = {(row["policy"], row["share"]): row["kl"] for row in rows}
    ratio = by_way[DEFAULT, 0.15] / by_way["none", 0.0]
    print(f"{DEFAULT} at 15 % has {ratio:.2f} of the divergence without recomputation")
    return int(arguments.limit is not None and ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
