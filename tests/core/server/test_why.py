"""The log of a depot says why a request did not find more."""

import re

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
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


def test_the_log_says_why_a_lookup_found_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess(log_level="debug") as depot:
        peer, log = Peer(depot), Log(capfd)
        peer.store(prompt(2))
        assert "2 entries begun, 0 already present, 0 declined" in log.line("store of r:")
        assert lookup(peer, "whole", 2) == 2
        assert log.line("lookup whole of engine: 2 of 2 chunks").endswith("waited 0.000 s for nothing; none is missing")
        assert lookup(peer, "short", 3) == 2
        assert "the pool lacks the next one, and there is no tier" in log.line("lookup short of engine: 2 of 3 chunks")
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
        assert "it does not have the next chunk" in log.line("promotion for short from tier memory:")
        assert "waited 0.0" in log.line("lookup short of engine: 2 of 3 chunks")
        peer.close()


def test_a_depot_that_logs_less_says_nothing_of_requests(capfd: pytest.CaptureFixture[str]) -> None:
    with DepotProcess(log_level="info") as depot:
        peer = Peer(depot)
        assert lookup(peer, "short", 3) == 0
        peer.close()
    assert "lookup short" not in capfd.readouterr().err
