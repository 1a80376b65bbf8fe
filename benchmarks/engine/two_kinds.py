# pyright: basic
"""Runs vLLM and SGLang on one depot at the same time and checks that they do not mix up entries or tokens.

    PYTHONPATH=tests python benchmarks/engine/two_kinds.py --vllm VLLM_ENVIRONMENT/bin/python

Run it in SGLang's environment; `--vllm` names a Python with vLLM and kvdepot-vllm. Both serve the same model and the
same prompts, which neither finds in the depot. Then they empty their own caches and serve the prompts again. Each must
find exactly its own entries and give the same answers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvdepot.lab.processes import DepotProcess

TESTS = Path(__file__).parents[2] / "tests"
WANTED = {"count": 20, "num_tokens": 700, "seed": 1}
VLLM_SIDE = """
import json, sys
from support.vllm.engines import Engine, cached, connector, prompts, tokens, wait_until_stored
model, url = sys.argv[1:]
if __name__ == "__main__":
    wanted = prompts(20, 700, seed=1)
    with Engine(model, connector(url, keep_after_reset=True), reference=wanted) as engine:
        print("ready", flush=True); sys.stdin.readline()
        cold = engine.generate(wanted); engine.reset(); engine.generate(prompts(3, 700, seed=5)); engine.reset()
        warm = engine.generate(wanted)
        print(json.dumps({"cold": sum(cached(cold)), "warm": sum(cached(warm)), "same":
            sum(a == b == c for a, b, c in zip(engine.reference, tokens(cold), tokens(warm)))}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="a Python with vLLM")
    options = parser.parse_args()
    from support.sglang.engines import Engine, linker, prompts, tokens

    with tempfile.TemporaryDirectory() as folder, DepotProcess(pool_size="512MiB", new_session=True) as depot:
        command = [sys.executable, str(TESTS / "support" / "vllm" / "models.py"), folder, "gqa", "0"]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        model = Path(made.stdout.split()[-1])
        script = Path(folder) / "vllm_side.py"
        script.write_text(VLLM_SIDE)
        environment = {**os.environ, "PYTHONPATH": os.environ.get("VLLM_PYTHONPATH", str(TESTS))}
        other = subprocess.Popen(
            [options.vllm, str(script), str(model), depot.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            wanted = prompts(**WANTED)
            with Engine(model, **linker(depot.url, keep_after_reset=True)) as engine:
                engine.wait_until_ready()
                print("vLLM:", other.stdout.readline().strip())
                other.stdin.write("go\n")
                other.stdin.flush()
                cold = engine.each(wanted)
                engine.flush()
                warm = engine.each(wanted)
                theirs = json.loads(other.stdout.readline())
                names = sorted({each.instance.partition(" ")[0] for each in depot.status().contexts})
        finally:
            other.kill()
    mine = {
        "cold": sum(each.cached for each in cold),
        "warm": sum(each.from_depot for each in warm),
        "same": sum(a == b for a, b in zip(tokens(cold), tokens(warm), strict=True)),
    }
    print("SGLang:", json.dumps(mine))
    print("vLLM:  ", json.dumps(theirs))
    print("in the depot's status:", names)
    assert mine["cold"] == theirs["cold"] == 0, "one found what the other had stored"
    assert mine["same"] == theirs["same"] == WANTED["count"]
    assert mine["warm"] == theirs["warm"] > 0


if __name__ == "__main__":
    main()
