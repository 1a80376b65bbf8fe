"""A pool's files are created all or not at all, and no foreign file is replaced or removed."""

import errno
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.errors import DepotBusy, PoolError
from kvdepot.features.routers.tokens import TOKENS_FILE, TokensFile
from kvdepot.features.sessions.prefixes import SESSIONS_FILE, PrefixFile
from kvdepot.pool import files as pool_files
from kvdepot.pool.files import PoolFiles, open_pool
from kvdepot.pool.folder import PoolFolder
from kvdepot.pool.inventory import find_pools, look_at, remove_pool
from kvdepot.pool.names import Label, Names, NamesFile
from kvdepot.pool.table import TABLE_VERSION, IndexTable
from support.commands import IN_SMALL_SHM, log_of_serve, needs_small_shm, run_kvdepot

SIZE = 1 << 20
KINDS = ["pool", "index", "names", "tokens", "sessions"]


def open_here(folder: Path, size_bytes: int = SIZE, *, fresh: bool = False) -> PoolFiles:
    files = open_pool(folder, size_bytes, 64, server="the depot of --dir /one", fresh=fresh)
    try:
        files.keep(TOKENS_FILE, TokensFile)
        files.keep(SESSIONS_FILE, PrefixFile)
        files.take_place()
    except PoolError:
        files.close(remove=False)
        raise
    return files


def fail_at(number: int, of: Callable[..., object], then: Callable[[], object]) -> Callable[..., object]:
    """Return a function that calls `of`, but calls `then` instead at its call `number`, counted from 0."""
    calls = iter(range(1000))

    def call(*arguments: object, **keywords: object) -> object:
        if next(calls) == number:
            return then()
        return of(*arguments, **keywords)

    return call


def raise_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


STEPS = [
    (pool_files, "open_with_lock", 0),
    (os, "pwrite", 0),
    (os, "posix_fallocate", 0),
    (os, "pwrite", 1),
    (os, "posix_fallocate", 1),
    (IndexTable, "create", 0),
    (NamesFile, "create", 0),
    (PrefixFile, "create", 0),
    (NamesFile, "flush", 0),
    (PoolFolder, "give_name", 0),
    (PoolFolder, "give_name", 1),
    (PoolFolder, "give_name", 2),
    (PoolFolder, "give_name", 3),
    (PoolFolder, "give_name", 4),
]
STEP_NAMES = [f"{owner.__name__}.{name} {number}" for owner, name, number in STEPS]


@pytest.mark.parametrize(("owner", "name", "number"), STEPS, ids=STEP_NAMES)
def test_a_pool_that_finds_no_room_on_the_way_leaves_nothing_behind(
    owner: object, name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_at(number, getattr(owner, name), raise_full))
        with pytest.raises(PoolError, match="No space left"):
            open_here(tmp_path)
    assert not tmp_path.exists() or not list(tmp_path.iterdir())
    assert os.listdir("/proc/self/fd") == descriptors
    open_here(tmp_path).close(remove=True)


@pytest.mark.parametrize(("owner", "name", "number"), STEPS, ids=STEP_NAMES)
@pytest.mark.parametrize("before", ["nothing", "a smaller pool"])
def test_files_of_a_start_that_was_killed_are_a_depot_s_and_leave(
    owner: object, name: str, number: int, before: str, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    if before == "a smaller pool":
        open_here(folder, SIZE // 2).close(remove=False)
    child = os.fork()
    if not child:
        setattr(owner, name, fail_at(number, getattr(owner, name), lambda: os.kill(os.getpid(), 9)))
        open_here(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 9
    assert [pool.directory for pool in find_pools(tmp_path)] == [folder]
    open_here(folder).close(remove=False)
    assert sorted(os.listdir(folder)) == sorted(KINDS)
    remove_pool(folder)
    assert not folder.exists()


def test_a_pool_of_an_earlier_format_is_replaced_with_one_line_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_here(tmp_path).close(remove=False)
    index = tmp_path / "index"
    header = bytearray(index.read_bytes()[:52])
    header[8] -= 1
    header[48:] = zlib.crc32(header[:48]).to_bytes(4, "little")
    with index.open("r+b") as file:
        file.write(header)
    lines: list[str] = []
    for _ in range(2):  # the second start finds a pool of its own format
        files = open_here(tmp_path)
        lines += [record.message for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        files.close(remove=False)
    assert len(lines) == 1
    assert f"discarding the cache of an earlier server in {tmp_path}" in lines[0]
    assert f"table format {TABLE_VERSION - 1}, this version writes {TABLE_VERSION}" in lines[0]


def test_the_file_of_a_feature_that_runs_no_more_is_removed(tmp_path: Path) -> None:
    """The tokens of prompts do not stay in memory when a depot without events takes over."""
    open_here(tmp_path).close(remove=False)
    files = open_pool(tmp_path, SIZE, 64, server="the next depot")
    assert files.keep(SESSIONS_FILE, PrefixFile).find("a", "b") == b""
    files.take_place()
    files.close(remove=False)
    assert sorted(os.listdir(tmp_path)) == sorted({*KINDS} - {TOKENS_FILE})


@pytest.mark.parametrize("damage", [b"KVDEPOTT", b"KVDEPOTT\xff\0\0\0", None])
def test_a_damaged_file_of_a_feature_costs_no_other_file(damage: bytes | None, tmp_path: Path) -> None:
    files = open_here(tmp_path)
    files.names.add(Names([], [Label("tenant", "model", "")]))
    files.close(remove=False)
    tokens = tmp_path / TOKENS_FILE
    if damage is None:
        tokens.unlink()
    else:
        tokens.write_bytes(damage)
    files = open_here(tmp_path)
    assert not files.is_new
    assert files.names.found.labels == [Label("tenant", "model", "")]
    assert tokens.read_bytes() == TokensFile.MAGIC
    files.close(remove=False)
    assert sorted(os.listdir(tmp_path)) == sorted(KINDS)


def test_unfinished_files_alone_are_a_pool_that_can_be_removed_once_nobody_makes_it(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / ".index-0123456789abcdef").write_bytes(b"KVDEPOTX" + bytes(100))
    (folder / ".names-0123456789abcdef").touch()
    (folder / ".names-of-mine").touch()
    (folder / ".pool-0123456789abcdef").write_bytes(b"mine")
    assert not look_at(folder).is_served
    remove_pool(folder)
    assert sorted(os.listdir(folder)) == [".names-of-mine", ".pool-0123456789abcdef"]


def test_a_pool_is_not_removed_while_a_depot_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_name = PoolFolder.give_name

    def look_first(folder: PoolFolder, unfinished: str, kind: str, *, replaces: bool) -> None:
        with pytest.raises(DepotBusy):
            remove_pool(tmp_path)
        give_name(folder, unfinished, kind, replaces=replaces)

    monkeypatch.setattr(PoolFolder, "give_name", look_first)
    open_here(tmp_path).close(remove=True)


@pytest.mark.promise(68)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("fresh", [False, True])
def test_somebody_s_file_among_a_pool_s_is_neither_replaced_nor_removed(name: str, fresh: bool, tmp_path: Path) -> None:
    open_here(tmp_path).close(remove=False)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("mine")
    before = sorted(os.listdir(tmp_path))
    for size in (SIZE, 2 * SIZE):
        with pytest.raises(PoolError, match=f"'{name}' that is not a depot's"):
            open_here(tmp_path, size, fresh=fresh)
    assert sorted(os.listdir(tmp_path)) == before
    remove_pool(tmp_path)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.promise(68)
@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_somebody_puts_beside_a_running_depot_s_stays(name: str, tmp_path: Path) -> None:
    files = open_here(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("mine")
    files.close(remove=True)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.promise(68)
def test_a_link_to_a_pool_or_to_a_file_of_one_is_not_followed(tmp_path: Path) -> None:
    pool, shared = tmp_path / "pool of root", tmp_path / "shm"
    open_here(pool).close(remove=False)
    shared.mkdir()
    (shared / "link").symlink_to(pool)
    (shared / "folder").mkdir()
    for name in KINDS:
        (shared / "folder" / name).symlink_to(pool / name)
    assert not find_pools(shared)
    with pytest.raises(PoolError, match="is a symbolic link; pass its target"):
        remove_pool(shared / "link")
    with pytest.raises(PoolError, match="holds no pool"):
        remove_pool(shared / "folder")
    with pytest.raises(PoolError, match="not a regular file"):
        open_here(shared / "folder")
    again = open_here(shared / "link")  # if --pool-dir is a link, the operator means its folder
    assert not again.is_new
    again.close(remove=True)
    assert not os.listdir(pool)


def test_a_pool_of_another_size_without_room_leaves_the_cache_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_here(tmp_path).close(remove=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail_at(0, os.posix_fallocate, raise_full))
        with pytest.raises(
            PoolError, match=r"No space left.*the cache in .* stays: its pool has 1,048,576 bytes.*--fresh"
        ):
            open_here(tmp_path, 2 * SIZE)
    again = open_here(tmp_path)
    assert not again.is_new
    again.close(remove=False)
    bigger = open_here(tmp_path, 2 * SIZE)
    assert bigger.is_new
    bigger.close(remove=True)


_FULL_TMPFS = """
import os, subprocess, sys
from pathlib import Path
from kvdepot.lab.processes import DepotProcess

with DepotProcess(pool_size="32MiB") as depot:
    before = os.stat(depot.pool_directory / "pool").st_ino
    depot.kill()
    flags = ["--dir", depot.url, "--pool-dir", str(depot.pool_directory), "--pool-size", "64MiB"]
    command = [sys.executable, "-m", "kvdepot", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    print(done.returncode, done.stderr)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "stays" in done.stderr
    depot.start()
    assert os.stat(depot.pool_directory / "pool").st_ino == before
"""


@pytest.mark.slow
@needs_small_shm
def test_a_depot_with_a_pool_larger_than_a_tmpfs_ends_and_the_next_one_has_the_cache() -> None:
    done = subprocess.run(
        [*IN_SMALL_SHM, sys.executable, "-c", _FULL_TMPFS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("entries", ["-5", "99999999999"])
def test_an_impossible_number_of_entries_is_one_line_and_the_next_start_works(entries: str, tmp_path: Path) -> None:
    flags = ("--dir", str(tmp_path / "d"), "--pool-size", "16MiB", "--pool-dir", str(tmp_path / "p"))
    done = run_kvdepot("serve", *flags, "--max-entries", entries)
    assert (done.returncode, "is not a whole number from 1 to" in done.stderr) == (2, True)
    log_of_serve(*flags)
