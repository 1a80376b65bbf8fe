"""The pool's files, and the names that records refer to."""

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvdepot.errors import DepotBusy, PoolError
from kvdepot.layout import GroupKind
from kvdepot.pool import files
from kvdepot.pool.files import (
    PoolFiles,
    PoolMemory,
    allocate_first,
    allocate_in_background,
    is_locked,
    open_pool,
    open_with_lock,
)
from kvdepot.pool.inventory import find_pools, look_at, remove_pool
from kvdepot.pool.names import Label, Names, NamesFile
from kvdepot.wire import messages as m

NUMBER = (1 << 61) + 5


def test_a_lock_lasts_as_long_as_a_descriptor_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "pool", os.O_RDWR)
    opened = open_with_lock(fd, NUMBER)
    assert is_locked(fd, NUMBER)
    assert not is_locked(fd, NUMBER + 1)
    with pytest.raises(OSError, match="unavailable"):
        open_with_lock(fd, NUMBER)
    mapping = mmap.mmap(opened, 4096)
    os.close(opened)
    assert is_locked(fd, NUMBER), "the mapping is left"
    mapping.close()
    assert not is_locked(fd, NUMBER)
    os.close(fd)


class TestTurns:
    """Each mapping stands for a process."""

    @pytest.fixture
    def pools(self) -> Iterator[tuple[PoolMemory, PoolMemory]]:
        fd = os.memfd_create("pool")
        os.truncate(fd, 4096)
        yield PoolMemory(fd, 4096), PoolMemory(fd, 4096)
        os.close(fd)

    def test_one_process_has_a_turn_at_a_time(self, pools: tuple[PoolMemory, PoolMemory]) -> None:
        first, second = pools
        stop, has_turn, ended = threading.Event(), threading.Event(), list[str]()

        def take_turn() -> None:
            with second.turn(stop):
                ended.append("second")
            has_turn.set()

        with first.turn(stop):
            thread = threading.Thread(target=take_turn)
            thread.start()
            assert not has_turn.wait(0.05)
            ended.append("first")
        assert has_turn.wait(10)
        thread.join()
        assert ended == ["first", "second"]

    def test_a_wait_for_a_turn_ends_when_it_is_told_to(self, pools: tuple[PoolMemory, PoolMemory]) -> None:
        first, second = pools
        stop = threading.Event()
        stop.set()
        with first.turn(threading.Event()), second.turn(stop):
            pass
        with second.turn(threading.Event()):
            pass

    def test_nobody_waits_long_for_a_process_that_hangs(
        self, pools: tuple[PoolMemory, PoolMemory], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(files, "TURN_SECONDS", 0.01)
        first, second = pools
        with first.turn(threading.Event()), second.turn(threading.Event()):
            pass

    def test_workers_of_another_user_do_not_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fd = os.memfd_create("pool")
        os.truncate(fd, 4096)
        mine = PoolMemory(fd, 4096)
        monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError))
        foreign = PoolMemory(fd, 4096)
        monkeypatch.undo()
        with foreign.turn(threading.Event()), foreign.turn(threading.Event()):
            pass
        with mine.turn(threading.Event()):
            pass
        os.close(fd)


SPECS = [m.CacheSpec(16 * number, (m.GroupShape(GroupKind.FULL_ATTENTION, 16),), "bf16") for number in (1, 2, 3)]


def names_in(path: Path) -> Names:
    file = NamesFile.open(path)
    file.close()
    return file.found


@pytest.mark.promise(23)
def test_names_are_found_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    file = NamesFile.create(tmp_path / "names")
    file.add(Names(SPECS[:2], [Label("a", "m"), Label("b", "m")]))
    file.add(Names(labels=[Label("b", "n")]))
    file.close()
    file = NamesFile.open(tmp_path / "names")
    assert file.found == Names(SPECS[:2], [Label("a", "m"), Label("b", "m"), Label("b", "n")])
    file.add(Names(SPECS[2:]))
    file.close()
    assert names_in(tmp_path / "names") == Names(SPECS, [Label("a", "m"), Label("b", "m"), Label("b", "n")])


@pytest.mark.promise(61)
def test_a_name_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    file = NamesFile.create(tmp_path / "names")
    file.add(Names(SPECS, [Label(f"tenant {number}", "m") for number in range(65_000)]))
    before = (tmp_path / "names").stat()
    file.add(Names(labels=[Label("one more", "m")]))
    after = (tmp_path / "names").stat()
    assert after.st_ino == before.st_ino
    assert before.st_size < after.st_size < before.st_size + 64
    file.close()


@pytest.mark.promise(23)
@pytest.mark.parametrize("kept", range(12, 28))
def test_a_frame_that_ends_early_does_not_count_and_the_next_one_takes_its_place(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "names"
    file = NamesFile.create(path)
    file.add(Names(labels=[Label("a", "m")]))
    file.close()
    assert path.stat().st_size == 12 + 8 + 9
    os.truncate(path, kept)
    file = NamesFile.open(path)
    assert file.found == Names()
    assert path.stat().st_size == len(NamesFile.MAGIC), "the rest of it would follow a shorter name"
    file.add(Names(labels=[Label("b", "m")]))
    file.close()
    assert names_in(path) == Names(labels=[Label("b", "m")])


def test_names_before_a_damaged_frame_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "names"
    file, sizes = NamesFile.create(path), list[int]()
    for tenant in "abc":
        file.add(Names(labels=[Label(tenant, "m")]))
        sizes.append(file.size_bytes)
    file.close()
    data = bytearray(path.read_bytes())
    data[sizes[1] - 1] ^= 1
    path.write_bytes(data)
    assert names_in(path) == Names(labels=[Label("a", "m")])
    assert path.stat().st_size == sizes[0]
    assert caplog.messages == [f"names: cutting off {sizes[2] - sizes[0]} damaged bytes"]


def test_a_file_of_frames_without_room_for_its_magic_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_five(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[:5], offset)

    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", write_five)
    with pytest.raises(OSError, match="no room for names"):
        NamesFile.create(tmp_path / "names")


@pytest.mark.promise(23)
def test_a_name_that_finds_no_room_is_not_there_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "names"
    file = NamesFile.create(path)
    file.add(Names(labels=[Label("a", "m")]))
    write = os.pwrite

    def write_forty(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[:40], offset)  # more than the next name needs

    monkeypatch.setattr(os, "pwrite", write_forty)
    with pytest.raises(OSError, match="40 of"):
        file.add(Names(SPECS, [Label("much longer than the next one", "m")]))
    monkeypatch.undo()
    file.add(Names(labels=[Label("b", "m")]))
    file.close()
    assert names_in(path) == Names(labels=[Label("a", "m"), Label("b", "m")])


SIZE = 1 << 20


def open_here(folder: Path, *, fresh: bool = False) -> PoolFiles:
    files = open_pool(folder, SIZE, 64, server="the depot of --dir /one", fresh=fresh)
    files.take_place()
    os.posix_fallocate(files.pool_fd, 0, SIZE)
    return files


def test_a_server_goes_on_where_an_earlier_one_stopped_allocating(tmp_path: Path) -> None:
    """Otherwise, on a tmpfs that is full by then, a worker would die of SIGBUS instead of the allocation ending."""
    size = 256 << 20
    with (tmp_path / "pool").open("xb+") as file:
        file.truncate(size)
        assert allocate_first(file.fileno(), size) == 64 << 20
        os.posix_fallocate(file.fileno(), 64 << 20, 48 << 20)
        ready = [allocate_first(file.fileno(), size)]
        assert ready == [112 << 20]
        thread = allocate_in_background(file.fileno(), ready[0], size, ready.append, Mock(), lambda: True)
        thread.join()
        assert ready == list(range(112 << 20, size + 1, 16 << 20))
        assert allocate_first(file.fileno(), size) == size


def test_a_pool_stops_growing_at_the_first_step_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it grew past a hole without memory, a worker would die of SIGBUS there."""
    fallocate, full = os.posix_fallocate, OSError(28, "No space left on device")

    def fail_at_one_step(fd: int, start: int, length: int) -> None:
        if start == 32 << 20:
            raise full
        fallocate(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", fail_at_one_step)
    ready, failed = list[int](), list[OSError]()
    with (tmp_path / "pool").open("xb+") as file:
        file.truncate(64 << 20)
        allocate_in_background(file.fileno(), 0, 64 << 20, ready.append, failed.append, lambda: True).join()
    assert (ready, failed) == ([16 << 20, 32 << 20], [full])


@pytest.mark.promise(66)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_pool_that_has_a_server_is_opened_by_no_other(tmp_path: Path, fresh: bool) -> None:
    files = open_here(tmp_path)
    before = (tmp_path / "pool").stat()
    with pytest.raises(DepotBusy, match=r"the depot of --dir /one.*--pool-dir"):
        open_here(tmp_path, fresh=fresh)
    assert os.path.samestat(before, (tmp_path / "pool").stat())
    spare = os.dup(files.pool_fd)  # like a worker's descriptor
    files.close(remove=False)
    again = open_here(tmp_path)
    assert not again.is_new
    again.close(remove=True)
    os.close(spare)
    assert not tmp_path.exists()


@pytest.mark.promise(66)
def test_a_server_that_starts_while_another_makes_the_pool_leaves_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, others = os.link, list[PoolFiles]()

    def be_late(source: str, target: str, **folders: Any) -> None:
        if not others:
            monkeypatch.setattr(os, "link", link)
            others.append(open_here(tmp_path))
        link(source, target, **folders)

    monkeypatch.setattr(os, "link", be_late)
    with pytest.raises(DepotBusy):
        open_here(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "names", "pool"]
    assert os.path.samestat(os.fstat(others[0].pool_fd), (tmp_path / "pool").stat())
    others[0].close(remove=True)


@pytest.mark.promise(67)
@pytest.mark.parametrize("name", ["index", "pool"])
def test_files_that_were_copied_at_different_times_are_not_believed_together(tmp_path: Path, name: str) -> None:
    files = open_here(tmp_path)
    copy = (tmp_path / name).read_bytes()
    files.advance()
    files.advance()
    files.close(remove=False)
    with (tmp_path / name).open("r+b") as file:
        file.write(copy)
    again = open_here(tmp_path)
    assert again.is_new
    again.close(remove=True)


@pytest.mark.promise(67)
def test_a_server_that_was_killed_between_the_generations_of_its_files_leaves_them_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_here(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Mock())
        files.advance()
    files.close(remove=False)
    again = open_here(tmp_path)
    assert not again.is_new
    again.close(remove=True)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_file(path: Path) -> None:
    path.write_text("mine")


def make_link(path: Path) -> None:
    path.symlink_to("elsewhere")


@pytest.mark.promise(68)
@pytest.mark.parametrize("name", ["pool", "index", "names", "sessions", "tokens"])
@pytest.mark.parametrize(
    "make", [Path.mkdir, make_fifo, make_file, make_link], ids=["a folder", "a FIFO", "a file", "a link"]
)
def test_files_that_are_not_a_depot_s_stay_as_they_are(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    make(tmp_path / name)
    before = (tmp_path / name).lstat()
    for fresh in (False, True):
        with pytest.raises(PoolError, match="--pool-dir"):
            open_here(tmp_path, fresh=fresh)
    assert os.path.samestat(before, (tmp_path / name).lstat())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_pools_are_found_with_who_has_them_and_removed_when_nobody_does(tmp_path: Path) -> None:
    served, left = open_here(tmp_path / "served"), open_here(tmp_path / "left")
    left.close(remove=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pool").write_text("not a depot's")

    found = {pool.directory.name: pool for pool in find_pools(tmp_path)}

    assert {name: pool.is_served for name, pool in found.items()} == {"served": True, "left": False}
    assert found["left"].server == "the depot of --dir /one"
    assert found["left"].allocated_bytes >= SIZE
    with pytest.raises(DepotBusy, match="/one"):
        remove_pool(tmp_path / "served")
    with pytest.raises(PoolError, match="no pool"):
        remove_pool(tmp_path / "other")
    (tmp_path / "left" / "notes").write_text("mine")
    assert remove_pool(tmp_path / "left") >= SIZE
    assert [path.name for path in (tmp_path / "left").iterdir()] == ["notes"]
    assert (tmp_path / "other" / "pool").exists()
    served.close(remove=True)


def test_looking_at_a_pool_does_not_keep_a_depot_from_starting(tmp_path: Path) -> None:
    open_here(tmp_path / "p").close(remove=False)
    look_at(tmp_path / "p")
    assert not open_here(tmp_path / "p").is_new
