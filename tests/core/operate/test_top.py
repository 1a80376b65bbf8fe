"""The live view in a terminal, drawn from a real depot's status."""

import io
import os
import pty
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from kvdepot.lab.processes import DepotProcess
from support.peer import Peer, prompt, registration

pytest.importorskip("rich", reason="pip install 'kvdepot[cli]'")

from rich.console import Console

from kvdepot.operate.top import draw, pool_map
from kvdepot.wire.status import DepotStatus
from support.commands import KVDEPOT, run_kvdepot


@pytest.fixture
def busy() -> Iterator[tuple[DepotStatus, DepotStatus]]:
    """The status of a depot before and after a store and a lookup."""
    with DepotProcess("--tier", "memory://?capacity=1MiB", "--quota", "default=1MiB") as depot:
        peer = Peer(depot, registration(instance="engine \x1b[31mred [bold]"))
        before = depot.status()
        peer.store(prompt(3, "a"))
        peer.find(prompt(4, "a"))
        yield before, depot.status()
        peer.close()


def text_of(status: DepotStatus, before: DepotStatus, seconds: float) -> str:
    out = io.StringIO()
    Console(file=out, width=150, force_terminal=False).print(draw(status, before, seconds))
    return out.getvalue()


def test_a_frame_shows_the_engines_and_recent_events(busy: tuple[DepotStatus, DepotStatus]) -> None:
    before, after = busy
    text = text_of(after, before, 2.0)
    assert "75.0%" in text, "three of four chunks"
    assert "0 /s" in text
    assert "per token" in text, "as on the live page"
    assert "worker" in text
    assert "1.0 MiB" in text, "the quota"
    assert "memory://" in text
    assert "registered" in text
    assert "\x1b" not in text, "what an engine calls itself means nothing to the terminal"
    assert "[31mred [bold]" in text


def test_rates_are_of_the_time_between_two_frames(busy: tuple[DepotStatus, DepotStatus]) -> None:
    before, after = busy
    more = msgspec.structs.replace(after, counters={**after.counters, "lookups": after.counters["lookups"] + 50})
    assert "25 /s" in text_of(more, after, 2.0)
    assert "serving" in text_of(after, after, 0.0)
    assert "draining" in text_of(msgspec.structs.replace(after, draining=True), before, 1.0)


def test_blends_are_shown_once_there_are_any(busy: tuple[DepotStatus, DepotStatus]) -> None:
    _, after = busy
    assert "blends" not in text_of(after, after, 2.0)
    counters = {"blend_lookups": 1204, "blends": 17, "blend_reused_tokens": 5_120, "blend_recomputed_tokens": 900}
    text = text_of(msgspec.structs.replace(after, counters={**after.counters, **counters}), after, 2.0)
    assert "17 of 1,204 lookups" in text
    assert "5,120 tokens reused, 900 computed again" in text


def test_the_map_is_darker_where_the_pool_is_fuller(busy: tuple[DepotStatus, DepotStatus]) -> None:
    _, after = busy
    assert sum(after.pool_regions) == after.pool_used_bytes
    status = msgspec.structs.replace(after, pool_size_bytes=400, pool_regions=[0, 1, 30, 60, 100, 110])
    status = msgspec.structs.replace(status, pool_size_bytes=600)
    assert pool_map(status) == " ░▒▓██"


def test_without_a_terminal_it_is_one_frame(depot: DepotProcess) -> None:
    assert run_kvdepot("top", "--url", depot.url).stdout.count("serving") == 1


@pytest.mark.slow
def test_in_a_terminal_it_is_drawn_again_and_again(depot: DepotProcess) -> None:
    leader, follower = pty.openpty()
    command = [*KVDEPOT, "top", "--url", depot.url, "--frames", "3", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                more = os.read(leader, 65536)
            except OSError:
                break
            if not more:
                break
            shown += more
        assert process.wait(60) == 0
    os.close(leader)
    assert shown.count(b"serving") >= 3


def test_a_depot_that_is_not_there_is_an_error_in_words(tmp_path: object) -> None:
    done = run_kvdepot("top", "--url", f"{tmp_path}/nowhere")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
