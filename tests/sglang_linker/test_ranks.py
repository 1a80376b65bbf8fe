"""Tensor-parallel ranks take the same branch."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

RANK = """
import sys
from torch import distributed
from kvdepot_sglang.ranks import Ranks
rank, meeting = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
ranks = Ranks(distributed.new_group([0, 1], backend="gloo"))
print(ranks.all_agree(True), ranks.all_agree(rank == 0), ranks.all_agree(False), ranks.common_random())
"""


@pytest.mark.slow
def test_a_load_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [each.communicate(timeout=120)[0].decode().split() for each in ranks]
    assert said[0][:3] == ["True", "False", "False"]
    assert len(said[0][3]) == 32
    assert said[0] == said[1]
