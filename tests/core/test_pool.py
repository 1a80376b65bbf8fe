"""The pool's files, and the names that records refer to."""

import mmap
import os
from pathlib import Path

import pytest

from kvdepot import messages as m
from kvdepot.layout import GroupKind
from kvdepot.names import Names, NamesFile, decode_names
from kvdepot.pool import is_locked, open_with_lock

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


SPECS = [m.CacheSpec(16 * number, (m.GroupShape(GroupKind.FULL_ATTENTION, 16),), "bf16") for number in (1, 2, 3)]


@pytest.mark.promise(23)
def test_names_are_found_in_the_order_in_which_they_were_added(tmp_path: Path) -> None:
    file = NamesFile.create(tmp_path / "names")
    file.add(Names(SPECS[:2], [("a", "m"), ("b", "m")]))
    file.add(Names(labels=[("b", "n")]))
    file.close()
    file = NamesFile.open(tmp_path / "names")
    assert file.found == Names(SPECS[:2], [("a", "m"), ("b", "m"), ("b", "n")])
    file.add(Names(SPECS[2:]))
    assert (file.num_spaces, file.num_labels) == (3, 3)
    file.close()
    assert decode_names((tmp_path / "names").read_bytes())[0] == Names(SPECS, [("a", "m"), ("b", "m"), ("b", "n")])


@pytest.mark.promise(61)
def test_a_name_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    file = NamesFile.create(tmp_path / "names")
    file.add(Names(SPECS, [(f"tenant {number}", "m") for number in range(65_000)]))
    before = (tmp_path / "names").stat()
    file.add(Names(labels=[("one more", "m")]))
    after = (tmp_path / "names").stat()
    assert after.st_ino == before.st_ino
    assert before.st_size < after.st_size < before.st_size + 64
    file.close()


@pytest.mark.promise(23)
@pytest.mark.parametrize("kept", range(12, 28))
def test_a_frame_that_ends_early_is_none_and_what_comes_next_takes_its_place(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "names"
    file = NamesFile.create(path)
    file.add(Names(labels=[("a", "m")]))
    file.close()
    assert path.stat().st_size == 12 + 8 + 8
    os.truncate(path, kept)
    file = NamesFile.open(path)
    assert file.found == Names()
    file.add(Names(labels=[("b", "m")]))
    file.close()
    assert decode_names(path.read_bytes())[0] == Names(labels=[("b", "m")])


@pytest.mark.promise(23)
def test_a_name_that_finds_no_room_is_not_there_and_the_next_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "names"
    file = NamesFile.create(path)
    file.add(Names(labels=[("a", "m")]))
    write = os.pwrite

    def write_nine(fd: int, data: bytes, offset: int) -> int:
        return write(fd, data[:9], offset)

    monkeypatch.setattr(os, "pwrite", write_nine)
    with pytest.raises(OSError, match="9 of"):
        file.add(Names(SPECS, [("much longer than the next one", "m")]))
    monkeypatch.undo()
    assert (file.num_spaces, file.num_labels) == (0, 1)
    file.add(Names(labels=[("b", "m")]))
    file.close()
    assert decode_names(path.read_bytes())[0] == Names(labels=[("a", "m"), ("b", "m")])
