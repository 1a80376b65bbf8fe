"""Runs in an object store: prompts find all shared chunks of other prompts, with few requests."""

import contextlib
import itertools
import os
import random
import re
import select
import socket
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore

from kvdepot.errors import ConfigError
from kvdepot.features.sessions import operations as sessions
from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, digest_at, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import GroupKind
from kvdepot.operate.cleanup import collect
from kvdepot.operate.cli import main
from kvdepot.testing.tier_traffic import contains, content, make_pool, read
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.keys import (
    KEY_BYTES,
    chunks_a_run,
    chunks_a_section,
    digest_of,
    mark_of,
    name_hash,
    place_of,
    tier_key,
    with_run,
)
from kvdepot.tiers.names import by_run
from kvdepot.tiers.object import ObjectTier
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.runs import name_of
from kvdepot.tiers.url import TierUrl, open_tier
from kvdepot.wire import messages as m
from support.peer import Peer, find, registration
from support.tiers.direct import read_from, write_to
from support.tiers.servers import S3Server, is_written

if TYPE_CHECKING:
    from obstore import ObjectMeta

SIZE = 1000
_REQUESTS = re.compile(rb"(GET|PUT|HEAD|DELETE|POST) /bucket\S* HTTP/1")
PLACE = place_of(b"a spec", 0, 0, 7, SIZE)


def keys_of(
    tokens: Sequence[int], run_chunks: int = 8, weights: str = "", model: str = "b", spec: bytes = b"a spec"
) -> list[bytes]:
    """Return the keys, with runs and depths, of a prompt's chunks of one token."""
    place = place_of(spec, 0, 0, 7, SIZE, mark_of(weights))
    run = hash_prefix(Namespace("model"), 1, tokens)
    keys = [
        tier_key(name_hash("a"), name_hash(model), place, digest_at(run.digests, chunk))
        for chunk in range(run.num_chunks)
    ]

    def cut(chunk: int, num_chunks: int) -> bytes:
        return digest_at(run.digests, chunk - chunk % num_chunks)

    sections = -(-run_chunks // 4)
    return [with_run(key, cut(chunk, run_chunks), cut(chunk, sections), chunk) for chunk, key in enumerate(keys)]


class Node:
    """A tier over shared files, used as by a depot, which asks and then writes the missing chunks."""

    def __init__(self, folder: Path) -> None:
        self.pool: TierPool = make_pool(1 << 20)
        tier = open_tier(TierUrl.parse(f"file://{folder}"), self.pool)
        assert isinstance(tier, ObjectTier)
        self.tier = tier

    def write(self, keys: Sequence[bytes]) -> None:
        extents = [(number * 4096, SIZE) for number in range(len(keys))]
        for key, (offset, size) in zip(keys, extents, strict=True):
            self.pool.view[offset : offset + size] = content(key[:KEY_BYTES], size)
        assert write_to(self.tier, self.pool, keys, extents) == [True] * len(keys)

    def store(self, keys: Sequence[bytes]) -> None:
        there = self.tier.touch(keys, [SIZE] * len(keys))
        missing = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
        if missing:
            self.write(missing)

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many leading chunks are found. Check their bytes."""
        there = [*self.tier.contains(keys), False]
        found = there.index(False)
        extents = [(number * 4096, SIZE) for number in range(found)]
        self.pool.view[: found * 4096] = bytes(found * 4096)
        assert read_from(self.tier, self.pool, keys[:found], extents) == [True] * found
        for key, (offset, size) in zip(keys, extents, strict=False):
            assert self.pool.view[offset : offset + size] == content(key[:KEY_BYTES], size)
        return found

    def find_some(self, keys: Sequence[bytes]) -> None:
        """Read chunks that may leave at any time. Check the bytes of those that arrive."""
        extents = [(number * 4096, SIZE) for number in range(len(keys))]
        arrived = read_from(self.tier, self.pool, keys, extents)
        for key, (offset, size), is_here in zip(keys, extents, arrived, strict=True):
            assert not is_here or self.pool.view[offset : offset + size] == content(key[:KEY_BYTES], size)

    def names(self) -> list[str]:
        pages: Iterable[Sequence[ObjectMeta]] = obstore.list(self.tier.store)  # pyright: ignore[reportUnknownMemberType]
        return sorted(meta["path"] for page in pages for meta in page)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    nodes = [Node(tmp_path), Node(tmp_path)]
    yield nodes
    for node in nodes:
        node.tier.close()


def test_prompts_that_part_within_a_run_find_what_they_share(nodes: list[Node]) -> None:
    one, two = nodes
    one.store(keys_of(range(30)))
    assert len(one.names()) == 4
    other = keys_of([*range(21), *range(100, 107)])
    assert two.find(other) == 21
    two.store(other)
    assert len(one.names()) == 6, "what is left of the run, and the next one"
    third = keys_of([*range(21), *range(100, 103), *range(200, 210)])
    assert one.find(third) == 24
    one.store(third)
    assert [two.find(keys) for keys in (keys_of(range(30)), other, third)] == [30, 28, 34]


def test_a_prompt_that_grows_by_a_chunk_at_a_time_is_found(nodes: list[Node]) -> None:
    one, two = nodes
    for num_chunks in range(1, 20):
        one.store(keys_of(range(num_chunks)))
        assert two.find(keys_of(range(25))) == num_chunks


def test_chunks_beside_known_ones_of_their_run_are_looked_up_and_arrive(nodes: list[Node]) -> None:
    (one, two), keys = nodes, keys_of(range(8))
    one.store(keys[:3])
    assert two.find(keys[:3]) == 3
    one.store(keys)
    assert read_from(two.tier, two.pool, keys, [(number * 4096, SIZE) for number in range(8)]) == [True] * 8


def test_two_nodes_that_store_the_same_prompt_at_once_lose_nothing(nodes: list[Node]) -> None:
    keys = [keys_of([*range(20), *range(100 * node, 100 * node + 9)]) for node in range(2)]
    gate = threading.Barrier(2)

    def store(node: Node, keys: Sequence[bytes]) -> None:
        gate.wait()
        node.store(keys[:13])
        node.store(keys)

    threads = [threading.Thread(target=store, args=pair) for pair in zip(nodes, keys, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[node.find(each) for each in keys] for node in nodes] == [[29, 29]] * 2


@pytest.mark.parametrize("lost", range(8))
def test_a_removed_object_is_written_again_by_a_depot_that_has_its_chunks(lost: int, nodes: list[Node]) -> None:
    one, two = nodes
    prompts = [keys_of([*range(12), *range(100 * name, 100 * name + 8)]) for name in range(5)]
    for keys in prompts:
        one.store(keys)
    obstore.delete(one.tier.store, one.names()[lost])
    for keys in prompts:
        two.store(keys)
    assert [one.find(keys) for keys in prompts] == [20] * 5


@pytest.mark.parametrize("seed", range(20))
def test_random_prompts_are_found_as_far_as_anybody_wrote_them(seed: int, nodes: list[Node]) -> None:
    chance, written = random.Random(seed), set[bytes]()
    for _ in range(40):
        tokens = [chance.randrange(2) if chance.random() < 0.15 else 0 for _ in range(chance.randrange(1, 30))]
        keys = keys_of(tokens)
        expected = next((chunk for chunk, key in enumerate(keys) if key not in written), len(keys))
        node = chance.choice(nodes)
        assert node.find(keys) == expected
        if chance.random() < 0.7:
            node.store(keys)
            written.update(keys)


def test_a_corrupt_chunk_in_a_later_object_of_a_run_leaves_and_is_stored_again(nodes: list[Node]) -> None:
    one, two = nodes
    keys, store = keys_of(range(8)), one.tier.store
    one.store(keys[:3])
    one.store(keys)
    name = name_of(keys[3])
    data = bytearray(bytes(obstore.get(store, name).bytes()))
    data[-1] ^= 1
    obstore.put(store, name, bytes(data))
    with contextlib.closing(TierQueue(two.tier, two.pool, "shared files")) as queue:
        assert contains(queue, keys) == [True] * 8
        assert read(queue, keys, [(number * 4096, SIZE) for number in range(8)]) == [True] * 7 + [False]
        assert queue.counters["corrupt"] == 1
        assert contains(queue, keys) == [True] * 3 + [False] * 5
        one.store(keys)
        assert one.find(keys) == 8


def test_a_run_is_read_from_its_middle_after_many_questions(nodes: list[Node]) -> None:
    one, two = nodes
    keys = keys_of(range(8))
    one.store(keys[:3])
    one.store(keys)
    assert two.tier.contains(keys) == [True] * 8
    others = [keys_of(range(100 * first, 100 * first + 3)) for first in range(300)]
    for other in others:
        one.store(other)
        assert two.tier.contains(other) == [True] * 3
    assert read_from(two.tier, two.pool, keys[5:], [(number * 4096, SIZE) for number in range(3)]) == [True] * 3


def test_a_question_that_skips_chunks_is_put_in_their_order(nodes: list[Node]) -> None:
    one, two = nodes
    keys = keys_of(range(16))
    for num_chunks in (3, 5, 16):
        one.store(keys[:num_chunks])
    in_pool = [*keys[:3], keys[4], *keys[8:11]]
    asked = [*in_pool, *(key for key in keys if key not in in_pool)]
    assert two.tier.contains([asked[number] for number in by_run(asked)]) == [True] * 16


def test_a_run_has_a_power_of_two_of_chunks_and_at_most_64_mib_and_a_section_16() -> None:
    sizes = (1, 128 << 10, (128 << 10) + 1, 512 << 10, 2 << 20, 3 << 20, 16 << 20, 64 << 20, 1 << 30)
    assert [chunks_a_run(size) for size in sizes] == [128, 128, 128, 128, 32, 16, 4, 1, 1]
    assert [chunks_a_section(size) for size in sizes] == [128, 128, 64, 32, 8, 4, 1, 1, 1]


@pytest.mark.parametrize("num_old", [3, 8, 13, 16, 24])
def test_objects_of_the_release_before_are_found_in_longer_runs(num_old: int, nodes: list[Node]) -> None:
    """Its runs are the sections of today's."""
    old, new = (keys_of(range(30), run_chunks) for run_chunks in (4, 16))
    nodes[0].store(old[:num_old])
    for node in nodes:
        assert node.find(new) == num_old
    before = nodes[0].names()
    nodes[1].store(new)
    assert {*before} < {*nodes[0].names()}, "nothing is written again under another name"
    assert [node.find(new) for node in nodes] == [30, 30]
    assert len(nodes[0].names()) - len(before) == (1 if num_old >= 16 else 2)


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_the_end_of_a_run_that_is_stored_before_its_beginning_hides_nothing(first: int, nodes: list[Node]) -> None:
    (one, two), keys = nodes, keys_of(range(8))  # in sections of two
    one.write(keys[first:])
    one.store(keys)
    assert [node.find(keys) for node in nodes] == [8, 8]
    other = keys_of([*range(first), *range(100, 108)])
    two.store(other)
    assert one.find(other) == first + 8


def test_a_question_about_a_long_prefix_asks_for_few_runs_and_finds_its_end(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    (one, two), keys, asked = nodes, keys_of(range(200), 2), list[str]()
    get = obstore.get_range_async

    async def get_range(store: ObjectStore, path: str, **where: Any) -> Any:
        asked.append(path)
        return await get(store, path, **where)

    monkeypatch.setattr(obstore, "get_range_async", get_range)
    for num_chunks in (2, 15, 16, 17, 130, 198, 200):
        one.store(keys[:num_chunks])
        asked.clear()
        assert two.tier.contains(keys) == [True] * num_chunks + [False] * (200 - num_chunks)
        assert len(asked) <= 13 + 8 + 2, "one in eight runs, those before the first missing one, and ends of walks"


def test_a_run_that_is_gone_behind_others_ends_a_promotion_and_is_noticed(nodes: list[Node]) -> None:
    (one, two), keys = nodes, keys_of(range(40), 2)
    one.store(keys)
    assert two.find(keys) == 40
    obstore.delete(one.tier.store, name_of(keys[4]))
    assert two.tier.contains(keys) == [True] * 40
    extents = [(number * 4096, SIZE) for number in range(40)]
    assert read_from(two.tier, two.pool, keys, extents) == [True] * 4 + [False] * 2 + [True] * 34
    assert two.tier.contains(keys[:6]) == [True] * 4 + [False] * 2
    two.store(keys)
    assert one.find(keys) == 40


def test_two_depots_that_store_one_prompt_at_once_write_it_once(nodes: list[Node]) -> None:
    keys = keys_of(range(30))
    for _ in range(10):
        gate = threading.Barrier(2)

        def store(node: Node, gate: threading.Barrier = gate) -> None:
            gate.wait()
            node.write(keys)  # neither asks before

        threads = [threading.Thread(target=store, args=(node,)) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(nodes[0].names()) == 4
        assert nodes[1].find(keys) == 30
        sum(nodes[0].tier.clear(None, None))


def test_a_share_under_two_writers_stays_at_its_size_and_readers_see_misses_only(
    nodes: list[Node], tmp_path: Path
) -> None:
    capacity, is_over, failed = 300_000, threading.Event(), list[BaseException]()

    def work(node: Node, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not is_over.is_set():
                node.store(keys_of([chance.randrange(40), *range(20)]))
                node.find_some(keys_of([chance.randrange(40), *range(20)]))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(node, seed)) for seed, node in enumerate(nodes)]
    for thread in threads:
        thread.start()
    try:
        removed = 0
        while removed < 2 * capacity and not failed:
            done = collect(LocalStore(tmp_path), time.time(), capacity_bytes=capacity)
            removed += done.removed_bytes
            assert done.num_bytes.total() - done.removed_bytes <= capacity
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failed


def collect_there(folder: Path, *options: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tier", "gc", f"file://{folder}", *options])
    assert ended.value.code == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "there is no such folder"),
        (["--older-than", "0s"], "'0s' would remove nothing"),
        (["--unwritten-for", "0d"], "'0d' would remove nothing"),
        (["--capacity", "0"], "'0' would remove nothing"),
    ],
)
def test_gc_of_nothing_is_refused(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tier", "gc", f"file://{tmp_path}/mistyped", *options])
    assert ended.value.code
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_gc_of_a_missing_bucket_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Missing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = b'<?xml version="1.0"?>\n<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>'
            self.send_response(404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    with HTTPServer(("127.0.0.1", 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(SystemExit):
            main(["tier", "gc", f"s3://none?endpoint=http://127.0.0.1:{server.server_port}&region=r&anonymous=yes"])
        server.shutdown()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("404 Not Found: NoSuchBucket")
    assert "xml" not in said


def test_gc_removes_by_age_and_by_format_and_leaves_others_alone(
    nodes: list[Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes[0].store(keys_of(range(16)))
    old = f"{'0' * 16}/{'0' * 16}/00/{'0' * 94}"
    others = ("notes", f"{old}.copy")
    for name in (old, *others):
        obstore.put(nodes[0].tier.store, name, b"x")
    being_written = tmp_path / f"{old}#1"  # obstore's name of a file until it is complete
    being_written.write_bytes(b"x")
    collect_there(tmp_path)
    assert capsys.readouterr().out.splitlines()[:2] == ["entries: 1 objects, 1 B", "runs: 2 objects, 18.3 KiB"]
    collect_there(tmp_path, "--format", "entries")
    assert old not in nodes[0].names()
    assert nodes[1].find(keys_of(range(16))) == 16
    os.utime(tmp_path / next(name for name in nodes[0].names() if name not in others), (0, 0))
    collect_there(tmp_path, "--older-than", "7d")
    assert nodes[1].find(keys_of(range(16))) < 16
    os.utime(being_written, (0, 0))
    collect_there(tmp_path, "--older-than", "1s", "--format", "entries", "--capacity", "1")
    assert nodes[0].names() == sorted(others)
    assert being_written.exists()


def test_gc_removes_the_oldest_objects_and_no_more_than_it_must(nodes: list[Node], tmp_path: Path) -> None:
    ages = {5: 40, 7: 30, 3: 20, 6: 10}  # the oldest is neither the smallest nor the largest
    for num_chunks, hours in ages.items():
        nodes[0].store(keys_of(range(100 * num_chunks, 101 * num_chunks)))
        (new,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mtime > 1e9)
        os.utime(new, (0, 1e9 - 3600 * hours))
    total = collect(LocalStore(tmp_path), time.time()).num_bytes.total()
    for num_left in (3, 2, 1):
        left = collect(LocalStore(tmp_path), time.time(), capacity_bytes=total - 1)
        total = left.num_bytes.total() - left.removed_bytes
        found = [n for n in ages if nodes[1].find(keys_of(range(100 * n, 101 * n)))]
        assert found == list(ages)[-num_left:]


def test_gc_of_twenty_times_as_many_objects_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, peaks = list[str](), list[int]()

    def pages(count: int) -> Iterator[list[dict[str, Any]]]:
        for start in range(0, count, 1000):
            yield [
                {
                    "path": f"{0:016x}/{0:016x}/00/{number:064x}",
                    "size": 1,
                    "last_modified": datetime.fromtimestamp(1e9 + number % 1000 * 60, UTC),
                }
                for number in range(start, start + 1000)
            ]

    def delete(store: object, paths: list[str]) -> None:
        gone.extend(paths[:1])

    monkeypatch.setattr(obstore, "delete", delete)
    for count in (2000, 40_000):

        def list_objects(*_: object, count: int = count, **__: object) -> Iterator[list[dict[str, Any]]]:
            return pages(count)

        monkeypatch.setattr(obstore, "list", list_objects)
        tracemalloc.start()
        done = collect(MemoryStore(), 2e9, capacity_bytes=count // 4)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert done.num_removed == done.removed_bytes == count * 3 // 4
    assert len(gone) > 100
    assert peaks[1] < 2 * peaks[0]


def test_gc_goes_on_while_depots_write_more_than_it_removes(
    nodes: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, delete = iter(range(3, 6)), obstore.delete

    def delete_slowly(store: ObjectStore, paths: str | Sequence[str]) -> None:
        delete(store, paths)
        for name in itertools.islice(more, 1):
            nodes[1].store(keys_of(range(100 * name, 100 * name + 60)))

    for name in range(3):
        nodes[0].store(keys_of(range(100 * name, 100 * name + 60)))
    monkeypatch.setattr(obstore, "delete", delete_slowly)
    collect_there(tmp_path, "--capacity", "80KiB")
    assert next(more, None) is None
    assert collect(LocalStore(tmp_path), time.time()).num_bytes.total() <= 80 << 10


def test_a_chunk_of_another_size_than_the_one_that_is_read_is_none(nodes: list[Node]) -> None:
    keys = keys_of(range(8))
    nodes[0].store(keys)
    (name,) = nodes[0].names()
    data = bytearray(bytes(obstore.get(nodes[0].tier.store, name).bytes()))
    size = data.index(digest_of(keys[3])) + DIGEST_BYTES + 8
    assert data[size : size + 8] == SIZE.to_bytes(8, "little")
    data[size : size + 8] = (SIZE - 1).to_bytes(8, "little")
    obstore.put(nodes[0].tier.store, name, bytes(data))
    trailers = nodes[1].tier.read(keys, [(number * 4096, SIZE) for number in range(8)])
    assert [bool(trailer) for trailer in trailers] == [True, True, True, False, True, True, True, True]
    assert trailers[3] == b"", "the depot removes it"


def test_a_run_whose_place_is_unknown_is_read_with_one_request(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes[:2]
    keys, requests = keys_of(range(128), run_chunks=128), list[str]()
    one.store(keys)

    def noting(ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(store: object, name: str, *arguments: Any, **options: Any) -> Any:
            requests.append(name)
            return ask(store, name, *arguments, **options)

        return noted

    for ask in ("get_async", "get_range_async"):
        monkeypatch.setattr(obstore, ask, noting(getattr(obstore, ask)))
    two.find_some(keys)
    assert requests == [name_of(keys[0])]
    assert two.find(keys) == 128


def test_chunks_that_were_written_again_elsewhere_are_read_after_one_miss(nodes: list[Node], tmp_path: Path) -> None:
    (one, two), keys, extents = nodes, keys_of(range(8)), [(number * 4096, SIZE) for number in range(4)]
    one.store(keys[:4])
    one.store(keys)
    assert two.find(keys) == 8
    for name in one.names():
        (tmp_path / name).unlink()
    one.write(keys)
    assert len(one.names()) == 1, "the last four were in another object"
    assert read_from(two.tier, two.pool, keys[4:], extents) == [False] * 4
    assert read_from(two.tier, two.pool, keys[4:], extents) == [True] * 4


def test_a_chunk_of_the_most_bytes_of_a_run_is_read(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.tiers.object.MOST_BYTES_A_RUN", SIZE)
    keys = keys_of(range(2))
    nodes[0].store(keys)
    assert nodes[1].tier.contains(keys) == [True] * 2
    for key in keys:
        assert read_from(nodes[1].tier, nodes[1].pool, [key], [(0, SIZE)]) == [True]
        assert nodes[1].pool.view[:SIZE] == content(key[:KEY_BYTES], SIZE)


def test_of_chunks_without_runs_each_is_asked_for(nodes: list[Node]) -> None:
    """Chunks of windows have no run, and depots keep only some of them."""
    keys = keys_of(range(24), run_chunks=1)
    nodes[0].write([key for number, key in enumerate(keys) if number not in (3, 12)])
    assert nodes[1].tier.contains(keys) == [number not in (3, 12) for number in range(24)]


def test_a_head_with_chunks_far_apart_is_not_followed(nodes: list[Node], tmp_path: Path) -> None:
    """The object is sparse: from the first chunk to the last one it has a GiB."""
    (node, _), keys = nodes, keys_of(range(2))
    node.store(keys)
    (name,) = node.names()
    with (tmp_path / name).open("r+b") as file:
        data = file.read()
        offset = data.index(digest_of(keys[1])) + DIGEST_BYTES
        file.seek(offset)
        file.write((1 << 30).to_bytes(8, "little"))
        file.seek(1 << 30)
        file.write(data[-SIZE:])
    assert node.tier.contains(keys) == [True] * 2
    with contextlib.closing(TierQueue(node.tier, node.pool, "shared files")) as queue:
        assert read(queue, keys, [(0, SIZE), (4096, SIZE)]) == [False] * 2
        assert queue.counters["corrupt"] == 2
        assert contains(queue, keys) == [False] * 2


def test_gc_removes_the_weights_of_a_model_that_nobody_keeps(nodes: list[Node], tmp_path: Path) -> None:
    prompts = {name: keys_of(range(8), weights=f"lineage {name}") for name in ("7 abc", "8 def", "9 abc", "")}
    prompts["another model's"] = keys_of(range(8), weights="lineage 7 abc", model="c")
    for keys in prompts.values():
        nodes[0].store(keys)
    collect_there(tmp_path, "--model", "b", "--keep", "8 def", "--keep", "9 abc")
    assert [name for name, keys in prompts.items() if nodes[1].find(keys)] == ["8 def", "9 abc", "another model's"]
    for wrong in (["--model", "b"], ["--keep", "8 def"], ["--model", "b", "--keep", ""]):
        with pytest.raises(SystemExit) as ended:
            main(["tier", "gc", f"file://{tmp_path}", *wrong])
        assert ended.value.code


@pytest.mark.parametrize(
    ("left_behind", "present"),
    [({"spec": b"vllm 0.31"}, {"spec": b"vllm 0.32"}), ({"weights": "lineage 7"}, {"weights": "lineage 8"})],
    ids=["the layout of an upgraded engine", "weights before an update"],
)
def test_gc_removes_what_no_depot_has_written_for_long(
    left_behind: dict[str, Any], present: dict[str, Any], nodes: list[Node], tmp_path: Path
) -> None:
    old, new = keys_of(range(8), **left_behind), keys_of(range(8), **present)
    for keys in (old, new):
        nodes[0].store(keys)
    for name in nodes[0].names():
        os.utime(tmp_path / name, (0, time.time() - 4 * 86400))
    more = keys_of(range(100, 108), **present)
    nodes[0].store(more)
    collect_there(tmp_path, "--unwritten-for", "5d")
    assert [nodes[1].find(keys) for keys in (old, new, more)] == [8, 8, 8]
    collect_there(tmp_path, "--unwritten-for", "3d")
    assert [nodes[1].find(keys) for keys in (old, new, more)] == [0, 8, 8]


@pytest.mark.parametrize("option", ["--older-than=7d", "--unwritten-for=3d", "--capacity=14KiB"])
@pytest.mark.parametrize("days", [365, 0.9])
def test_gc_takes_objects_of_a_clock_that_ran_ahead_for_the_oldest(
    days: float, option: str, nodes: list[Node], tmp_path: Path
) -> None:
    early, new = keys_of(range(8), spec=b"early"), keys_of(range(8), spec=b"new")
    nodes[0].store(early)
    for name in nodes[0].names():
        os.utime(tmp_path / name, (0, time.time() + 86400 * days))
    nodes[0].store(new)
    collect_there(tmp_path, option)
    found = [nodes[1].find(keys) for keys in (early, new)]
    if days > 1:
        assert found == [0, 8]
    else:
        assert found == ([8, 0] if "capacity" in option else [8, 8]), "clocks of two machines may differ so much"


def test_gc_on_a_machine_whose_clock_is_behind_removes_nothing_by_age(nodes: list[Node], tmp_path: Path) -> None:
    nodes[0].store(keys_of(range(8)))
    store, before = LocalStore(tmp_path), time.time() - 2 * 86400
    for older, unwritten in ((1.0, 0.0), (0.0, 1.0)):
        with pytest.raises(ConfigError, match="all 1 objects are from the future: this machine's clock is behind"):
            collect(store, before, older_than_seconds=older, unwritten_seconds=unwritten)
    assert collect(store, before).num_removed == 0
    assert nodes[1].find(keys_of(range(8))) == 8


RUN_SPEC = m.CacheSpec(16, (m.GroupShape(GroupKind.FULL_ATTENTION, 16),), "bytes")
REGISTERED = registration(RUN_SPEC, details=(m.GroupDetail(page_sizes_bytes=(32768,), num_blocks=8),))


def run_of_chunks(num_chunks: int, name: int = 0) -> KeyRun:
    return hash_prefix(Namespace("model"), 16, range(10000 * name, 10000 * name + 16 * num_chunks))


def settle(depot: DepotProcess) -> None:
    """Wait until no tier writes and no chunk leaves any more."""
    seen = list[object]()

    def is_quiet() -> bool:
        status = depot.status()
        seen.append((status.pool_used_bytes, [tier.counters for tier in status.tiers]))
        return len(seen) > 20 and seen[-20] == seen[-1] and is_written(depot)

    wait_until(is_quiet, what="the end of writes")


def test_prompts_that_the_pool_evicts_are_found_in_runs(tmp_path: Path) -> None:
    with (
        DepotProcess("--tier", f"file://{tmp_path}", "--demote", "evict", pool_size="8MiB") as depot,
        DepotProcess("--tier", f"file://{tmp_path}") as other,
        contextlib.closing(Peer(depot, REGISTERED)) as peer,
        contextlib.closing(Peer(other, REGISTERED)) as reader,
    ):
        for name in range(6):  # the pool has room for four of them
            for chunk in range(0, 60, 10):
                peer.store(run_of_chunks(60, name).slice(chunk, chunk + 10))
                if name > 2:
                    settle(depot)  # a reserve of 12 chunks is free again
        assert [find(reader, run_of_chunks(60, name)) for name in range(2)] == [60, 60]


def test_a_prompt_larger_than_the_queue_is_written_from_its_beginning(tmp_path: Path) -> None:
    run = run_of_chunks(60)  # 1.9 MiB
    with (
        DepotProcess("--tier", f"file://{tmp_path}?queue=1MiB") as depot,
        DepotProcess("--tier", f"file://{tmp_path}") as other,
        contextlib.closing(Peer(depot, REGISTERED)) as peer,
        contextlib.closing(Peer(other, REGISTERED)) as reader,
    ):
        for chunk in range(0, 60, 10):
            peer.store(run.slice(chunk, chunk + 10))
        settle(depot)
        assert find(reader, run) >= 24  # three of the jobs that the queue has room for
        wait_until(lambda: find(peer, run) == 60 and find(reader, run) == 60, what="the rest, with each use")


@pytest.mark.parametrize(("demotion", "num_chunks"), [("reuse", 70), ("evict", 70), ("store", 48)])
def test_a_session_that_is_demoted_is_found_in_runs(demotion: str, num_chunks: int, tmp_path: Path) -> None:
    run = run_of_chunks(num_chunks)
    with (
        DepotProcess("--tier", f"file://{tmp_path}", "--demote", demotion) as depot,
        contextlib.closing(Peer(depot, REGISTERED)) as peer,
    ):
        for chunk in range(0, num_chunks - 8, 20):
            peer.store(run.slice(chunk, min(chunk + 20, num_chunks - 8)))
        settle(depot)
        peer.store(run.slice(num_chunks - 8, num_chunks))  # with `store`, it waits for a continuation
        peer.ask(Hint(peer.context, run.tenant, run.digests, session="agent"))
        reply = peer.ask(sessions.DemoteSession("agent", run.tenant))
        assert isinstance(reply, m.Done)
        assert reply.count == num_chunks
        wait_until(lambda: not depot.status().pool_used_bytes, what="the session to leave")
        assert find(peer, run) == num_chunks


@pytest.mark.parametrize("is_drained", [True, False])
def test_stores_that_wait_for_more_are_written_before_a_depot_stops(is_drained: bool, tmp_path: Path) -> None:
    run, url = run_of_chunks(12), f"file://{tmp_path}"
    with DepotProcess("--tier", url) as depot, contextlib.closing(Peer(depot, REGISTERED)) as peer:
        for chunk in range(0, 12, 4):  # each would wait for two seconds
            peer.store(run.slice(chunk, chunk + 4))
        if is_drained:
            with pytest.raises(SystemExit) as ended:
                main(["drain", "--url", depot.url])
            assert ended.value.code == 0
            depot.kill()
        else:
            assert depot.terminate() == 0
    with DepotProcess("--tier", url) as depot, contextlib.closing(Peer(depot, REGISTERED)) as peer:
        assert find(peer, run) == 12


class Counting:
    """Forwards connections to a server and counts the requests by method."""

    def __init__(self, port: int) -> None:
        self.counts = Counter[bytes]()
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listening.accept()[0],), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._port)) as server, contextlib.suppress(OSError):
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 18)
                    if not data:
                        return
                    if ready is client:
                        self.counts.update(_REQUESTS.findall(data))
                    (server if ready is client else client).sendall(data)

    def take(self) -> dict[bytes, int]:
        """Return the requests since the last call, by method."""
        counts, self.counts = self.counts, Counter[bytes]()
        return dict(counts)

    def close(self) -> None:
        self._listening.close()


@pytest.mark.slow
@pytest.mark.promise(79)
def test_8k_tokens_in_chunks_of_16_cost_at_most_ten_requests_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    server = S3Server()
    counting = Counting(int(server.endpoint.rpartition(":")[2]))
    url = f"s3://bucket/kv?endpoint=http://127.0.0.1:{counting.port}&deadline=8"
    spec = m.CacheSpec(16, (m.GroupShape(GroupKind.FULL_ATTENTION, 16),), "bytes")
    registered = registration(spec, details=(m.GroupDetail(page_sizes_bytes=(32768,), num_blocks=8),))
    run: KeyRun = hash_prefix(Namespace("model"), 16, range(8192))
    try:
        with (
            DepotProcess("--tier", url) as one,
            DepotProcess("--tier", url) as two,
            contextlib.closing(Peer(one, registered)) as first,
            contextlib.closing(Peer(two, registered)) as second,
        ):
            counting.take()
            for chunk in range(0, 512, 32):
                assert first.store(run.slice(chunk, chunk + 32)) == 32
            wait_until(lambda: one.status().tiers[0].counters.get("written_entries") == 512, what="the end of writes")
            stored = counting.take()
            began = time.monotonic()
            assert find(second, run) == 512
            assert time.monotonic() - began < 1.0
            promoted = counting.take()
    finally:
        counting.close()
        server.kill()
    assert sum(stored.values()) <= 10, stored
    assert sum(promoted.values()) <= 10, promoted
    assert promoted == {b"GET": 2 + 4}, "a whole prefix is asked for by its first and its last run"
