"""The disk tier: the suite with and without `O_DIRECT`, killed writers, full and read-only file systems, capacity."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.lab.processes import wait_until
from kvdepot.testing.tier import Damage, TierSuite
from kvdepot.testing.tier_traffic import (
    EXTENT_BYTES,
    clear,
    contains,
    content,
    extents_of,
    fill,
    make_key,
    make_pool,
    read,
    write,
)
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.disk import files, listing
from kvdepot.tiers.disk.files import Folder
from kvdepot.tiers.disk.tier import DiskTier
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.keys import mark_of, name_hash
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot.tiers.url import TierUrl, open_tier
from support.tiers.direct import read_from, write_to
from support.tiers.kept import KEPT_KEY, KEPT_TRAILER

FILE_BYTES = EXTENT_BYTES + 4096


class TestDiskTier(TierSuite):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "tier"

    def open_tier(self, pool: TierPool) -> Tier:
        tier = DiskTier(pool, self.directory, 1 << 20)
        wait_until(lambda: tier.is_listed)
        return tier

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        path, elsewhere = file_of(self.directory, key), file_of(self.directory, other)
        data = bytearray(path.read_bytes())
        match how:
            case Damage.FLIPPED:
                data[1000] ^= 4
            case Damage.TRUNCATED:
                del data[-4096:]
            case Damage.SWAPPED:
                data = bytearray(elsewhere.read_bytes())
        path.write_bytes(data)

    @pytest.mark.parametrize("place", [0, 4095, EXTENT_BYTES - 1, EXTENT_BYTES, EXTENT_BYTES + 30, EXTENT_BYTES + 119])
    def test_a_bit_that_flips_anywhere_is_found(self, queue: TierQueue, pool: TierPool, place: int) -> None:
        fill(pool, 0, [make_key(0)], [EXTENT_BYTES])
        write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
        path = file_of(self.directory, make_key(0))
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert read(queue, [make_key(0)], extents_of(1, [EXTENT_BYTES])) == [False]
        assert not path.exists()

    @pytest.mark.parametrize("size", [0, 100, 4096, 5000, EXTENT_BYTES, EXTENT_BYTES + 1000])
    def test_a_file_that_ends_anywhere_is_found(
        self, queue: TierQueue, pool: TierPool, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.preadv

        def read_aligned(fd: int, buffers: list[memoryview], offset: int) -> int:
            if offset % 4096:
                raise OSError(errno.EINVAL, "some file systems with O_DIRECT refuse this at the end, too")
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", read_aligned)
        fill(pool, 0, [make_key(0)], [EXTENT_BYTES])
        write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
        path = file_of(self.directory, make_key(0))
        os.truncate(path, size)
        assert read(queue, [make_key(0)], extents_of(1, [EXTENT_BYTES])) == [False]
        assert not path.exists()
        counters = queue.status().counters
        assert (counters["corrupt"], counters.get("errors", 0)) == (1, 0)


def without_direct(patch: pytest.MonkeyPatch) -> None:
    """Simulate a file system without `O_DIRECT`."""
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    patch.setattr(os, "open", refuse)


class TestDiskTierWithoutDirect(TestDiskTier):
    @pytest.fixture(autouse=True)
    def no_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        without_direct(monkeypatch)


def file_of(directory: Path, key: bytes) -> Path:
    (path,) = (path for path in directory.glob("*/*/*/*") if path.name.endswith(key[-32:].hex()))
    return path


@pytest.fixture
def pool() -> TierPool:
    return make_pool()


def opened(pool: TierPool, directory: Path, capacity_bytes: int = 1 << 20) -> TierQueue:
    tier = DiskTier(pool, directory, capacity_bytes)
    wait_until(lambda: tier.is_listed)
    return TierQueue(tier, pool, "disk", deadline_seconds=10.0)


def test_at_its_capacity_the_least_recently_used_entry_leaves(pool: TierPool, tmp_path: Path) -> None:
    queue = opened(pool, tmp_path, 10 * FILE_BYTES)
    keys = [make_key(number) for number in range(20)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 20)
    for number, extent in enumerate(extents_of(0, [EXTENT_BYTES] * 20)):
        assert write(queue, [keys[number]], [extent]) == [True]
        assert read(queue, keys[:1], extents_of(30, [EXTENT_BYTES])) == [True]
    here = contains(queue, keys)
    assert here[0], "it was read all the time"
    assert here[-1]
    assert 8 <= sum(here) <= 10
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*/*")) == queue.tier.usage().used_bytes
    queue.close()


def test_of_a_prefix_that_engines_find_in_the_pool_the_first_entries_stay_longest(
    pool: TierPool, tmp_path: Path
) -> None:
    queue = opened(pool, tmp_path, 10 * FILE_BYTES)
    keys = [make_key(number) for number in range(20)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 20)
    num_here = list[int]()
    for number, extent in enumerate(extents_of(0, [EXTENT_BYTES] * 20)):
        assert write(queue, [keys[number]], [extent]) == [True]
        if number == 7:
            assert queue.tier.touch(keys[:4], [EXTENT_BYTES] * 4) == [True] * 4
        here = contains(queue, keys[:4])
        assert here == sorted(here, reverse=True)
        num_here.append(sum(here))
    assert num_here[:12] == [1, 2, 3, *[4] * 9], "older entries than those that were used leave"
    assert num_here[-1] == 0
    queue.close()


def test_a_file_that_cannot_be_removed_stays_and_others_leave(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the tier kept trying to remove one bad file, the least recently used, and wrote nothing more."""
    queue = opened(pool, tmp_path, 10 * FILE_BYTES)
    keys = [make_key(number) for number in range(30)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 30)
    extents = extents_of(0, [EXTENT_BYTES] * 30)
    real, bad = os.unlink, {files.name_of(key) for key in keys[:2]}

    def unlink(path: str, **options: Any) -> None:
        if path in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    for key, extent in zip(keys, extents, strict=True):
        assert write(queue, [key], [extent]) == [True]
    assert contains(queue, keys[:2]) == [True, True]
    assert read(queue, keys[:2], extents_of(30, [EXTENT_BYTES] * 2)) == [True, True]
    usage = queue.tier.usage()
    assert 8 <= usage.num_entries <= 10
    assert usage.counters["not_evicted"] > 0
    queue.close()


def test_a_folder_in_which_nothing_can_be_removed_is_told(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(pool, tmp_path, 4 * FILE_BYTES)
    wait_until(lambda: tier.is_listed)
    extents = extents_of(0, [EXTENT_BYTES] * 5)
    assert write_to(tier, pool, [make_key(number) for number in range(4)], extents[:4]) == [True] * 4
    calls = list[str]()

    def unlink(path: str, **_options: Any) -> None:
        calls.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_to(tier, pool, [make_key(4)], extents[4:])
    assert len(calls) < 40, "not for ever"
    assert tier.usage().num_entries == 4
    tier.close()


def test_entries_that_are_written_at_the_same_time_stay_within_the_capacity(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each writer counted the existing files, but not those that other writers were about to add."""
    tier, keys = DiskTier(pool, tmp_path, 4 * FILE_BYTES), [make_key(number) for number in range(9)]
    wait_until(lambda: tier.is_listed)
    write_to(tier, pool, keys[:4], extents_of(0, [EXTENT_BYTES] * 4))
    are_in, go_on, real = list[int](), threading.Event(), os.pwritev

    def write_later(*arguments: Any) -> int:
        are_in.append(1)
        go_on.wait(30.0)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", write_later)
    results = dict[int, list[bool]]()

    def write_one(number: int) -> None:
        results[number] = write_to(tier, pool, [keys[number]], extents_of(number, [EXTENT_BYTES]))

    writers = [threading.Thread(target=write_one, args=(number,)) for number in range(4, 9)]
    for writer in writers:
        writer.start()
    wait_until(lambda: len(results) + len(are_in) == 5)
    go_on.set()
    for writer in writers:
        writer.join()
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*/*")) == tier.usage().used_bytes <= 4 * FILE_BYTES
    assert results == {n: tier.contains([keys[n]]) for n in range(4, 9)}
    assert any(map(any, results.values()))
    tier.close()


class SlowDrive:
    """A drive whose writes wait until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.go_on = threading.Event()
        self._write = os.pwritev
        monkeypatch.setattr(os, "pwritev", self.write)

    def write(self, *arguments: Any) -> int:
        self.num_begun += 1
        self.go_on.wait(30.0)
        return self._write(*arguments)


def test_of_three_writes_one_gets_ready_while_two_move_bytes(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SLOT_SECONDS", 30.0)
    queue = opened(pool, tmp_path)
    drive = SlowDrive(monkeypatch)
    queue.submit(Job(JobKind.WRITE, [make_key(n) for n in range(3)], extents_of(0, [EXTENT_BYTES] * 3)))
    wait_until(lambda: len(list(tmp_path.glob("*/*/*/*.tmp"))) == 3, what="three files")
    wait_until(lambda: drive.num_begun == 2, what="two writes")
    assert not threading.Event().wait(0.05)
    assert drive.num_begun == 2
    drive.go_on.set()
    wait_until(lambda: queue.tier.usage().num_entries == 3)
    queue.close()


def test_writes_do_not_wait_for_ever_for_those_that_hang(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = opened(pool, tmp_path)
    drive = SlowDrive(monkeypatch)
    queue.submit(Job(JobKind.WRITE, [make_key(n) for n in range(2)], extents_of(0, [EXTENT_BYTES] * 2)))
    wait_until(lambda: drive.num_begun == 2, what="two writes")
    monkeypatch.undo()
    assert write(queue, [make_key(2)], extents_of(2, [EXTENT_BYTES])) == [True]
    monkeypatch.setattr(files, "SLOT_SECONDS", 30.0)
    assert write(queue, [make_key(3)], extents_of(3, [EXTENT_BYTES])) == [True], "their slots are taken over"
    drive.go_on.set()
    wait_until(lambda: queue.tier.usage().num_entries == 4)
    queue.close()


def test_an_entry_larger_than_the_tier_is_not_written(pool: TierPool, tmp_path: Path) -> None:
    queue = opened(pool, tmp_path, EXTENT_BYTES)
    assert write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES])) == [False]
    queue.close()


def test_a_smaller_capacity_is_kept_after_a_restart(pool: TierPool, tmp_path: Path) -> None:
    queue = opened(pool, tmp_path)
    keys = [make_key(number) for number in range(20)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 20)
    write(queue, keys, extents_of(0, [EXTENT_BYTES] * 20))
    queue.close()
    queue = opened(pool, tmp_path, 10 * FILE_BYTES)
    wait_until(lambda: queue.tier.usage().used_bytes <= 10 * FILE_BYTES)
    queue.close()


KEPT_NAME = (
    "86d97ba414bf826f/7fcccec0361f0442/00/"
    "616f187d46f5724f328844808b151a410000000000000000000000000000000000000000000000000000000000000007"
)


def test_the_format_of_files_is_kept(pool: TierPool, tmp_path: Path) -> None:
    """The first release wrote files with this name and these bytes."""
    key = KEPT_KEY
    path = tmp_path / KEPT_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content(key, 5000).ljust(8192, b"\0") + KEPT_TRAILER.ljust(4096, b"\0"))
    queue = opened(pool, tmp_path)
    assert read(queue, [key], extents_of(0, [5000])) == [True]
    assert pool.view[:5000] == content(key, 5000)
    clear(queue, None, None)
    assert not path.exists()
    assert write(queue, [key], extents_of(0, [5000])) == [True]
    queue.close()
    data = path.read_bytes()
    assert (data[:5000], data[8192 : 8192 + len(KEPT_TRAILER)], len(data)) == (content(key, 5000), KEPT_TRAILER, 12288)


WRITER = """
import sys
from pathlib import Path
from kvdepot.testing.tier_traffic import *
from kvdepot.tiers.disk.tier import DiskTier

pool = make_pool(1 << 20)
tier = DiskTier(pool, Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for number in range(1_000_000):
    key = make_key(number)
    pool.view[: 1 << 20] = content(key, 64) * (1 << 14)
    write_to(tier, pool, [key], [(0, 1 << 20)])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_byte_leaves_whole_entries_or_none(tmp_path: Path) -> None:
    pool = make_pool(1 << 20)
    rng = random.Random(1)
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(rng.randint(3, 30)):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        queue = opened(pool, tmp_path, 1 << 30)
        assert not [path for path in tmp_path.glob("*/*/*/*") if path.name.endswith(".tmp")]
        num_entries = queue.tier.usage().num_entries
        assert num_entries > 3
        for number in range(num_entries):
            assert read(queue, [make_key(number)], [(0, 1 << 20)]) == [True]
            assert pool.view[: 1 << 20] == content(make_key(number), 64) * (1 << 14)
        assert queue.counters["corrupt"] == 0
        queue.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def stuff(path: Path) -> None:
    """Fill up the file system."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))


def test_a_full_file_system_makes_room_and_refuses_what_does_not_fit(pool: TierPool, small_disk: Path) -> None:
    queue = opened(pool, small_disk, 1 << 30)
    keys = [make_key(number) for number in range(40)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 40)
    outcomes = [write(queue, [key], extents_of(place, [EXTENT_BYTES]))[0] for place, key in enumerate(keys)]
    assert sum(outcomes) > 30
    assert not queue.is_suspended
    here = contains(queue, keys)
    assert any(here)
    found = read(queue, keys, extents_of(40, [EXTENT_BYTES] * 40))
    assert found == here
    queue.close()


def test_a_file_system_filled_by_others_costs_only_writes(pool: TierPool, small_disk: Path) -> None:
    queue = opened(pool, small_disk, 1 << 30)
    fill(pool, 0, [make_key(0)], [EXTENT_BYTES])
    write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
    stuff(small_disk / "somebody's")
    for number in range(1, 6):
        assert write(queue, [make_key(number)], extents_of(0, [EXTENT_BYTES])) == [False]
    assert not queue.is_suspended
    assert read(queue, [make_key(0)], extents_of(1, [EXTENT_BYTES])) == [True]
    queue.close()


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_a_file_system_that_turns_read_only_still_serves_and_is_written_when_it_can_be(
    pool: TierPool, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    queue = opened(pool, small_disk, 5 * FILE_BYTES)
    keys = [make_key(number) for number in range(12)]
    extents = extents_of(0, [EXTENT_BYTES] * 12)
    fill(pool, 0, keys, [EXTENT_BYTES] * 12)
    write(queue, keys[:5], extents[:5])
    remount(small_disk, "ro")
    for number in range(5, 12):
        assert write(queue, [keys[number]], [extents[number]]) == [False]
        assert read(queue, keys[:5], extents_of(30, [EXTENT_BYTES] * 5)) == [True] * 5, "nothing leaves that stays"
    assert not queue.is_suspended
    assert said(caplog, "declining writes, still serving stored entries: it cannot be written: Read-only") == 1
    assert queue.tier.usage().counters["not_writable"] == 7
    queue.tier.probe()
    remount(small_disk, "rw")
    assert write(queue, keys[5:6], extents[5:6]) == [True]
    assert said(caplog, "accepting writes again") == 1
    queue.close()


def test_a_probe_of_a_read_only_file_system_reads(
    pool: TierPool, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = opened(pool, small_disk)
    fill(pool, 0, [make_key(0)], [EXTENT_BYTES])
    write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
    remount(small_disk, "ro")
    queue.tier.probe()

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        queue.tier.probe()
    queue.close()


def test_entries_cleared_on_a_read_only_file_system_are_not_served_and_are_removed_later(
    pool: TierPool, small_disk: Path
) -> None:
    queue = opened(pool, small_disk)
    write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
    path = file_of(small_disk, make_key(0))
    remount(small_disk, "ro")
    for _ in range(2):
        with pytest.raises(OSError, match="not all files could be removed"):
            sum(queue.tier.clear(None, None))
        assert contains(queue, [make_key(0)]) == [False]
        assert read(queue, [make_key(0)], extents_of(1, [EXTENT_BYTES])) == [False]
    remount(small_disk, "rw")
    assert clear(queue, None, None) == 1
    assert not path.exists()
    queue.close()


@pytest.mark.parametrize("why", ["full", "read-only"])
def test_a_file_system_that_is_away_at_the_start_is_served_and_written_later(
    pool: TierPool, small_disk: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    folder, stuffing = small_disk / "tier", small_disk / "somebody's"
    keys = [make_key(number) for number in range(8)]
    extents = extents_of(0, [EXTENT_BYTES] * 8)
    fill(pool, 0, keys, [EXTENT_BYTES] * 8)
    queue = opened(pool, folder)
    write(queue, keys[:1], extents[:1])  # less than the missing space, as a larger tier would make room
    queue.close()
    if why == "full":
        stuff(stuffing)
    else:
        remount(small_disk, "ro")
    queue = opened(pool, folder)
    for number in range(1, 8):
        assert write(queue, [keys[number]], [extents[number]]) == [False]
    assert contains(queue, keys) == [True] + [False] * 7
    assert read(queue, keys[:1], extents_of(30, [EXTENT_BYTES])) == [True]
    assert pool.view[30 * EXTENT_BYTES : 31 * EXTENT_BYTES] == pool.view[:EXTENT_BYTES]
    assert not queue.is_suspended
    assert said(caplog, "declining writes, still serving stored entries") == 1
    if why == "full":
        stuffing.unlink()
    else:
        remount(small_disk, "rw")
    assert write(queue, keys[1:], extents[1:]) == [True] * 7
    assert read(queue, keys, extents_of(30, [EXTENT_BYTES] * 8)) == [True] * 8
    queue.close()


@pytest.mark.parametrize("why", ["full", "read-only"])
def test_a_folder_that_could_not_be_made_at_the_start_is_made_later(
    pool: TierPool, small_disk: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    real = os.mkdir

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(*((errno.ENOSPC, "No space") if why == "full" else (errno.EROFS, "Read-only file system")))

    monkeypatch.setattr(os, "mkdir", refuse)
    tier = DiskTier(pool, small_disk / "tier", 1 << 20)
    queue = TierQueue(tier, pool, "disk", deadline_seconds=10.0)
    for _ in range(4):
        assert write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES])) == [False]
        assert read(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES])) == [False]
    assert clear(queue, None, None) == 0
    assert not queue.is_suspended
    monkeypatch.setattr(os, "mkdir", real)
    assert write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES])) == [True]
    assert read(queue, [make_key(0)], extents_of(1, [EXTENT_BYTES])) == [True]
    with pytest.raises(ConfigError, match="another depot uses this folder"):
        DiskTier(pool, small_disk / "tier", 1 << 20)
    queue.close()


class FileSystem:
    """A file system of 1,000 GB with some free space, which the tier's writes take and its removals return."""

    def __init__(self, tier: DiskTier, num_free: int, comes_back: bool = True) -> None:
        self.tier, self.num_free, self.comes_back = tier, num_free, comes_back
        self.used_before = tier.usage().used_bytes

    def stat(self, _: int) -> SimpleNamespace:
        taken = self.tier.usage().used_bytes - self.used_before if self.comes_back else 0
        return SimpleNamespace(f_bavail=self.num_free - taken, f_blocks=10**12, f_frsize=1)


def written(pool: TierPool, directory: Path, count: int) -> tuple[DiskTier, list[bytes]]:
    tier = DiskTier(pool, directory, 1 << 30)
    keys = [make_key(number) for number in range(count + 40)]
    for key in keys[:count]:
        write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))
    return tier, keys


def test_other_files_on_the_file_system_do_not_empty_the_tier(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """15 of 1,000 GB are free, 20 GB should be, and the tier has less than the difference."""
    tier, keys = written(pool, tmp_path, 300)
    system = FileSystem(tier, 15 * 10**9)
    monkeypatch.setattr(os, "fstatvfs", system.stat)
    assert not any(write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))[0] for key in keys[300:])
    assert tier.contains(keys[:300]) == [True] * 300
    assert said(caplog, "other files fill its file system: 4.7 GiB are missing to the 2% that stay free") == 1
    system.num_free *= 2
    assert all(write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))[0] for key in keys[300:])
    assert said(caplog, "accepting writes again") == 1
    tier.close()


def test_on_a_tight_file_system_only_as_much_leaves_as_is_missing(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = written(pool, tmp_path, 100)
    monkeypatch.setattr(os, "fstatvfs", FileSystem(tier, 20 * 10**9 - 5 * FILE_BYTES).stat)
    for number, key in enumerate(keys[100:], 1):
        assert write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES])) == [True]
        assert tier.usage().num_entries == 95
        assert tier.contains([keys[4 + number], keys[5 + number]]) == [False, True]
    tier.close()


def test_a_file_system_that_gives_space_back_late_does_not_empty_the_tier(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = written(pool, tmp_path, 100)
    monkeypatch.setattr(os, "fstatvfs", FileSystem(tier, 20 * 10**9 - 5 * FILE_BYTES, comes_back=False).stat)
    assert not any(write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))[0] for key in keys[100:])
    assert tier.usage().num_entries == 94, "five that were missing, and one for the write"
    tier.close()


def test_a_quota_of_others_does_not_empty_the_tier(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, keys = written(pool, tmp_path, 100)

    def refuse(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert not any(write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))[0] for key in keys[100:])
    assert tier.usage().num_entries == 98
    assert write_to(tier, pool, keys[100:101], extents_of(0, [EXTENT_BYTES])) == [True]
    tier.close()


def test_without_direct_it_is_said_once(pool: TierPool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        without_direct(patch)
        queue = opened(pool, tmp_path)
        keys = [make_key(number) for number in range(8)]
        fill(pool, 0, keys, [EXTENT_BYTES] * 8)
        for _ in range(2):
            assert write(queue, keys, extents_of(0, [EXTENT_BYTES] * 8)) == [True] * 8
            assert read(queue, keys, extents_of(8, [EXTENT_BYTES] * 8)) == [True] * 8
            queue.tier.probe()
            clear(queue, None, None)
        queue.close()
    assert said(caplog, "has no O_DIRECT: entries go through the page cache, which is slower") == 1


def test_without_direct_it_is_said_once_also_by_writers_that_find_it_together(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: if the file system was full at the start, each of the first writers logged it."""
    both_probe = threading.Barrier(2)

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space")

    def no_direct(*_: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_probe.wait(1.0)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Folder, "probe_write", no_space)
    tier = DiskTier(pool, tmp_path, 1 << 20)
    monkeypatch.setattr(Folder, "probe_write", no_direct)
    writers = [
        threading.Thread(target=write_to, args=(tier, pool, [make_key(number)], extents_of(number, [EXTENT_BYTES])))
        for number in range(2)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert tier.usage().num_entries == 2
    assert said(caplog, "has no O_DIRECT") == 1
    tier.close()


def test_two_depots_do_not_share_a_folder(pool: TierPool, tmp_path: Path) -> None:
    queue = opened(pool, tmp_path)
    with pytest.raises(ConfigError, match="another depot uses this folder"):
        DiskTier(pool, tmp_path, 1 << 20)
    queue.close()
    opened(pool, tmp_path).close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("disk:///proc/self?capacity=1GiB", "cannot be written"),
        ("disk:///proc/self/nothing?capacity=1GiB", "No such file"),
        ("disk:///proc/version?capacity=1GiB", "it is not a folder"),
        ("disk:///proc/version/x?capacity=1GiB", "Not a directory"),
        ("disk:///sys/kernel?capacity=1GiB", "cannot be written"),
        ("disk:///sys/nothing?capacity=1GiB", "Operation not permitted|Permission denied"),
        ("disk://host/path?capacity=1GiB", "three slashes"),
        ("disk:///proc/nothing?capacity=1GiB", "No such file"),
        ("disk:///tmp/x", "needs its capacity"),
        ("disk:///tmp/x?capcity=1GiB", "has no option 'capcity'"),
    ],
)
def test_a_folder_that_cannot_be_says_why(url: str, words: str, pool: TierPool) -> None:
    with pytest.raises(ConfigError, match=words):
        open_tier(TierUrl.parse(url), pool)


def test_foreign_files_are_left_alone(pool: TierPool, tmp_path: Path) -> None:
    queue = opened(pool, tmp_path)
    write(queue, [make_key(0)], extents_of(0, [EXTENT_BYTES]))
    queue.close()
    entry = file_of(tmp_path, make_key(0))
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    foreign = [
        tmp_path / "note",
        tmp_path / "probe.tmp",
        tmp_path / "direct.tmp",
        tmp_path / "lock",
        tmp_path / "a" / "b" / "c" / "note",
        tmp_path / "a" / "b" / "c" / "letter.tmp",
        tmp_path / "a" / "b" / "c" / f"{entry.name}.0a1b2c3d-0.tmp",
        entry.with_name("letter.tmp"),
        entry.with_name(f"{entry.name}.tmp"),
        entry.with_name(f"{entry.name}.letter-0.tmp"),
        entry.with_name(f"{entry.name}.0a1b2c3d-x.tmp"),
        entry.with_name(f"{entry.name[:-2]}.0a1b2c3d-0.tmp"),
    ]
    for path in foreign:
        path.write_text("not ours")
    ours = entry.with_name(f"{entry.name}.0a1b2c3d-7.tmp")
    ours.write_text("half of an entry")
    queue = opened(pool, tmp_path)
    queue.tier.probe()
    assert queue.tier.usage().num_entries == 1
    queue.close()
    assert all(path.read_text() == "not ours" for path in foreign)
    assert not ours.exists()


def is_stored(tier: Tier, directory: Path, key: bytes) -> bool:
    """Return whether an entry has a file. The tier's answer must agree."""
    has_file = any(path.name.endswith(key[-32:].hex()) for path in directory.glob("*/*/*/*"))
    assert tier.contains([key]) == [has_file], "the index is wrong"
    return has_file


def beside(action: Callable[[], object], seconds: float = 30.0) -> threading.Thread:
    """Run `action` on another thread and wait for it."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(seconds)
    return thread


@pytest.mark.parametrize("listed", [True, False])
def test_entries_of_outdated_weights_are_evicted_first(tmp_path: Path, *, listed: bool) -> None:
    pool, old, new = make_pool(), "lineage 7", "lineage 8"
    outdated = [make_key(number, weights=old) for number in range(4)]
    present = [make_key(number, weights=new) for number in range(4)]
    others = [make_key(number, model="another", weights=old) for number in range(2)] + [make_key(9)]
    keys = [*present, *others, *outdated]  # the outdated ones are the most recently used

    def write(tier: DiskTier, *some: bytes) -> None:
        for key in some:
            assert tier.write([key], [bytes(TRAILER_BYTES)], [(0, EXTENT_BYTES)]) == [True]

    with contextlib.closing(DiskTier(pool, tmp_path / "tier", len(keys) * FILE_BYTES)) as tier:
        write(tier, *keys)
    with contextlib.closing(DiskTier(pool, tmp_path / "tier", len(keys) * FILE_BYTES)) as tier:
        if listed:
            wait_until(lambda: tier.is_listed)
        tier.outdate({name_hash("a model") + mark_of(old)})
        wait_until(lambda: tier.is_listed)
        write(tier, *(make_key(number) for number in range(20, 23)))
        assert tier.contains([*present, *others]) == [True] * 7
        assert not all(tier.contains(outdated))


@pytest.mark.parametrize("how", ["cleared", "evicted"])
def test_an_entry_that_leaves_while_it_is_read_is_not_in_the_index_afterwards(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tier = DiskTier(pool, tmp_path, 10 * FILE_BYTES)
    keys = [make_key(number) for number in range(20)]
    fill(pool, 0, keys, [EXTENT_BYTES] * 20)
    extents = extents_of(0, [EXTENT_BYTES] * 20)
    write_to(tier, pool, keys[:1], extents[:1])

    real = Folder.read

    def read_and_leave(*arguments: Any) -> tuple[int, memoryview]:
        result = real(*arguments)
        beside(lambda: [*tier.clear(None, None)] if how == "cleared" else write_to(tier, pool, keys[1:], extents[1:]))
        return result

    monkeypatch.setattr(Folder, "read", read_and_leave)
    assert read_from(tier, pool, keys[:1], extents_of(30, [EXTENT_BYTES])) == [True]
    assert not is_stored(tier, tmp_path, keys[0])
    assert tier.usage().used_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*/*/*"))
    assert write_to(tier, pool, keys[:1], extents[:1]) == [True]
    assert is_stored(tier, tmp_path, keys[0])
    tier.close()


def test_an_entry_written_while_it_leaves_is_there_or_not(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, key = DiskTier(pool, tmp_path, 1 << 20), make_key(0)
    fill(pool, 0, [key], [EXTENT_BYTES])
    write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES]))
    real, writers = os.unlink, list[threading.Thread]()

    def unlink(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "unlink", real)
        writers.append(beside(lambda: write_to(tier, pool, [key], extents_of(0, [EXTENT_BYTES])), 0.2))
        real(*arguments, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    assert sum(tier.clear(None, None)) == 1
    writers[0].join()
    is_stored(tier, tmp_path, key)
    tier.close()


def test_an_entry_that_leaves_while_the_folder_is_listed_does_not_come_back(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = opened(pool, tmp_path)
    keys = [make_key(0), make_key(1)]
    write(queue, keys, extents_of(0, [EXTENT_BYTES] * 2))
    queue.close()
    path, is_found, go_on = file_of(tmp_path, keys[0]), threading.Event(), threading.Event()
    path.write_bytes(bytes(FILE_BYTES))

    real = listing.found_files

    def found_slowly(folder: Folder, is_over: Callable[[], bool]) -> Iterator[listing.File]:
        yield from real(folder, is_over)
        is_found.set()
        go_on.wait(30.0)

    monkeypatch.setattr(listing, "found_files", found_slowly)
    tier = DiskTier(pool, tmp_path, 1 << 20)
    is_found.wait(30.0)
    assert read_from(tier, pool, keys, extents_of(8, [EXTENT_BYTES] * 2)) == [False, True]
    go_on.set()
    wait_until(lambda: tier.is_listed)
    assert not is_stored(tier, tmp_path, keys[0])
    assert is_stored(tier, tmp_path, keys[1])
    tier.close()


def test_entries_are_used_while_the_index_is_built_from_a_listing() -> None:
    """Regression: reads waited for the index of 500,000 files, became late, and the tier was suspended."""
    entries, threads = listing.FileIndex(), list[threading.Thread]()

    class Watched(bytes):
        """A key whose use in the index takes as long as another thread needs for an entry."""

        __slots__ = ()

        def __hash__(self) -> int:
            if not threads:
                threads.append(beside(lambda: entries.put(written, FILE_BYTES), 1.0))
                was_blocked.append(threads[0].is_alive())
            return super().__hash__()

    was_blocked = list[bool]()
    old, written = [Watched(make_key(number)) for number in range(3)], make_key(1)
    assert entries.add_found((float(number), key, 2 * FILE_BYTES) for number, key in enumerate(old))
    threads[0].join()
    assert was_blocked == [False]
    assert entries.oldest(9) == [old[0], old[2], written]
    assert entries.used_bytes == 5 * FILE_BYTES


def test_a_folder_that_cannot_be_listed_costs_only_what_is_in_it(pool: TierPool, tmp_path: Path) -> None:
    keys = [make_key(number, f"tenant {number}") for number in range(3)]
    queue = opened(pool, tmp_path)
    write(queue, keys, extents_of(0, [EXTENT_BYTES] * 3))
    queue.close()
    broken = file_of(tmp_path, keys[1]).parent
    real = os.scandir

    def scan(path: Any) -> Any:
        if Path(path) == broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        queue = opened(pool, tmp_path)
    assert contains(queue, keys) == [True, False, True]
    queue.close()


class Unseen:
    """A file whose attributes cannot be read."""

    def __init__(self, file: os.DirEntry[str]) -> None:
        self.name = file.name

    def stat(self, **_: Any) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_looked_at_costs_only_itself(
    pool: TierPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the index was empty then, and the folder's files did not count against the capacity."""
    keys = [make_key(number, f"tenant {number}") for number in range(3)]
    queue = opened(pool, tmp_path)
    write(queue, keys, extents_of(0, [EXTENT_BYTES] * 3))
    queue.close()
    broken, real = file_of(tmp_path, keys[1]).name, listing.items_in

    def items(folder: Folder, name: str) -> list[Any]:
        return [Unseen(file) if file.name == broken else file for file in real(folder, name)]

    monkeypatch.setattr(listing, "items_in", items)
    queue = opened(pool, tmp_path)
    assert contains(queue, keys) == [True, False, True]
    assert queue.tier.usage().used_bytes == 2 * FILE_BYTES
    queue.close()
