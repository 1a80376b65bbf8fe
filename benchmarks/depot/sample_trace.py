"""Writes `examples/trace.jsonl`: 300 generated requests of coding agents, in Mooncake's format.

    python benchmarks/depot/sample_trace.py examples/trace.jsonl

Twelve sessions run at once and share a system prompt of 10,000 tokens. Each turn repeats all before it. The trace is
for trying `kvdepot replay`. To learn about your own engines, record their requests.
"""

import json
import random
import sys
from pathlib import Path
from typing import Final

from policies import agents

from kvdepot_plan.trace import BLOCK_TOKENS

_NUM_REQUESTS: Final = 300


def sample() -> str:
    """Return the trace. Every call returns the same one."""
    rng, now, lines = random.Random(21), 0.0, list[str]()
    for blocks in agents(21, num_open=12, first=6, grows=1.2, turns=6, in_a_row=2)[:_NUM_REQUESTS]:
        now += rng.expovariate(1 / 900)  # milliseconds
        last = rng.randint(1, BLOCK_TOKENS)  # tokens in the partial block
        request = {
            "timestamp": round(now),
            "input_length": (len(blocks) - 1) * BLOCK_TOKENS + last,
            "output_length": rng.randint(20, 400),
            "hash_ids": blocks,
        }
        lines.append(json.dumps(request, separators=(",", ":")) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(sample())
