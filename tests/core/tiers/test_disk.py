"""The disk tier: the suite with and without `O_DIRECT`, killed writers, full and read-only file systems, capacity."""

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
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
from kvdepot.tiers.keys import mark_of, name_hash
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot.tiers.url import TierUrl, open_tier
from support.other_users import STRANGER, as_root
from support.tiers.direct import read_from, write_to
from support.tiers.kept import KEPT_KEY, KEPT_TRAILER
from support.tiers.shelf import Shelf

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


class Disk:
    """A folder for tiers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shelves: list[Shelf[DiskTier]] = []

    def open(self, capacity_bytes: int = 1 << 20, size: int = EXTENT_BYTES) -> Shelf[DiskTier]:
        """Open a tier and wait until it knows its files."""
        shelf = Shelf(lambda pool: DiskTier(pool, self.folder, capacity_bytes), size)
        self.shelves.append(shelf)
        wait_until(lambda: shelf.tier.is_listed)
        return shelf

    def files(self) -> list[Path]:
        return list(self.folder.glob("*/*/*/*"))

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())

    def has_file(self, shelf: Shelf[DiskTier], number: int) -> bool:
        """Return whether an entry has a file. The tier's answer must agree."""
        name = make_key(number)[-32:].hex()
        has_file = any(path.name.endswith(name) for path in self.files())
        assert shelf.has(number) == [has_file], "the index is wrong"
        return has_file

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.folder)], check=True)

    def stuff(self) -> Path:
        """Fill up the file system with a file. Return it."""
        path = self.folder / "somebody's"
        with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    for shelf in disk.shelves:
        shelf.close()


def test_at_its_capacity_the_least_recently_used_entry_leaves(disk: Disk) -> None:
    shelf = disk.open(10 * FILE_BYTES)
    for number in range(20):
        assert shelf.put(number) == [True]
        assert shelf.get(0) == [True]
    here = shelf.has(*range(20))
    assert here[0], "it was read all the time"
    assert here[-1]
    assert 8 <= sum(here) <= 10
    assert disk.stored_bytes() == shelf.tier.usage().used_bytes


def test_of_a_prefix_that_engines_find_in_the_pool_the_first_entries_stay_longest(disk: Disk) -> None:
    shelf = disk.open(10 * FILE_BYTES)
    num_here = list[int]()
    for number in range(20):
        assert shelf.put(number) == [True]
        if number == 7:
            assert shelf.tier.touch([make_key(n) for n in range(4)], [EXTENT_BYTES] * 4) == [True] * 4
        here = shelf.has(*range(4))
        assert here == sorted(here, reverse=True)
        num_here.append(sum(here))
    assert num_here[:12] == [1, 2, 3, *[4] * 9], "older entries than those that were used leave"
    assert num_here[-1] == 0


def test_a_file_that_cannot_be_removed_stays_and_others_leave(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the tier kept trying to remove one bad file, the least recently used, and wrote nothing more."""
    shelf = disk.open(10 * FILE_BYTES)
    real, bad = os.unlink, {files.name_of(make_key(number)) for number in range(2)}

    def unlink(path: str, **options: Any) -> None:
        if path in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    for number in range(30):
        assert shelf.put(number) == [True]
    assert shelf.has(0, 1) == shelf.get(0, 1) == [True, True]
    usage = shelf.tier.usage()
    assert 8 <= usage.num_entries <= 10
    assert usage.counters["not_evicted"] > 0


def test_a_folder_in_which_nothing_can_be_removed_is_told(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = disk.open(4 * FILE_BYTES)
    assert shelf.put(0, 1, 2, 3) == [True] * 4
    calls = list[str]()

    def unlink(path: str, **_options: Any) -> None:
        calls.append(path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        shelf.put(4)
    assert len(calls) < 40, "not for ever"
    assert shelf.tier.usage().num_entries == 4


def test_an_entry_that_cannot_be_written_costs_no_other_of_its_call(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an error of one entry failed all entries of a call, also those that had been written."""
    shelf = disk.open(10 * FILE_BYTES)
    keep, bad = Folder.keep, {make_key(2)}

    def keep_others(folder: Folder, temporary: str, key: bytes) -> None:
        if key in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        keep(folder, temporary, key)

    monkeypatch.setattr(Folder, "keep", keep_others)
    assert shelf.put(0, 1, 2, 3) == [True, True, False, True]
    assert shelf.has(0, 1, 2, 3) == shelf.get(0, 1, 2, 3) == [True, True, False, True]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        shelf.put(2)


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


def begin(*actions: Callable[[], object]) -> list[threading.Thread]:
    """Run each action on a thread of its own."""
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    return threads


def test_entries_that_are_written_at_the_same_time_stay_within_the_capacity(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each writer counted the existing files, but not those that other writers were about to add."""
    shelf = disk.open(4 * FILE_BYTES)
    shelf.put(0, 1, 2, 3)
    drive, results = SlowDrive(monkeypatch), dict[int, list[bool]]()
    writers = begin(*(lambda n=n: results.update({n: shelf.put(n)}) for n in range(4, 9)))
    wait_until(lambda: len(results) + drive.num_begun == 5)
    drive.go_on.set()
    for writer in writers:
        writer.join()
    assert disk.stored_bytes() == shelf.tier.usage().used_bytes <= 4 * FILE_BYTES
    assert results == {n: shelf.has(n) for n in range(4, 9)}
    assert any(map(any, results.values()))


def test_of_three_writes_one_gets_ready_while_two_move_bytes(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLOT_SECONDS", 30.0)
    shelf, drive = disk.open(), SlowDrive(monkeypatch)
    begin(*(lambda n=n: shelf.put(n) for n in range(3)))
    wait_until(lambda: [path.suffix for path in disk.files()] == [".tmp"] * 3, what="three files")
    wait_until(lambda: drive.num_begun == 2, what="two writes")
    assert not threading.Event().wait(0.05)
    assert drive.num_begun == 2
    drive.go_on.set()
    wait_until(lambda: shelf.tier.usage().num_entries == 3)


def test_writes_do_not_wait_for_ever_for_those_that_hang(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, drive = disk.open(), SlowDrive(monkeypatch)
    begin(lambda: shelf.put(0), lambda: shelf.put(1))
    wait_until(lambda: drive.num_begun == 2, what="two writes")
    monkeypatch.undo()
    assert shelf.put(2) == [True]
    monkeypatch.setattr(files, "SLOT_SECONDS", 30.0)
    assert shelf.put(3) == [True], "their slots are taken over"
    drive.go_on.set()
    wait_until(lambda: shelf.tier.usage().num_entries == 4)


def test_an_entry_larger_than_the_tier_is_not_written(disk: Disk) -> None:
    assert disk.open(EXTENT_BYTES).put(0) == [False]


def test_a_smaller_capacity_is_kept_after_a_restart(disk: Disk) -> None:
    with disk.open() as shelf:
        shelf.put(*range(20))
    shelf = disk.open(10 * FILE_BYTES)
    wait_until(lambda: shelf.tier.usage().used_bytes <= 10 * FILE_BYTES)


KEPT_NAME = (
    "86d97ba414bf826f/7fcccec0361f0442/00/"
    "616f187d46f5724f328844808b151a410000000000000000000000000000000000000000000000000000000000000007"
)


def test_files_of_a_clock_that_ran_ahead_leave_first(disk: Disk) -> None:
    with disk.open(10 * FILE_BYTES) as shelf:
        shelf.put(0, 1, 2)
        for number in (0, 1, 2):
            ahead = time.time() + 365 * 86400 + (3 - number)
            os.utime(file_of(disk.folder, make_key(number)), (ahead, ahead))
        shelf.put(3, 4, 5)
    shelf = disk.open(10 * FILE_BYTES)
    for number in range(6, 10):
        shelf.put(number)
    assert [number for number in range(10) if disk.has_file(shelf, number)] == list(range(10))
    shelf.put(10)  # evicts two entries
    left = [number for number in range(11) if disk.has_file(shelf, number)]
    assert left == [0, *range(3, 11)], "the latest by that clock stays longest"


def test_the_format_of_files_is_kept(disk: Disk) -> None:
    """The first release wrote files with this name and these bytes."""
    path = disk.folder / KEPT_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(content(KEPT_KEY, 5000).ljust(8192, b"\0") + KEPT_TRAILER.ljust(4096, b"\0"))
    data, shelf = path.read_bytes(), disk.open()
    assert read_from(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    assert shelf.pool.view[:5000] == content(KEPT_KEY, 5000)
    shelf.clear()
    assert not path.exists()
    assert write_to(shelf.tier, shelf.pool, [KEPT_KEY], [(0, 5000)]) == [True]
    shelf.close()
    assert path.read_bytes() == data


WRITER = """
import sys
from pathlib import Path
from kvdepot.testing.tier_traffic import *
from kvdepot.tiers.disk.tier import DiskTier
from support.tiers.direct import write_to

pool = make_pool(1 << 20)
tier = DiskTier(pool, Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for number in range(1_000_000):
    key = make_key(number)
    pool.view[: 1 << 20] = content(key, 1 << 20)
    write_to(tier, pool, [key], [(0, 1 << 20)])
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_byte_leaves_whole_entries_or_none(disk: Disk) -> None:
    rng = random.Random(1)
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(disk.folder)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(rng.randint(3, 30)):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with disk.open(1 << 30, size=1 << 20) as shelf:
            assert not [path for path in disk.files() if path.suffix == ".tmp"]
            num_entries = shelf.tier.usage().num_entries
            assert num_entries > 3
            assert all(shelf.get(number) == [True] for number in range(num_entries))


@pytest.fixture
def small_disk(disk: Disk) -> Iterator[Disk]:
    """A file system of 256 KiB."""
    disk.folder /= "small"
    disk.folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(disk.folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk.folder)], check=True)


def test_a_full_file_system_makes_room_and_refuses_what_does_not_fit(small_disk: Disk) -> None:
    shelf = small_disk.open(1 << 30)
    assert sum(shelf.put(number)[0] for number in range(40)) > 30
    here = shelf.has(*range(40))
    assert any(here)
    assert shelf.get(*range(40)) == here


def test_a_file_system_filled_by_others_costs_only_writes(small_disk: Disk) -> None:
    shelf = small_disk.open(1 << 30)
    shelf.put(0)
    small_disk.stuff()
    assert [shelf.put(number) for number in range(1, 6)] == [[False]] * 5
    assert shelf.get(0) == [True]


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_a_file_system_that_turns_read_only_still_serves_and_is_written_when_it_can_be(
    small_disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = small_disk.open(5 * FILE_BYTES)
    shelf.put(*range(5))
    small_disk.remount("ro")
    for number in range(5, 12):
        assert shelf.put(number) == [False]
        assert shelf.get(*range(5)) == [True] * 5, "nothing leaves that stays"
    assert said(caplog, "declining writes, still serving stored entries: it cannot be written: Read-only") == 1
    assert shelf.tier.usage().counters["not_writable"] == 7
    shelf.tier.probe()
    small_disk.remount("rw")
    assert shelf.put(5) == [True]
    assert said(caplog, "accepting writes again") == 1


def test_a_probe_of_a_read_only_file_system_reads(small_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = small_disk.open()
    shelf.put(0)
    small_disk.remount("ro")
    shelf.tier.probe()

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error"):
        shelf.tier.probe()


def test_entries_cleared_on_a_read_only_file_system_are_not_served_and_are_removed_later(small_disk: Disk) -> None:
    shelf = small_disk.open()
    shelf.put(0)
    (path,) = small_disk.files()
    small_disk.remount("ro")
    for _ in range(2):
        with pytest.raises(OSError, match="not all files could be removed"):
            shelf.clear()
        assert (shelf.has(0), shelf.get(0)) == ([False], [False])
    small_disk.remount("rw")
    assert shelf.clear() == 1
    assert not path.exists()


@pytest.mark.parametrize("why", ["full", "read-only"])
def test_a_file_system_that_is_away_at_the_start_is_served_and_written_later(
    small_disk: Disk, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    with small_disk.open() as shelf:
        shelf.put(0)  # less than the missing space, as a larger tier would make room
    stuffing = small_disk.stuff() if why == "full" else small_disk.remount("ro")
    shelf = small_disk.open()
    assert [shelf.put(number) for number in range(1, 8)] == [[False]] * 7
    assert shelf.has(*range(8)) == [True] + [False] * 7
    assert shelf.get(0) == [True]
    assert said(caplog, "declining writes, still serving stored entries") == 1
    if stuffing:
        stuffing.unlink()
    else:
        small_disk.remount("rw")
    assert shelf.put(*range(1, 8)) == [True] * 7
    assert shelf.get(*range(8)) == [True] * 8


@pytest.mark.parametrize("why", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_could_not_be_made_at_the_start_is_made_later(
    small_disk: Disk, monkeypatch: pytest.MonkeyPatch, why: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(why, os.strerror(why))

    small_disk.folder /= "tier"
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        shelf = Shelf(lambda pool: DiskTier(pool, small_disk.folder, 1 << 20))
        for _ in range(4):
            assert (shelf.put(0), shelf.get(0), shelf.clear()) == ([False], [False], 0)
    assert (shelf.put(0), shelf.get(0)) == ([True], [True])
    with pytest.raises(ConfigError, match="another depot uses this folder"):
        small_disk.open()
    shelf.close()
    small_disk.folder = small_disk.folder.parent


class FileSystem:
    """A file system of 1,000 GB with some free space, which the tier's writes take and its removals return."""

    def __init__(self, tier: DiskTier, num_free: int, comes_back: bool = True) -> None:
        self.tier, self.num_free, self.comes_back = tier, num_free, comes_back
        self.used_before = tier.usage().used_bytes

    def stat(self, _: int) -> SimpleNamespace:
        taken = self.tier.usage().used_bytes - self.used_before if self.comes_back else 0
        return SimpleNamespace(f_bavail=self.num_free - taken, f_blocks=10**12, f_frsize=1)


@pytest.fixture
def shelf_of_100(disk: Disk) -> Shelf[DiskTier]:
    shelf = disk.open(1 << 30)
    for number in range(100):
        shelf.put(number)
    return shelf


def test_other_files_on_the_file_system_do_not_empty_the_tier(
    shelf_of_100: Shelf[DiskTier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """15 of 1,000 GB are free, 20 GB should be, and the tier has less than the difference."""
    shelf, system = shelf_of_100, FileSystem(shelf_of_100.tier, 15 * 10**9)
    monkeypatch.setattr(os, "fstatvfs", system.stat)
    assert not any(shelf.put(number)[0] for number in range(100, 140))
    assert shelf.has(*range(100)) == [True] * 100
    assert said(caplog, "other files fill its file system: 4.7 GiB are missing to the 2% that stay free") == 1
    system.num_free *= 2
    assert all(shelf.put(number)[0] for number in range(100, 140))
    assert said(caplog, "accepting writes again") == 1


def test_on_a_tight_file_system_only_as_much_leaves_as_is_missing(
    shelf_of_100: Shelf[DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf, system = shelf_of_100, FileSystem(shelf_of_100.tier, 20 * 10**9 - 5 * FILE_BYTES)
    monkeypatch.setattr(os, "fstatvfs", system.stat)
    for number in range(1, 41):
        assert shelf.put(99 + number) == [True]
        assert shelf.tier.usage().num_entries == 95
        assert shelf.has(4 + number, 5 + number) == [False, True]


def test_a_file_system_that_gives_space_back_late_does_not_empty_the_tier(
    shelf_of_100: Shelf[DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of_100
    system = FileSystem(shelf.tier, 20 * 10**9 - 5 * FILE_BYTES, comes_back=False)
    monkeypatch.setattr(os, "fstatvfs", system.stat)
    assert not any(shelf.put(number)[0] for number in range(100, 140))
    assert shelf.tier.usage().num_entries == 94, "five that were missing, and one for the write"


def test_a_quota_of_others_does_not_empty_the_tier(
    shelf_of_100: Shelf[DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of_100

    def refuse(*_: Any) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refuse)
        assert not any(shelf.put(number)[0] for number in range(100, 140))
    assert shelf.tier.usage().num_entries == 98
    assert shelf.put(100) == [True]


def test_without_direct_it_is_said_once(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_direct(monkeypatch)
    shelf = disk.open()
    for _ in range(2):
        assert shelf.put(*range(8)) == shelf.get(*range(8)) == [True] * 8
        shelf.tier.probe()
        shelf.clear()
    assert said(caplog, "has no O_DIRECT: entries go through the page cache, which is slower") == 1


def test_without_direct_it_is_said_once_also_by_writers_that_find_it_together(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    shelf = disk.open()
    monkeypatch.setattr(Folder, "probe_write", no_direct)
    for writer in begin(lambda: shelf.put(0), lambda: shelf.put(1)):
        writer.join()
    assert shelf.tier.usage().num_entries == 2
    assert said(caplog, "has no O_DIRECT") == 1


def test_two_depots_do_not_share_a_folder(disk: Disk) -> None:
    with disk.open(), pytest.raises(ConfigError, match="another depot uses this folder"):
        disk.open()
    disk.open()


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
        ("disk:///tmp/x?capcity=1GiB", "unknown option 'capcity'; choose from capacity, "),
    ],
)
def test_a_folder_that_cannot_be_says_why(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_tier(TierUrl.parse(url), make_pool())


@pytest.mark.parametrize(("capacity", "is_warned"), [("900TiB", True), ("1GiB", False)])
def test_a_capacity_beyond_the_drive_is_warned_of(
    capacity: str, is_warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_tier(TierUrl.parse(f"disk://{tmp_path}/tier?capacity={capacity}"), make_pool()).close()
    assert ("its capacity of 900.0 TiB is more than its whole drive" in caplog.text) == is_warned


@as_root
@pytest.mark.promise(87)
def test_an_entry_that_another_user_left_is_a_miss_and_removed(disk: Disk) -> None:
    """He made it while the folder was open to all; its checksum fits, as he can compute it."""
    with disk.open() as shelf:
        shelf.put(0, 1, 2)
        his, writable = (file_of(disk.folder, make_key(number)) for number in (0, 1))
    os.chown(his, STRANGER, STRANGER)
    writable.chmod(0o666)
    with disk.open() as shelf:
        assert [shelf.get(number) for number in (0, 1, 2)] == [[False], [False], [True]]
    assert not his.exists()
    assert not writable.exists()


def test_foreign_files_are_left_alone(disk: Disk) -> None:
    with disk.open() as shelf:
        shelf.put(0)
    (entry,) = disk.files()
    above, elsewhere = disk.folder, disk.folder / "a" / "b" / "c"
    elsewhere.mkdir(parents=True)
    foreign = [
        *(above / name for name in ("note", "probe.tmp", "direct.tmp", "lock")),
        *(elsewhere / name for name in ("note", "letter.tmp", f"{entry.name}.0a1b2c3d-0.tmp")),
        *(entry.with_name(f"{entry.name}{end}.tmp") for end in ("", ".letter-0", ".0a1b2c3d-x")),
        *(entry.with_name(f"{name}.tmp") for name in ("letter", f"{entry.name[:-2]}.0a1b2c3d-0")),
    ]
    for path in foreign:
        path.write_text("not ours")
    ours = entry.with_name(f"{entry.name}.0a1b2c3d-7.tmp")
    ours.write_text("half of an entry")
    with disk.open() as shelf:
        shelf.tier.probe()
        assert shelf.tier.usage().num_entries == 1
    assert all(path.read_text() == "not ours" for path in foreign)
    assert not ours.exists()


def beside(action: Callable[[], object], seconds: float = 30.0) -> threading.Thread:
    """Run `action` on another thread and wait for it."""
    (thread,) = begin(action)
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
    disk: Disk, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    shelf, real = disk.open(10 * FILE_BYTES), Folder.read
    shelf.put(0)

    def read_and_leave(*arguments: Any) -> tuple[int, memoryview]:
        result = real(*arguments)
        beside(shelf.clear if how == "cleared" else lambda: shelf.put(*range(1, 20)))
        return result

    monkeypatch.setattr(Folder, "read", read_and_leave)
    assert shelf.get(0) == [True]
    assert not disk.has_file(shelf, 0)
    assert shelf.tier.usage().used_bytes == disk.stored_bytes()
    assert shelf.put(0) == [True]
    assert disk.has_file(shelf, 0)


def test_an_entry_written_while_it_leaves_is_there_or_not(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, real, writers = disk.open(), os.unlink, list[threading.Thread]()
    shelf.put(0)

    def unlink(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "unlink", real)
        writers.append(beside(lambda: shelf.put(0), 0.2))
        real(*arguments, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    assert shelf.clear() == 1
    writers[0].join()
    disk.has_file(shelf, 0)


def test_an_entry_that_leaves_while_the_folder_is_listed_does_not_come_back(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk.open() as shelf:
        shelf.put(0, 1)
    file_of(disk.folder, make_key(0)).write_bytes(bytes(FILE_BYTES))
    is_found, go_on, real = threading.Event(), threading.Event(), listing.found_files

    def found_slowly(folder: Folder, is_over: Callable[[], bool]) -> Iterator[listing.File]:
        yield from real(folder, is_over)
        is_found.set()
        go_on.wait(30.0)

    monkeypatch.setattr(listing, "found_files", found_slowly)
    with Shelf(lambda pool: DiskTier(pool, disk.folder, 1 << 20)) as shelf:
        is_found.wait(30.0)
        assert shelf.get(0, 1) == [False, True]
        go_on.set()
        wait_until(lambda: shelf.tier.is_listed)
        assert (disk.has_file(shelf, 0), disk.has_file(shelf, 1)) == (False, True)


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


class Unseen:
    """A file whose attributes cannot be read."""

    def __init__(self, file: os.DirEntry[str]) -> None:
        self.name = file.name

    def stat(self, **_: Any) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("what", ["a folder", "a file"])
def test_what_cannot_be_listed_costs_only_itself(what: str, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the index was empty then, and the folder's files did not count against the capacity."""
    keys = [make_key(number, f"tenant {number}") for number in range(3)]
    with disk.open() as shelf:
        write_to(shelf.tier, shelf.pool, keys, extents_of(0, [EXTENT_BYTES] * 3))
    broken, scan, items = file_of(disk.folder, keys[1]), os.scandir, listing.items_in

    def scan_others(path: Any) -> Any:
        if Path(path) == broken.parent:
            raise OSError(errno.EIO, "Input/output error")
        return scan(path)

    def see_others(folder: Folder, name: str) -> list[Any]:
        return [Unseen(file) if file.name == broken.name else file for file in items(folder, name)]

    with monkeypatch.context() as patch:
        if what == "a folder":
            patch.setattr(os, "scandir", scan_others)
        else:
            patch.setattr(listing, "items_in", see_others)
        shelf = disk.open()
    assert shelf.tier.contains(keys) == [True, False, True]
    assert shelf.tier.usage().used_bytes == 2 * FILE_BYTES
