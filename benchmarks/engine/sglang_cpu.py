# pyright: basic
"""Time to the first token in real SGLang on CPU: computed, from SGLang's own radix cache, and from a depot.

    PYTHONPATH=tests python benchmarks/engine/sglang_cpu.py --prompts 8

One engine without a linker and one with it take each prompt in turn. Needs an environment as of `tox -e sglang`. The
model is random: 16 layers with 8 KV heads x 128, bfloat16, so 64 KiB of KV a token.
"""

import argparse
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(MODELS), folder, options.model, "0"]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        model = Path(made.stdout.split()[-1])
        measure(model, options.prompts, options.tokens, options.dtype)


def measure(model: Path, count: int, num_tokens: int, dtype: str) -> None:
    common = {"dtype": dtype, "max_total_tokens": 2 * num_tokens + 1024}
    times: dict[str, list[float]] = {}
    with (
        DepotProcess(pool_size="1GiB", new_session=True) as depot,
        Engine(model, **common) as plain,
        Engine(model, **linker(depot.url, keep_after_reset=True), **common) as linked,
    ):
        plain.wait_until_ready()
        linked.wait_until_ready()
        for engine in (plain, linked):
            engine.each(prompts(2, num_tokens, seed=99))
        same = 0
        for prompt in prompts(count, num_tokens, seed=7):
            answers = {
                "computed, no depot": plain.generate(prompt)[0],
                "computed and stored": linked.generate(prompt)[0],
                "from SGLang's own cache, no depot": plain.generate(prompt)[0],
                "from SGLang's own cache": linked.generate(prompt)[0],
            }
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
