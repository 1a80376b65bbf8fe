"""An engine and a depot that are one release apart understand each other, and what the one before wrote stays warm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvdepot.client.connection import Connection
from kvdepot.errors import DepotUnavailable, ErrorCode
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.peer import Peer, RawSocket, find, prompt, registration
from support.releases import FOLDER, STORED, Copier, NextDepot, kept_frames, message_types, unpack, unpack_pool

RELEASES = sorted(FOLDER.iterdir())
_ENDS: set[str] = {"clear", "drain", "unregister"}  # after these, others would be refused


def _is_within(kept: Any, now: Any) -> bool:
    """Return whether a decoded message has all of a kept one. It may have more at the end of its arrays, or by name."""
    if isinstance(kept, list) and isinstance(now, list):
        ours, theirs = cast("list[Any]", kept), cast("list[Any]", now)
        return len(ours) <= len(theirs) and all(map(_is_within, ours, theirs))
    if isinstance(kept, dict) and isinstance(now, dict):
        fields, found = cast("dict[Any, Any]", kept), cast("dict[Any, Any]", now)
        return all(name in found and _is_within(value, found[name]) for name, value in fields.items())
    return bool(kept == now)


def _decode(table: str, body: bytes) -> msgspec.Struct:
    if table == "request":
        return frames.decode_request(bytes(8) + body)
    if table == "reply":
        return frames.decode_reply(bytes(8) + body)
    tag = msgspec.msgpack.decode(body)[0]
    return frames.decode_session_reply(body) if tag == "session_opened" else frames.decode_greeting(body)


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
@pytest.mark.promise(7)
def test_each_message_of_a_release_is_read_with_the_same_meaning(release: Path) -> None:
    kept = kept_frames(release)
    assert len(kept) > 40
    known = {frames.operation_of(kind) for _, kind in message_types()}
    for table, tag, body in kept:
        assert tag in known
        again = msgspec.msgpack.encode(_decode(table, body))
        assert _is_within(msgspec.msgpack.decode(body), msgspec.msgpack.decode(again)), (
            f"{tag} lost a field or moved it"
        )


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_message_may_have_more_fields_than_this_release_knows(release: Path) -> None:
    for table, tag, body in kept_frames(release):
        message = _decode(table, body)
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))  # with those that came after the release
        assert _decode(table, msgspec.msgpack.encode([*fields, "of a later release"])) == message, tag


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_each_request_of_a_release_is_answered(release: Path, tmp_path: Path) -> None:
    with DepotProcess("--events", f"ipc://{tmp_path}/events") as depot:
        peer = Peer(depot)
        raw = RawSocket(depot, peer.session.token)
        requests = {tag: body for table, tag, body in kept_frames(release) if table == "request"}
        for tag in sorted(requests, key=lambda tag: (tag in _ENDS, tag)):
            raw.send(bytes(8) + requests[tag])
            reply = frames.decode_reply(raw.receive())
            if isinstance(reply, m.ErrorReply):
                assert reply.code not in {ErrorCode.UNKNOWN_OPERATION, ErrorCode.INTERNAL}, reply
                assert not reply.message.startswith(f"{tag}: "), "a field is out of range"
        raw.close()
        peer.close()


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_pool_of_a_release_stays_warm(release: Path) -> None:
    with DepotProcess("--max-entries", "64", pool_size="1MiB") as depot:
        depot.kill()
        for path in depot.pool_directory.iterdir():
            path.unlink()
        unpack_pool(release, depot.pool_directory)
        depot.start()
        peer = Copier(depot)
        wait_until(lambda: peer.find(STORED).num_chunks == STORED.num_chunks)
        assert peer.get(STORED) == STORED.num_chunks
        peer.close()


@pytest.mark.parametrize("tier", ["file://{}", "disk://{}/disk?capacity=1MiB"])
@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_a_tier_of_a_release_stays_warm(release: Path, tier: str, tmp_path: Path) -> None:
    if tier.startswith("file"):
        pytest.importorskip("obstore")
    unpack(release / "tier.tar.xz", tmp_path)
    with DepotProcess("--tier", tier.format(tmp_path)) as depot:
        peer = Copier(depot)
        wait_until(lambda: find(peer, STORED) == STORED.num_chunks)
        assert peer.get(STORED) == STORED.num_chunks
        peer.close()


def _reconnect(peer: Peer) -> None:
    """Follow the peer's connection to the next depot."""
    peer.channel.close()
    peer.session = peer.connection.wait_until_open(20)
    peer.channel, peer.context = peer.connection.channel(peer.session), peer.session.context


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the engines of this process those of the next release."""
    monkeypatch.setattr(m, "PROTOCOL_VERSION", m.PROTOCOL_VERSION + 1)
    yield


@pytest.mark.promise(7)
def test_an_engine_keeps_its_hits_when_its_depot_is_upgraded(tmp_path: Path) -> None:
    with DepotProcess(directory=tmp_path) as depot:
        peer = Peer(depot)
        peer.store(prompt(4))
        depot.terminate()
        with NextDepot("--pool-dir", str(depot.pool_directory), directory=tmp_path) as later:
            _reconnect(peer)
            wait_until(lambda: find(peer, prompt(4)) == 4)
            peer.store(prompt(4, "new"))
            later.kill()
            later.start()
            _reconnect(peer)
            wait_until(lambda: find(peer, prompt(4)) == find(peer, prompt(4, "new")) == 4)
        peer.close()


@pytest.mark.usefixtures("later")
@pytest.mark.promise(7)
def test_an_engine_that_is_upgraded_first_works_with_the_depot_of_the_release_before(
    depot: DepotProcess, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Peer(depot)
    peer.store(prompt(4))
    assert find(peer, prompt(4)) == 4
    assert "is of an earlier release" in caplog.text
    peer.close()


def test_an_engine_two_releases_ahead_reports_its_own_version(
    depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(m, "PROTOCOL_VERSION", m.PROTOCOL_VERSION + 2)
    monkeypatch.setattr(m, "OLDEST_PROTOCOL_VERSION", m.PROTOCOL_VERSION - 1)
    connection = Connection(depot.url, "test", registration(version=m.PROTOCOL_VERSION), maps_pool=False)
    with pytest.raises(DepotUnavailable, match=f"protocol {m.PROTOCOL_VERSION}, this depot"):
        connection.wait_until_open(1.0)
    connection.close()


def test_a_code_of_a_later_release_is_an_error_as_others(depot: DepotProcess) -> None:
    reply = frames.decode_reply(bytes(8) + msgspec.msgpack.encode(["error", 1, "tea_break", "at five"]))
    assert isinstance(reply, m.ErrorReply)
    assert reply.code is ErrorCode.OTHER
