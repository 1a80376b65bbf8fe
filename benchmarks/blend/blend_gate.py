# pyright: basic, reportMissingImports=false
"""Measures blends of real text with default settings: `python benchmarks/blend/blend_gate.py MODEL` in tox's `torch`.

It runs a depot, and vLLM with the connector: text is found by its content, loaded, moved and computed again in grains
of 16 tokens. MODEL and the prompts are those of `blend_text.py`. One request stores the documents in one order, and the
next requests ask about them in another. The blended and the unblended prompt each get the same beginnings of the
unblended answer. Prints the divergence of their predictions (KL, nats a token), and how often the likeliest token is
the same. With `--limit`, fails if the default's divergence exceeds that share of the divergence without recomputation.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from blend_text import descriptions
from transformers import AutoTokenizer

from kvdepot.lab.processes import DepotProcess
from kvdepot_vllm.blend.policies import DEFAULT
from support.vllm.engines import Engine, connector

POLICIES = ("none", "heads", "deviation", "query", "mixkq")
EXACT = {"kvdepot": {"load": False, "store": False}}

PREDICT = """
import torch
from vllm import SamplingParams

def predict(tokens, params):
    sampling = SamplingParams(
        temperature=0, max_tokens=1, logprobs=-1, detokenize=False, extra_args={"kv_transfer_params": params}
    )
    (output,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
    scores = torch.full((llm.llm_engine.model_config.get_vocab_size(),), -100.0)
    for token, found in output.outputs[0].logprobs[0].items():
        scores[token] = found.logprob
    child.drain()
    return scores.double(), output.kv_transfer_params
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out, to confirm a choice on fresh ones")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=260, help="of a document")
    parser.add_argument("--answer", type=int, nargs="*", default=[0, 7, 14, 21], help="tokens to predict")
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further prompt after these")
    parser.add_argument("--limit", type=float)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    count, rng = arguments.documents, random.Random(5)
    documents = descriptions(tokenizer, count * (arguments.cases + arguments.skip), arguments.tokens)
    system = encode("<|im_start|>system\nYou answer from the documents.<|im_end|>\n<|im_start|>user\n")
    found: dict[str, list[tuple[float, bool, dict[str, int]]]] = {policy: [] for policy in arguments.policies}
    with (
        DepotProcess(pool_size="2GiB", new_session=True) as depot,
        Engine(
            arguments.model,
            connector(depot.url, blend="request"),
            environment={"OMP_NUM_THREADS": "1"},
            dtype="bfloat16",
            max_logprobs=-1,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 30,
        ) as engine,
    ):
        end = time.monotonic() + arguments.seconds
        for start in range(count * arguments.skip, len(documents), count):
            if time.monotonic() > end:
                break
            mine = documents[start : start + count]
            pieces = [encode(f"\n\nDocument {name}:\n") + ids for name, ids in mine]
            shuffled = list(pieces)
            while shuffled == pieces:
                rng.shuffle(shuffled)
            question = encode(
                f"\n\nQuestion: According to the documents, what is {rng.choice(mine)[0]} for? Name two features."
                "<|im_end|>\n<|im_start|>assistant\n"
            )
            engine.generate([sum(pieces, list(system)) + question])
            prompt = sum(shuffled, list(system)) + question
            (answer,) = engine.ask("generate", prompts=[prompt], max_tokens=max(arguments.answer) + 1, params=EXACT)[
                "outputs"
            ]
            for length in arguments.answer:
                tokens = prompt + answer["tokens"][:length]
                engine.execute(PREDICT + f"child.exact, _ = predict({tokens}, {EXACT})")
                for policy in arguments.policies:
                    engine.reset()
                    wish = {"kvdepot": {"store": False, "blend": {"policy": policy, "ratio": arguments.share}}}
                    divergence, is_same, said = engine.execute(
                        PREDICT
                        + f"""
blended, said = predict({tokens}, {wish})
result = (
    float((child.exact.exp() * (child.exact - blended)).sum()), int(child.exact.argmax()) == int(blended.argmax()), said
)
"""
                    )
                    figures = (said or {}).get("kvdepot", {}).get("blend")
                    assert figures is not None, f"not blended: {said}\n{engine.log()[-3000:]}"
                    found[policy].append((divergence, is_same, figures))
            print(f"{start // count + 1 - arguments.skip} of {arguments.cases} prompts", file=sys.stderr, flush=True)
        assert depot.status().counters["blends"] == sum(map(len, found.values()))
    rows: list[dict[str, Any]] = []
    for policy, each in found.items():
        reused, again, gaps = (
            sum(figures[name] for _, _, figures in each)
            for name in ("reused_tokens", "recomputed_tokens", "gap_tokens")
        )
        rows.append(
            {
                "policy": policy,
                "kl": sum(kl for kl, _, _ in each) / len(each),
                "same": sum(is_same for _, is_same, _ in each) / len(each),
                "blends": len(each),
                "reused": reused / (reused + again + gaps),
                "again": again / (reused + again),
            }
        )
        print(
            "{policy:10} KL {kl:.4f}, the same token {same:.1%} of {blends}, {again:.0%} computed again".format(
                **rows[-1]
            )
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "cases": arguments.cases, "skip": arguments.skip}))
    if arguments.limit is None:
        return 0
    by_policy = {row["policy"]: row["kl"] for row in rows}
    ratio = by_policy[DEFAULT] / by_policy["none"]
    print(f"{DEFAULT} has {ratio:.2f} of the divergence without recomputation")
    return int(ratio > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
