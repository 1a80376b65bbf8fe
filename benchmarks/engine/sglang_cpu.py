# pyright: basic
"""Measures the time to the first token in SGLang on CPU: computed, from its own radix cache, and from a depot.

    PYTHONPATH=tests python benchmarks/engine/sglang_cpu.py --prompts 8

One engine serves each prompt in all three ways in turn. With `--plain`, so does an engine without a linker. Needs an
environment like that of `tox -e sglang`. The model is random: 16 layers with 8 KV heads x 128, bfloat16, so 64 KiB of
KV a token.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kvdepot.lab.processes import DepotProcess
from support.sglang.engines import Engine, linker, prompts

MODELS = Path(__file__).parents[2] / "tests" / "support" / "vllm" / "models.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--model", default="large-kv")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--plain", action="store_true", help="also an engine without a linker")
    parser.add_argument("--wait", action="store_true", help="for a line on standard input, before the first prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(MODELS), folder, options.model, "0"]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        model = Path(made.stdout.split()[-1])
        measure(model, options)


def measure(model: Path, options: argparse.Namespace) -> None:
    count, num_tokens, dtype = options.prompts, options.tokens, options.dtype
    common = {"dtype": dtype, "max_total_tokens": 2 * num_tokens + 1024}
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        depot = stack.enter_context(DepotProcess(pool_size="1GiB", new_session=True))
        linked = stack.enter_context(Engine(model, **linker(depot.url, keep_after_reset=True), **common))
        plain = stack.enter_context(Engine(model, **common)) if options.plain else None
        for engine in (linked, plain):
            if engine is not None:
                engine.wait_until_ready().each(prompts(2, num_tokens, seed=99))
        if options.wait:
            print("ready", flush=True)
            sys.stdin.readline()
        same = 0
        for prompt in prompts(count, num_tokens, seed=7):
            answers = {
                "computed and stored": linked.generate(prompt)[0],
                "from SGLang's own cache": linked.generate(prompt)[0],
            }
            if plain is not None:
                answers["computed, no depot"] = plain.generate(prompt)[0]
                answers["from SGLang's own cache, no depot"] = plain.generate(prompt)[0]
            linked.flush()
            answers["from the depot"] = linked.generate(prompt)[0]
            assert answers["from the depot"].from_depot == (num_tokens - 1) // 64 * 64
            same += len({each.tokens for each in answers.values()}) == 1
            for name, answer in answers.items():
                times.setdefault(name, []).append(answer.first_seconds * 1e3)
    print(f"{count} prompts of {num_tokens} tokens, {dtype}; the same tokens in all ways: {same}")
    own = times["from SGLang's own cache"]
    for name, each in times.items():
        ratio = statistics.median(each) / statistics.median(own)
        print(
            f"{name:36} median {statistics.median(each):7.1f} ms  least {min(each):7.1f}  {ratio:.3f} of its own cache"
        )
    pairs = [a / b for a, b in zip(times["from the depot"], own, strict=True)]
    print(f"median of the ratios of pairs: {statistics.median(pairs):.3f}")


if __name__ == "__main__":
    main()
