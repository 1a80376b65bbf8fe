"""Features: a broken one costs nobody anything, and a depot serves without any."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError, ErrorCode, RemoteError
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.operations import RetainSession
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.server.app import DepotServer
from kvdepot.server.feature import ENTRY_POINT_GROUP, HOOKS, Feature, installed_features
from kvdepot.wire import messages as m
from support.index import Bench, prompt
from support.peer import Peer
from support.peer import prompt as peer_prompt

NAMES = {"blend", "estimates", "flights", "routers", "sessions", "weights"}


class Broken(Feature):
    """A feature whose hooks all raise."""

    name = "broken"


def _raise(*_arguments: Any) -> Any:
    raise RuntimeError("this feature is broken")


for hook in HOOKS:
    setattr(Broken, hook, _raise)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DepotServer]:
    config = ServerConfig(ephemeral=True, directory=tmp_path, pool_size_bytes=16 << 20)
    server = DepotServer(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield server
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_feature_whose_hooks_raise_costs_neither_a_request_nor_a_store_nor_the_depot(
    server: DepotServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.depot.features.add(Broken())
    with closing(Peer(SimpleNamespace(url=str(tmp_path)))) as peer:  # type: ignore[arg-type]
        assert peer.store(peer_prompt(4)) == 4
        assert peer.find(peer_prompt(4)).num_chunks == 4
        assert peer.find(peer_prompt(6)).num_chunks == 4
        failed = server.depot.counters["hooks_failed"]
        assert failed >= 5, "attached, stored, twice looked_up, missed"
        wait_until(lambda: server.depot.counters["hooks_failed"] > failed, what="a sweep")
        assert peer.find(peer_prompt(4)).num_chunks == 4
        server.depot.index.check_integrity()
    assert "_raise failed" in caplog.text


def test_a_part_of_the_sweep_that_raises_ends_neither_the_loop_nor_the_other_parts(
    server: DepotServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("this part is broken")

    restored: list[bool] = []
    monkeypatch.setattr(server.depot, "expire", fail)
    monkeypatch.setattr(server.folder, "restore", lambda: restored.append(True))
    wait_until(lambda: len(restored) > 1, what="two sweeps")
    with closing(Peer(SimpleNamespace(url=str(tmp_path)))) as peer:  # type: ignore[arg-type]
        assert peer.store(peer_prompt(1)) == 1
    assert server.depot.counters["chores_failed"] > 1


def test_a_depot_serves_without_the_features_that_it_was_told_to_leave_out() -> None:
    without = ",".join(NAMES - {"weights"})
    with DepotProcess("--without", without) as depot, closing(Peer(depot)) as peer:
        assert peer.store(peer_prompt(4)) == 4
        assert peer.find(peer_prompt(6)).num_chunks == 4
        assert depot.status().features == ["weights"]
        with pytest.raises(RemoteError, match="without the feature that answers hint") as refused:
            peer.ask(Hint(peer.context, "default", b"", session="agent"))
        assert refused.value.code is ErrorCode.UNKNOWN_OPERATION
        with pytest.raises(RemoteError, match="without the feature that answers retain_session") as refused:
            ask_depot(RetainSession("agent", 1.0), depot.url)
        assert refused.value.code is ErrorCode.UNKNOWN_OPERATION


def test_a_name_that_no_feature_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--without flight: no such feature; there are blend, estimates, flights"):
        installed_features(["flight"])


def test_a_feature_that_cannot_be_loaded_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("no module named 'missing'")

    def entries(*, group: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="theirs", load=load)] if group == ENTRY_POINT_GROUP else []

    monkeypatch.setattr("kvdepot.server.feature.entry_points", entries)
    with pytest.raises(ConfigError, match=r"feature theirs cannot be loaded .*'missing'.* serve --without theirs"):
        installed_features()
    assert installed_features(["theirs"]) == []


def test_a_lookup_that_misses_is_answered_without_any_feature() -> None:
    bench = Bench(features=())
    worker = bench.worker()
    worker.store(prompt(2))
    reply = worker.ask(m.Lookup(worker.context, "r", prompt(4).digests, joins=True, announces=True))
    assert isinstance(reply, m.LookupReply)
    assert (reply.num_chunks, reply.num_pending, reply.wants_tokens) == (2, 0, False)
