"""`kvdepot serve` without a size, as in the README: the cache outlives the server."""

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.client.operator import ask_depot
from kvdepot.errors import DepotUnavailable
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import wait_until
from kvdepot.operate import operations as o
from kvdepot.operate.cli import main
from kvdepot.pool.inventory import find_pools
from kvdepot.wire.status import DepotStatus
from kvdepot_cpu.context import CpuOptions, CpuTransferContext
from support.commands import KVDEPOT


@contextmanager
def serving(directory: Path, *arguments: str) -> Generator[None]:
    """Run the command, and kill it at the end of the block. Its log is in the file `log`."""
    command = [*KVDEPOT, "serve", "--dir", str(directory), *arguments]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            wait_until(lambda: is_answering(directory), 30, "a depot that answers")
            yield
        finally:
            process.kill()


def is_answering(directory: Path) -> bool:
    try:
        status_of(directory)
    except DepotUnavailable:
        return False
    return True


def status_of(directory: Path) -> DepotStatus:
    reply = ask_depot(o.Status(), str(directory), 10.0)
    assert isinstance(reply, o.StatusReply)
    return reply.status


def store(directory: Path) -> None:
    """Store a prompt of 640 tokens."""
    cache = CacheGroup([np.ones((64, 4096), np.uint8)], 16)
    worker = CpuTransferContext(KVCache([cache], "engine", dtype="bytes"), CpuOptions(url=str(directory)))
    try:
        worker.wait_until_connected(10)
        key = hash_prefix(Namespace("m"), worker.spec.chunk_tokens, range(640))
        assert worker.submit_store("r", key, [list(range(40))]).result(30)
    finally:
        worker.close()


@pytest.mark.slow
@pytest.mark.promise(23)
def test_the_bare_command_finds_its_cache_again_however_much_memory_is_free_by_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path):
        store(tmp_path)
        before = status_of(tmp_path)
    (pool,) = (pool for pool in find_pools() if str(tmp_path) in pool.server)
    try:
        taken = bytearray(256 << 20)  # so that a quarter of the free memory would now be another size
        with serving(tmp_path):
            wait_until(lambda: not status_of(tmp_path).recovering, 30, "the index")
            after = status_of(tmp_path)
        assert taken
        assert (after.pool_size_bytes, after.num_entries) == (before.pool_size_bytes, before.num_entries)
        assert before.num_entries == 10
        with serving(tmp_path, "--pool-size", "32MiB"):
            pass
        assert f"has {before.pool_size_bytes:,} bytes and --pool-size is {32 << 20:,}" in (tmp_path / "log").read_text()
    finally:
        with pytest.raises(SystemExit):
            main(["pools", "--remove", str(pool.directory)])
        capsys.readouterr()
