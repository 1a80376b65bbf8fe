"""The log of a depot says why a request did not find more."""

import logging
from contextlib import closing

import pytest

from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.processes import DepotProcess
from kvdepot.operate import operations as o
from support import peer
from support.index import bench_and_worker, prompt
from support.operate import operate


def test_one_line_for_each_request_names_the_chunks_evicted_for_it(caplog: pytest.LogCaptureFixture) -> None:
    _, worker = bench_and_worker(pages=4)
    evicted = prompt(4)
    worker.store(evicted)
    caplog.set_level(logging.DEBUG, "kvdepot")
    worker.store(prompt(2, 1))
    assert worker.lookup(evicted).num_chunks == worker.lookup(prompt(2)).num_chunks == 2
    keys = [evicted.digests[chunk * DIGEST_BYTES :][:4].hex() for chunk in range(4)]
    evictions, store, short, whole = [record.getMessage() for record in caplog.records]
    assert evictions.startswith("evicted 2 chunks to make room for request r ")
    assert evictions.endswith(f": {keys[3]} (0 s) {keys[2]} (0 s)")
    assert store == "store of r: 2 entries begun, 0 already present, 0 declined; 2 chunks evicted for it"
    assert short.endswith(f"; the pool lacks chunk 2 ({keys[2]}), and there is no tier")
    assert whole == "lookup r of engine-1: 2 of 2 chunks, waited 0.000 s for nothing; none is missing"


@pytest.mark.parametrize("is_drained", [False, True])
def test_the_log_says_why_a_store_is_declined(is_drained: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench, worker = bench_and_worker(pages=4)
    worker.store(prompt(4))
    assert worker.lookup(prompt(4)).lease
    caplog.set_level(logging.DEBUG, "kvdepot")
    if is_drained:
        operate(bench.depot, o.Drain(True))
    assert worker.store(prompt(2, 1)).num_declined == 2
    why = "2 declined: all chunks that it may evict are in use; 0 chunks evicted for it"
    assert ("store of r: all 2 entries declined: stores are declined" if is_drained else why) in caplog.text


@pytest.mark.parametrize("level", ["debug", "info"])
def test_a_depot_says_something_of_a_request_only_if_it_logs_that_much(
    level: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with DepotProcess(log_level=level) as depot, closing(peer.Peer(depot)) as asking:
        asking.find(peer.prompt(3))
    assert ("lookup r of engine: 0 of 3 chunks" in capfd.readouterr().err) == (level == "debug")
