"""A depot whose pool lies in full memory declines what needs a new name, and goes on with the rest."""

import resource
from pathlib import Path

import msgspec
import pytest

from kvdepot.errors import ErrorCode
from kvdepot.features.routers.tokens import TokensFile
from kvdepot.lab.processes import DepotProcess
from kvdepot.pool.folder import NAMES_FILE
from kvdepot.wire import messages as m
from support.index import Bench
from support.index import prompt as chunks
from support.peer import SPEC, Peer, prompt, registration


def limit_files(pid: int, most_bytes: int = resource.RLIM_INFINITY) -> None:
    """Make writes of a process beyond this size of a file fail, as without memory."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


@pytest.mark.promise(1)
def test_names_without_room_are_declined_until_there_is_room(depot: DepotProcess) -> None:
    # Regression: each store of a new tenant was an internal error with a traceback.
    peer, run = Peer(depot), prompt(2)
    assert peer.store(run) == 2
    limit_files(depot.pid, (depot.pool_directory / NAMES_FILE).stat().st_size + 1)
    of_new = m.PrepareStore(peer.context, "r", "new", prompt(2, "new").digests, 0, prompt(2, "new").parent, (2,))
    for _ in range(3):
        assert peer.ask(of_new) == m.StorePlan(peer.session.epoch, 0, b"", 0, 2)
    assert peer.refusal(registration(msgspec.structs.replace(SPEC, format="new"))) is ErrorCode.OUT_OF_RANGE
    assert peer.store(prompt(2, "of a known tenant")) == 2
    counters = depot.status().counters
    assert (counters["stores_without_name"], counters["requests_failed"]) == (3, 0)
    limit_files(depot.pid)
    plan = peer.ask(of_new)
    assert isinstance(plan, m.StorePlan)
    assert plan.ticket
    peer.close()


def test_one_line_says_that_names_find_no_room_and_one_more_when_that_happens_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_full = False

    def save(_names: object) -> None:
        if is_full:
            raise OSError("No space left on device")

    bench = Bench(save_names=save)
    for text in ("no room", "no room again"):
        is_full = False
        worker = bench.worker()
        worker.store(chunks(1, tenant=f"before {text}"))
        is_full = True
        caplog.clear()
        for number in range(3):
            assert not worker.prepare(chunks(1, tenant=f"{text} {number}")).ticket
        assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
            "no room for the name of a new tenant, model or cache beside the pool"
        ]


def test_tokens_that_cannot_be_rewritten_are_read_nevertheless(tmp_path: Path) -> None:
    # Regression: a depot that started in full memory announced no chunk of the earlier server.
    file, told = TokensFile.create(tmp_path / "tokens"), list[bytes]()
    for body in (b"a", b"b"):
        file.append(body)
    limit_files(0, 0)
    try:
        for _ in file.rewrite(lambda body: told.append(body) is None):
            pass
    finally:
        limit_files(0)
    assert told == [b"a", b"b"]
    file.append(b"c")
    for _ in TokensFile.open(tmp_path / "tokens").rewrite(lambda body: told.append(body) is None):
        pass
    assert told == [b"a", b"b", b"a", b"b", b"c"]


def test_one_line_says_that_tokens_find_no_room_and_one_more_when_that_happens_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TokensFile.create(tmp_path / "tokens")
    for _ in range(2):
        file.append(b"a")
        size = file.size_bytes
        limit_files(0, size + 1)
        try:
            file.append(b"b")
            file.append(b"b")
        finally:
            limit_files(0)
        assert file.size_bytes == size == (tmp_path / "tokens").stat().st_size
        assert len(caplog.messages) == 1
        assert f"no room for tokens in {tmp_path}" in caplog.text
        caplog.clear()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.add_frame(b"after the end")
