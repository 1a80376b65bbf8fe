"""The file of sessions maps a tenant's session to its last prefix, bounded, also after restarts and torn writes."""

import mmap
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import PoolError
from kvdepot.features.sessions import prefixes
from kvdepot.features.sessions.prefixes import MAXIMUM_CHUNKS, PrefixFile
from kvdepot.keys import DIGEST_BYTES, slice_digests


def digests(num_chunks: int, name: int = 0) -> bytes:
    return b"".join((name << 32 | chunk).to_bytes(DIGEST_BYTES, "little") for chunk in range(num_chunks))


def reopened(path: Path) -> PrefixFile:
    file = PrefixFile.open(path)
    for _ in file.restore():
        pass
    file.check_integrity()
    return file


@pytest.mark.parametrize("num_chunks", [1, 31, 32, 62, 1000])
def test_a_session_leads_to_its_last_prefix_and_no_other_does(num_chunks: int) -> None:
    file = PrefixFile.in_memory()
    file.remember("a", "agent", digests(7, name=1))
    file.remember("a", "agent", digests(num_chunks))
    file.check_integrity()
    assert file.find("a", "agent") == digests(num_chunks)
    assert file.find("b", "agent") == file.find("a", "another") == file.find("aa", "gent") == b""
    file.forget("b", "agent")
    assert len(file) == 1
    file.forget("a", "agent")
    assert (file.find("a", "agent"), len(file), file.num_bytes) == (b"", 0, 0)
    file.check_integrity()


def test_a_prefix_may_become_shorter_or_turn_elsewhere() -> None:
    file = PrefixFile.in_memory()
    for run in (digests(100), digests(40), digests(90, name=3), b"", digests(5)):
        file.remember("a", "agent", run)
        file.check_integrity()
        assert file.find("a", "agent") == run


class CountingMemory(mmap.mmap):
    """Memory that counts the blocks written to it. A block that is freed gets only an empty header."""

    num_written = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.num_written += len(value) > 32
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    ("before", "after", "num_blocks_written"),
    [
        (digests(93), digests(93), 0),
        (digests(95), digests(95), 0),
        (digests(95), digests(70), 1),
        (digests(93), digests(93) + digests(4, name=1), 1),
        (digests(95), digests(124), 1),
        (digests(95), digests(125), 2),
        (digests(95), digests(62), 0),
        (digests(310), digests(248) + digests(70, name=1), 3),
        (digests(310), digests(310, name=1), 10),
        (digests(1) * 5, digests(1) * 40, 2),
    ],
)
def test_of_a_prefix_that_continues_the_last_one_only_the_new_end_is_written(
    before: bytes, after: bytes, num_blocks_written: int
) -> None:
    memory = CountingMemory(-1, 20 * 1024)
    file = PrefixFile(memory)
    file.remember("a", "agent", before)
    memory.num_written = 0
    file.remember("a", "agent", after)
    assert memory.num_written == num_blocks_written
    file.check_integrity()
    file = PrefixFile(memory)
    for _ in file.restore():
        pass
    assert file.find("a", "agent") == after


def test_of_a_very_long_prefix_the_beginning_is_remembered() -> None:
    file = PrefixFile.in_memory()
    run = digests(MAXIMUM_CHUNKS + 1)
    file.remember("a", "agent", run)
    assert file.find("a", "agent") == slice_digests(run, 0, MAXIMUM_CHUNKS)


def test_a_tenant_with_many_sessions_loses_its_own_the_one_used_longest_ago_first() -> None:
    file = PrefixFile.in_memory(num_blocks=20)
    file.remember("quiet", "agent", digests(93))
    for name in range(40):
        file.remember("busy", str(name), digests(31, name))
        file.find("busy", "0")
        file.check_integrity()
    assert file.find("quiet", "agent") == digests(93)
    known = [name for name in range(40) if file.find("busy", str(name))]
    assert known == [0, *range(24, 40)]


def test_a_prefix_that_finds_no_room_loses_its_end() -> None:
    file = PrefixFile.in_memory(num_blocks=3)
    file.remember("a", "agent", digests(1000))
    file.check_integrity()
    assert file.find("a", "agent") == digests(93)
    file.remember("b", "agent", digests(31))
    file.check_integrity()
    assert (file.find("a", "agent"), file.find("b", "agent")) == (b"", digests(31))


def test_more_tenants_than_may_be_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAXIMUM_TENANTS", 2)
    file = PrefixFile.in_memory()
    assert [file.remember(tenant, "agent", digests(1)) for tenant in "abc"] == [True, True, False]
    assert [file.has_room(tenant) for tenant in "abc"] == [True, True, False]
    assert [bool(file.find(tenant, "agent")) for tenant in "abc"] == [True, True, False]
    file.forget("a", "agent")
    assert file.remember("c", "agent", digests(1))
    assert file.find("c", "agent")


@pytest.mark.promise(23)
def test_sessions_are_found_by_the_next_server(tmp_path: Path) -> None:
    path, rng = tmp_path / "sessions", random.Random(1)
    file, expected = PrefixFile.create(path), dict[tuple[str, str], bytes]()
    for number in range(300):
        tenant, session = rng.choice("abc"), str(rng.randrange(40))
        run = digests(rng.randrange(1, 120), number)
        file.remember(tenant, session, run)
        expected[tenant, session] = run
        if number % 5 == 0:
            file.forget(tenant, session)
            del expected[tenant, session]
    file.check_integrity()  # without `close`, as after a kill of the server
    for _ in range(2):
        file = reopened(path)
        assert len(file) == len(expected)
        assert {name: file.find(*name) for name in expected} == expected
        file.remember("a", "later", digests(50))
        expected["a", "later"] = digests(50)
    file.close()
    assert path.stat().st_blocks * 512 < 2 << 20, "it takes memory for what is in it"


@given(st.lists(st.tuples(st.integers(0, 11 * 1024 - 1), st.integers(0, 255)), max_size=20), st.integers(1, 100))
def test_of_a_torn_or_damaged_file_each_session_has_a_true_beginning_or_nothing(
    damage: list[tuple[int, int]], num_chunks: int
) -> None:
    memory = mmap.mmap(-1, 12 * 1024)
    file = PrefixFile(memory)
    runs = {str(name): digests(num_chunks, name) for name in range(3)}
    for name, run in runs.items():
        file.remember("a", name, run)
    remembered = {name: file.find("a", name) for name in runs}
    for place, value in damage:
        memory[1024 + place] = value
    file = PrefixFile(memory)
    for _ in file.restore():
        pass
    file.check_integrity()
    for name, run in remembered.items():
        assert run.startswith(file.find("a", name))


def test_a_block_of_the_prefix_before_does_not_continue_the_new_one() -> None:
    """A crash while a prefix is being replaced by a different one."""
    memory = mmap.mmap(-1, 12 * 1024)
    file = PrefixFile(memory)
    file.remember("a", "agent", digests(93, name=1))
    second = bytes(memory[2 * 1024 : 3 * 1024])
    file.remember("a", "agent", digests(93, name=2))
    memory[2 * 1024 : 3 * 1024] = second
    file = PrefixFile(memory)
    for _ in file.restore():
        pass
    assert file.find("a", "agent") == digests(31, name=2)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"KVDEPOTX" * 200)
    with pytest.raises(PoolError, match="another release"):
        PrefixFile.open(tmp_path / "foreign")
    PrefixFile.create(tmp_path / "cut").close()
    os.truncate(tmp_path / "cut", 4096)
    with pytest.raises(PoolError, match="another release"):
        PrefixFile.open(tmp_path / "cut")


def test_a_full_disk_is_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PrefixFile.create(tmp_path / "sessions")

    def full(*_: object) -> None:
        raise OSError("no space left")

    file.remember("a", "0", digests(31))
    monkeypatch.setattr(os, "posix_fallocate", full)
    for name in range(1, 200):
        file.remember("a", str(name), digests(31, name))
    file.check_integrity()
    assert len(file) == 64
    assert file.find("a", "199") == digests(31, 199)
    file.close()


@pytest.mark.slow
@pytest.mark.promise(61)
def test_remembering_finding_and_forgetting_take_a_millisecond_among_100_000_sessions() -> None:
    file = PrefixFile.in_memory()
    for name in range(100_000):
        file.remember(f"tenant-{name % 7}", str(name), digests(1, name))
    run, times = digests(1500), list[float]()
    for name in range(30):
        began = time.perf_counter()
        file.remember("tenant-0", f"new {name}", run)
        assert file.find("tenant-0", f"new {name}") == run
        file.forget("tenant-0", f"new {name}")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.003, "three operations"
