"""The log of a depot says why a request did not find more."""

import logging
import re

import pytest

from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from support import index
from support.index import Bench
from support.peer import Peer, prompt


class Log:
    """The log of a depot."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self._text = ""

    def line(self, pattern: str) -> str:
        """Wait for a line that matches, and return it."""

        def find() -> "re.Match[str] | None":
            self._text += self._capfd.readouterr().err
            return re.search(f"^.*{pattern}.*$", self._text, re.MULTILINE)

        wait_until(find, what=pattern)
        found = find()
        assert found
        return found[0]


def lookup(peer: Peer, name: str, num_chunks: int, wait_seconds: float = 5.0) -> int:
    reply = peer.ask(m.Lookup(peer.context, name, prompt(num_chunks).digests, wait_seconds=wait_seconds))
    assert isinstance(reply, m.LookupReply)
    return reply.num_chunks


def start(num_chunks: int) -> str:
    """Return how the log writes the key of the last chunk of a prompt."""
    return prompt(num_chunks).digests[-DIGEST_BYTES:][:4].hex()


def test_the_log_says_why_a_lookup_found_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess(log_level="debug") as depot:
        peer, log = Peer(depot), Log(capfd)
        peer.store(prompt(2))
        assert "2 entries begun, 0 already present, 0 declined" in log.line("store of r:")
        assert lookup(peer, "whole", 2) == 2
        assert log.line("lookup whole of engine: 2 of 2 chunks").endswith("waited 0.000 s for nothing; none is missing")
        assert lookup(peer, "short", 3) == 2
        assert f"the pool lacks chunk 2 ({start(3)}), and there is no tier" in log.line(
            "lookup short of engine: 2 of 3 chunks"
        )
        assert isinstance(peer.ask(o.Drain(True)), m.Done)
        assert peer.prepare(prompt(3)).num_declined == 3
        assert "stores are declined" in log.line("all 3 entries declined")
        peer.close()


def test_the_log_says_what_the_tiers_answered(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess("--tier", "memory://below?capacity=64MiB", log_level="debug") as depot:
        peer, log = Peer(depot), Log(capfd)
        peer.store(prompt(2))
        wait_until(lambda: depot.status().tiers[0].num_entries == 2)
        assert lookup(peer, "short", 3) == 2
        assert "it does not have chunk 2" in log.line("promotion for short from tier memory:")
        assert "s for tier memory:" in log.line("lookup short of engine: 2 of 3 chunks, waited 0.0")
        peer.close()


def test_one_line_for_each_request_names_the_chunks_evicted_for_it(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(pages=4)
    worker, evicted = bench.worker(), index.prompt(4)
    worker.store(evicted)
    caplog.set_level(logging.DEBUG, "kvdepot")
    worker.store(index.prompt(2, 1))
    assert worker.lookup(evicted).num_chunks == 2
    keys = [evicted.digests[chunk * DIGEST_BYTES :][:4].hex() for chunk in range(4)]
    evictions, store, lookup = [record.getMessage() for record in caplog.records]
    assert evictions.startswith("evicted 2 chunks to make room for request r ")
    assert evictions.endswith(f": {keys[3]} (0 s) {keys[2]} (0 s)")
    assert store == "store of r: 2 entries begun, 0 already present, 0 declined; 2 chunks evicted for it"
    assert lookup.endswith(f"; the pool lacks chunk 2 ({keys[2]}), and there is no tier")


def test_the_log_says_why_there_is_no_room_for_a_store(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(pages=4)
    worker = bench.worker()
    worker.store(index.prompt(4))
    assert worker.lookup(index.prompt(4)).lease
    caplog.set_level(logging.DEBUG, "kvdepot")
    assert worker.store(index.prompt(2, 1)).num_declined == 2
    assert "2 declined: all chunks that it may evict are in use; 0 chunks evicted for it" in caplog.text


def test_a_depot_that_logs_less_says_nothing_of_requests(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess(log_level="info") as depot:
        peer = Peer(depot)
        assert lookup(peer, "short", 3) == 0
        peer.close()
    assert "lookup short" not in capfd.readouterr().err
