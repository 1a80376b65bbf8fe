"""`kvdepot status` lists the attached engines in words, and the layouts of their caches only on request."""

import os

from msgspec.structs import replace

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.status import describe_status
from support.peer import SPEC, Peer, registration


def test_an_engine_is_named_with_its_pid_and_its_layout_is_told_on_request(depot: DepotProcess) -> None:
    request = registration(replace(SPEC, format="vllm 0.32 LBHNC tp1"), instance="vllm Qwen3-8B 3360e073")
    peer = Peer(depot, replace(request, model="Qwen3-8B"))
    text, verbose = (describe_status(depot.status(), verbose=each) for each in (False, True))
    peer.close()
    engine = next(line for line in text.splitlines() if "vllm Qwen3-8B 3360e073" in line)
    assert f", worker on none, pid {os.getpid()}" in engine
    assert engine.count("Qwen3-8B") == 1, "the model is named once"
    assert "LBHNC" not in text
    assert "group 0" not in text
    assert "format vllm 0.32 LBHNC tp1" in verbose
    assert "group 0: full attention" in verbose
