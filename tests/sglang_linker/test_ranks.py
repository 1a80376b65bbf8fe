"""Tensor-parallel ranks decide alike."""

from importlib.util import find_spec

import pytest

from support.sglang.engines import nursery

RANK = """
import sys
import torch
from torch import distributed
from kvdepot.keys import Namespace
from kvdepot_sglang.ranks import Ranks
from kvdepot_sglang.identity import Weights
class Model(dict):
    def state_dict(self):
        return self
rank, meeting = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
ranks = Ranks(distributed.new_group([0, 1], backend="gloo"))
print(*ranks.all_agree([True, rank == 0, False]), ranks.common_random())
print(ranks.all_tell("" if rank else f"{10:032x}"))
weights = Weights(Namespace("m"), ranks)
for content in (1.0, 1.0, 2.0, None):
    if content is not None:
        weights.update(Model({"w": torch.full((4,), content + rank)}))
        print(weights.namespace)
    weights.flush()
    weights.name("")
    print(weights.namespace)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The output lines of two ranks."""
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    script = tmp_path_factory.mktemp("ranks") / "rank.py"
    script.write_text(RANK)
    ranks = [nursery().fork(script, str(rank), str(script.with_name("meeting"))) for rank in range(2)]
    found: list[list[str]] = []
    for each in ranks:
        with each.stdin, each.stdout:
            assert each.wait(120) == 0
            found.append(each.stdout.read().decode().splitlines())
    return found


@pytest.mark.slow
def test_a_load_that_fails_on_one_rank_fails_on_all(said: list[list[str]]) -> None:
    *agreed, random = said[0][0].split()
    assert agreed == ["True", "False", "False"]
    assert len(random) == 32
    assert said[0] == said[1]


@pytest.mark.slow
def test_ranks_name_their_weights_by_those_of_all(said: list[list[str]]) -> None:
    assert said[0][1] == str({0: f"{10:032x}", 1: ""})
    updating, one, again, same, other, two, cold = said[0][2:]
    assert one == same
    assert len({updating, one, again, other, two, cold}) == 6
