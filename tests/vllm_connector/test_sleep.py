"""Sleep mode takes the cache's memory away. No access to it happens meanwhile, and the depot keeps everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from support.vllm.engines import Engine, MakeModel, cached, connector, prompts, tokens


@pytest.mark.slow
@pytest.mark.promise(18, 29)
def test_a_hundred_sleeps_with_transfers_under_way() -> None:
    """Touching memory that is away would end the process."""
    with DepotProcess(pool_size="512MiB") as depot:
        done = subprocess.run(
            [sys.executable, "-m", "support.vllm.sleeper", depot.url, "100"],
            cwd=Path(__file__).parents[1],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        assert found["loads_under_way"], "no load was under way when the memory went: the test shows nothing"
        assert found["wrong"] == 0
        assert found["first_hits"] == 100
        assert found["stores"] == 101
        assert found["kept"] == found["stored"] >= 90
        status = depot.status()
        assert (status.num_leases, status.num_tickets) == (0, 0)


PROMPTS = prompts(4, 700, seed=80)
SLEEPS = """
from vllm.platforms.cpu import CpuPlatform
CpuPlatform.is_sleep_mode_available = lambda platform: True
"""


@pytest.mark.slow
@pytest.mark.promise(18, 29, 80)
def test_an_engine_has_hits_at_once_after_it_slept(depot: DepotProcess, model: MakeModel) -> None:
    with Engine(model("gqa"), connector(depot.url), reference=PROMPTS, enable_sleep_mode=True, first=SLEEPS) as engine:
        assert tokens(engine.generate(PROMPTS, together=False)) == engine.reference
        for night, (level, mode) in enumerate([(1, "abort"), (1, "abort"), (2, "abort"), (1, "abort")]):
            running = {f"night {night} {number}": prompt for number, prompt in enumerate(PROMPTS)}
            engine.ask("submit", requests=running, max_tokens=16, steps=1 + night)  # loads or decodes
            engine.ask("sleep", level=level, mode=mode)
            wait_until(lambda: not any(each.role == "worker" for each in depot.status().contexts))
            if level == 2:  # other weights, in two steps as trainers do
                engine.ask("wake_up", tags=["weights"])
                engine.ask("update_weights", seed=5)
                engine.ask("wake_up", tags=["kv_cache"])
                expected = engine.generate(PROMPTS, together=False, params={"kvdepot": {"load": False, "store": False}})
                engine.reset()
                outputs = engine.generate(PROMPTS, together=False)
                assert (tokens(outputs), cached(outputs)) == (tokens(expected), [0] * 4)
                assert tokens(outputs) != engine.reference
                engine.reference = tokens(outputs)
                engine.reset()
            else:
                engine.ask("wake_up")
            outputs = engine.generate(PROMPTS, together=False)
            assert (tokens(outputs), cached(outputs)) == (engine.reference, [640] * 4), night
        state = engine.ask("state")
        assert [state["transfers"], *state["connector"].values()] == [0, 0, 0, 0, 0]
    wait_until(lambda: depot.status().num_leases == 0)
