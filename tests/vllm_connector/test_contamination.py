"""Under any schedule, a request that did not ask for a blend gets no blended KV, and none is stored."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.nursery import Nursery
from support.vllm.engines import MakeModel

SCRIPT = Path(__file__).parents[1] / "support" / "vllm" / "contamination.py"


@pytest.fixture
def run(nursery: Nursery, model: MakeModel) -> Any:
    def run_script(seed: int) -> dict[str, int]:
        output = nursery.run(SCRIPT, str(model("gqa")), str(seed), "500")
        return json.loads(output.splitlines()[-1])

    return run_script


@pytest.mark.promise(76)
@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_keeps_exact_caches_exact(run: Any, seed: int) -> None:
    counts = run(seed)
    assert (counts["contaminated"], counts.get("stored_blended", 0)) == (0, 0)
    assert (counts["left"], counts["held_blocks"], counts["jobs"]) == (0, 0, 0)
    assert counts["blends"] >= 2
    assert counts["blend_reused_tokens"] > 50
