"""Sleep mode takes the cache's memory away: nothing touches it meanwhile, and the depot keeps everything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess


@pytest.mark.slow
@pytest.mark.promise(18, 29)
def test_a_hundred_sleeps_with_transfers_under_way() -> None:
    """Memory that is away cannot be touched without the end of the process."""
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
        assert found["wrong"] == 0
        assert found["first_hits"] == 100
        assert found["stores"] == 101
        assert found["kept"] == found["stored"] >= 90
        status = depot.status()
        assert (status.num_leases, status.num_tickets) == (0, 0)
