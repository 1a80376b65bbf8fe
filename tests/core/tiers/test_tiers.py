"""The suite of tiers on a tier in memory, and the queue's own rules."""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from kvdepot.errors import ConfigError
from kvdepot.installing import install_line
from kvdepot.lab.processes import wait_until
from kvdepot.testing.faulty_tier import FaultyBench, FaultyTier, Wrong
from kvdepot.testing.tier import TierSuite
from kvdepot.testing.tier_traffic import (
    EXTENT_BYTES,
    contains,
    content,
    extents_of,
    make_pool,
    read,
    run,
)
from kvdepot.tiers import checked, trailer, url
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.breaker import ERRORS_TO_SUSPEND
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.trailer import checksum_of
from kvdepot.tiers.url import TierUrl, open_tier


class TestMemoryTier(TierSuite):
    survives_restart = False

    def open_tier(self, pool: TierPool) -> Tier:
        return MemoryTier(pool, 64 * EXTENT_BYTES)


class KeepingTier(MemoryTier):
    """Never removes an entry."""

    def remove(self, keys: Sequence[bytes]) -> None:
        raise OSError(errno.EROFS, "Read-only file system")


def test_a_broken_entry_that_cannot_be_removed_costs_no_other() -> None:
    pool = make_pool()
    bench = FaultyBench(KeepingTier(pool, 1 << 20), pool)
    assert bench.write(0, 3) == [True] * 3
    bench.tier.wrong = Wrong.KEY
    assert bench.read(0, 3) == [False, False, True]
    bench.tier.wrong = None
    assert bench.read(0, 3) == [True] * 3
    assert bench.queue.counters["errors"] == 0
    bench.close()


def test_each_payload_is_hashed_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with `--verify`, which uses the trailers' checksums."""
    bench, num_hashed = faulty_bench(), list[int]()
    expected = [checksum_of(content(key, 4096)) for key in bench.keys[:4]]

    def counting(payload: bytes | memoryview) -> bytes:
        num_hashed.append(len(payload))
        return checksum_of(payload)

    monkeypatch.setattr(trailer, "checksum_of", counting)
    monkeypatch.setattr(checked, "checksum_of", counting)
    assert run(bench.queue, Job(JobKind.WRITE, bench.keys[:4], extents_of(0, [4096] * 4), expected)) == [[True] * 4]
    assert num_hashed == [4096] * 4
    found = list[bytes]()
    job = Job(JobKind.READ, bench.keys[:4], extents_of(32, [4096] * 4))
    assert bench.queue.submit(job)
    while job.num_left:
        found += [checksum for part in bench.queue.poll() for checksum in part.checksums]
    assert found == expected
    assert num_hashed == [4096] * 8
    bench.close()


def faulty_bench(**options: int) -> FaultyBench:
    pool = make_pool()
    return FaultyBench(MemoryTier(pool, 64 * EXTENT_BYTES), pool, batch_entries=4, **options)


@pytest.fixture
def bench() -> Iterator[FaultyBench]:
    bench = faulty_bench()
    yield bench
    bench.close()


def test_calls_behind_a_hung_call_fail_when_the_breaker_opens(bench: FaultyBench) -> None:
    bench.tier.hang = True
    bench.submit(JobKind.READ, 0, 16)
    bench.wait_for_calls(4)
    behind = bench.submit(JobKind.WRITE, 0, 8)
    _, failed = bench.let_pass(1.1)
    assert failed == 8
    assert behind.num_left == 0
    assert bench.queue.queued_write_bytes == 0
    assert bench.queue.status().why_open == "a read exceeded its deadline (1 s)"


def test_probes_come_less_and_less_often_while_the_storage_is_away(bench: FaultyBench) -> None:
    bench.tier.error = OSError("away")
    for _ in range(ERRORS_TO_SUSPEND):
        read(bench.queue, bench.keys[:1], extents_of(0, [4096]))
    pauses: list[float] = []
    for _ in range(10):
        due = bench.queue.next_deadline()
        assert due is not None
        pauses.append(round(due - bench.clock.now, 3))
        bench.probe()
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.5
    assert pauses[-1] == 30.0


def test_writes_beyond_the_bound_are_refused_and_room_comes_back() -> None:
    bench = faulty_bench(write_bytes=4 * 4096)
    bench.tier.hang = True
    bench.submit(JobKind.WRITE, 0, 3)
    assert not bench.queue.submit(Job(JobKind.WRITE, bench.keys[:2], extents_of(0, [4096] * 2)))
    bench.tier.hang = False
    wait_until(lambda: bench.queue.poll() or not bench.queue.queued_write_bytes)
    bench.submit(JobKind.WRITE, 0, 4)
    bench.queue.close()


def test_writes_never_take_the_last_thread() -> None:
    bench = faulty_bench(num_threads=2)
    bench.tier.hang = True
    bench.submit(JobKind.WRITE, 0, 12)
    bench.wait_for_calls(1)
    bench.submit(JobKind.READ, 0, 4)
    bench.wait_for_calls(2)
    assert bench.queue.status().num_waiting_reads == 0
    bench.close()


def test_bytes_that_lack_their_checksum_are_not_written(bench: FaultyBench) -> None:
    job = Job(JobKind.WRITE, bench.keys[:2], extents_of(0, [4096] * 2), [bytes(15) + b"x", bytes(16)])
    assert bench.queue.submit(job)
    wait_until(lambda: bench.queue.poll() or not job.num_left)
    assert contains(bench.queue, bench.keys[:2]) == [False, True]


@pytest.mark.parametrize("checksum", [b"", bytes(16)], ids=["plain", "verified"])
def test_a_write_that_reports_too_little_is_no_error(bench: FaultyBench, checksum: bytes) -> None:
    """Regression: with checksums it was an error, and the third one opened the breaker."""
    bench.tier.short = True
    checksums = [checksum and checksum_of(content(key, 4096)) for key in bench.keys[:4]]
    job = Job(JobKind.WRITE, bench.keys[:4], extents_of(0, [4096] * 4), checksums)
    assert run(bench.queue, job) == [[True, True, True, False]]
    assert bench.queue.counters["errors"] == 0


@pytest.mark.slow
def test_closing_does_not_wait_for_a_storage_that_hangs(bench: FaultyBench) -> None:
    stuck = FaultyTier(bench.tier.inner)
    bench.tier.inner = stuck
    stuck.hang = True
    bench.submit(JobKind.WRITE, 0, 4)
    wait_until(lambda: stuck.num_calls == 1)
    bench.let_pass(1.1)
    bench.queue.close(drain_seconds=0.5)
    stuck.hang = False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("disk", "write a URL"),
        ("nonsense://x", "no tier 'nonsense'; there are az, disk"),
        ("memory://?capacity=much", "not a size"),
        ("memory://?colour=red", "unknown option 'colour'"),
        ("memory://?capacity", "bad query field"),
    ],
)
def test_a_url_that_cannot_work_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        open_tier(TierUrl.parse(text), make_pool())


def test_a_tier_of_a_package_that_is_not_installed_names_the_command_that_adds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, lambda _url, pool: MemoryTier(pool, 1))
    said = rf"^--tier mooncake://a:1 needs a package: {re.escape(install_line('mooncake'))}$"
    with pytest.raises(ConfigError, match=said):
        open_tier(TierUrl.parse("mooncake://a:1?segment=0"), make_pool())


def test_passwords_of_a_url_are_not_in_its_name() -> None:
    assert TierUrl.parse("valkey://me:secret@host:1/0?password=x").name == "valkey://host:1/0"


def install(monkeypatch: pytest.MonkeyPatch, opener: Callable[[TierUrl, TierPool], Tier]) -> None:
    """Install a tier `mine`."""

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        assert group == url.ENTRY_POINT_GROUP
        return [SimpleNamespace(name="mine", load=lambda: opener)]

    monkeypatch.setattr(url, "entry_points", entry_points)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["read"], r"does not define read\(\)"),
        (["probe", "writer_pid"], r"does not define probe\(\), writer_pid"),
        (["touch", "outdate"], r"does not define touch\(\), outdate\(\)"),
        (["keeps_runs", "wants_places"], r"does not define keeps_runs, wants_places"),
    ],
    ids=["a call", "a call and an attribute", "calls that Tier has", "flags that Tier has"],
)
def test_a_tier_that_lacks_something_is_refused_when_it_is_opened(
    missing: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the tier was opened, and then every store of an engine was refused."""
    incomplete: type[MemoryTier] = type("Incomplete", (MemoryTier,), dict.fromkeys(missing))
    install(monkeypatch, lambda _url, pool: incomplete(pool, 1 << 20))
    with pytest.raises(
        ConfigError, match=rf"--tier mine://: the class Incomplete {said}, as a kvdepot\.tiers\.Tier must"
    ):
        open_tier(TierUrl.parse("mine://"), make_pool())


def test_a_call_that_a_tier_only_inherits_is_missing_and_the_tier_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the protocol's empty method counted as the tier's own."""
    closed: list[Tier] = []

    def close(tier: Tier) -> None:
        closed.append(tier)

    forgetful: type[Tier] = type("Forgetful", (Tier,), {"close": close})
    install(monkeypatch, lambda _url, _pool: forgetful())
    said = r"Forgetful does not define contains\(\), write\(\), read\(\), remove\(\), clear\(\), probe\(\), usage\(\)"
    with pytest.raises(ConfigError, match=said):
        open_tier(TierUrl.parse("mine://"), make_pool())
    assert len(closed) == 1


def test_eight_calls_a_touch_and_an_outdate_make_a_tier() -> None:
    own = {name for name in vars(MemoryTier) if not name.startswith("_")}
    assert own == {"contains", "write", "read", "remove", "clear", "probe", "usage", "close", "touch", "outdate"}
    assert (MemoryTier(make_pool(), 1).batch_entries, MemoryTier(make_pool(), 1).writer_pid) == (16, 0)
