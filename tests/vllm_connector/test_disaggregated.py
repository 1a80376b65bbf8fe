"""The example with a prefill engine, a decode engine and a proxy, as a user runs it."""

import re

from support.vllm.engines import MakeModel
from support.vllm.examples import EXAMPLES, OPTIONS, SERVE, free_port, run


def test_prefill_and_decode_engines_share_a_depot(model: MakeModel) -> None:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in OPTIONS.items() if key != "enforce_eager"]
    output = run(
        "bash", str(EXAMPLES / "disaggregated" / "serve.sh"), str(model("gqa")), *flags, "--enforce-eager",
        PORT=str(free_port(3)), POOL_SIZE="128MiB",
        **SERVE,
    )  # fmt: skip
    for name in ("prefill first", "both at once", "without the prefill engine"):
        (answer,) = re.findall(rf"^{name}: (.*?\[DONE\])", output, re.MULTILINE | re.DOTALL)
        assert answer.count('"text"') >= 4
    (loaded,) = re.findall(r"decode engine loaded: ([\d.]+)", output)
    assert float(loaded) in (692 + 640, 692 + 692), "at once, the last 53 tokens may be computed as quickly"
