"""Contents: text is found at any position of any prompt while its chunks are in the depot."""

import random
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import ErrorCode
from kvdepot.features.blend import contents
from kvdepot.features.blend.client import BlendRun, note_contents, submit_blend_lookup
from kvdepot.features.blend.feature import BlendLookups
from kvdepot.features.blend.messages import (
    BLEND_RUN,
    MAXIMUM_SEGMENT_TOKENS,
    MAXIMUM_SEGMENTS,
    SEGMENT,
    BlendLookup,
    BlendReply,
    NoteContents,
)
from kvdepot.features.blend.segments import SegmentNamer
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import Part
from kvdepot.operate import operations as o
from kvdepot.operate.status import describe_status
from kvdepot.server.turns import PendingReply
from kvdepot.wire import messages as m
from support.index import FULL, HYBRID, Bench, Worker
from support.peer import SPEC, Peer

CHUNK = 16
NAMESPACE = Namespace("model", tenant_salt="salt")
NAMER = SegmentNamer(NAMESPACE)


@dataclass
class Run:
    position: int
    length: int
    source_position: int
    key: KeyRun


def text(seed: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128_000, num_tokens).tolist()


def bench(pages: int = 256) -> Bench:
    return Bench((m.GroupShape(FULL, CHUNK),), chunk_tokens=CHUNK, pages=pages, num_records=256)


def key_of(tokens: list[int]) -> KeyRun:
    return hash_prefix(NAMESPACE, CHUNK, tokens)


def learn(worker: Worker, tokens: list[int], borders: tuple[int, ...] = (), tenant: str = "default") -> KeyRun:
    """Store a prompt and note its segments."""
    key = replace(key_of(tokens), tenant=tenant)
    for first in range(0, key.num_chunks, m.MAXIMUM_STORE_ENTRIES):
        worker.store(key.slice(first, first + m.MAXIMUM_STORE_ENTRIES))
    worker.ask(NoteContents(worker.context, key.digests, NAMER.name(tokens, borders).packed))
    return key


def ask(
    worker: Worker, tokens: list[int], borders: tuple[int, ...] = (), least: int = 0, namer: SegmentNamer = NAMER
) -> list[Run]:
    reply = worker.ask(BlendLookup(worker.context, "r", namer.name(tokens, borders).packed, least))
    assert isinstance(reply, BlendReply)
    assert bool(reply.lease) == bool(reply.runs)
    worker.ask(m.EndRequest(worker.context, "r"))
    return [
        Run(position, length, source, KeyRun(reply.digests[start * 32 : (start + count) * 32], first, bytes(32)))
        for position, length, source, first, count, start in BLEND_RUN.iter_unpack(reply.runs)
    ]


def check(runs: list[Run], tokens: list[int], *sources: list[int]) -> int:
    """Check that each run has the tokens that it claims, in chunks of one source. Return the number of tokens."""
    end = 0
    for run in runs:
        assert run.position >= end
        end = run.position + run.length
        source = next(each for each in sources if run.key.digests in key_of(each).digests)
        assert tokens[run.position : end] == source[run.source_position : run.source_position + run.length]
        first, count = run.key.first_chunk, run.key.num_chunks
        assert first * CHUNK <= run.source_position
        assert run.source_position + run.length <= (first + count) * CHUNK
        assert run.key.digests == key_of(source).digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
    return sum(run.length for run in runs)


def parts_of(plan: m.RetrievePlan) -> list[tuple[int, Part]]:
    """Return chunk and part of each extent."""
    return [
        (chunk, Part.of(layers << 16 | heads)) for chunk, _, heads, _, layers, *_ in m.EXTENT.iter_unpack(plan.extents)
    ]


def has_head(part: Part, head: int) -> bool:
    return part.first_head <= head < part.first_head + part.num_heads


def test_documents_are_found_in_another_order_twice_and_from_the_first_token_on() -> None:
    worker = bench().worker()
    a, b, c = (text(seed, 320) for seed in range(3))
    source = a + b + c
    learn(worker, source, (320, 640, 960))
    wanted = text(9, 77) + c + a + text(8, 5) + c
    runs = ask(worker, wanted, (77, 397, 717, 722, 1042))
    assert check(runs, wanted, source) == 960
    assert [run.position for run in runs] == [77, 397, 722]
    assert [run.source_position for run in runs] == [640, 0, 640]
    assert check(ask(worker, wanted), wanted, source) >= 0.6 * 960  # without borders


@pytest.mark.parametrize(("stored_by", "read_by"), [(1, 2), (2, 1), (2, 4)])
def test_text_that_an_engine_of_one_size_stored_is_found_and_read_by_one_of_another(
    stored_by: int, read_by: int
) -> None:
    depot = Bench((m.GroupShape(FULL, CHUNK, heads=4),), chunk_tokens=CHUNK, pages=256, num_records=256)
    writers = [depot.worker(rank, ranks=stored_by) for rank in range(stored_by)]
    readers = [depot.worker(rank, ranks=read_by) for rank in range(read_by)]
    source = text(0, 160) + text(1, 160)
    wanted = text(9, 77) + source[160:]
    for writer in writers:
        assert check(ask(readers[0], wanted, (77,)), wanted, source) == 0, "of each chunk some heads are missing"
        learn(writer, source, (160, 320))
    (run,) = ask(readers[0], wanted, (77, 237))
    assert check([run], wanted, source) == 160
    first, num_chunks = run.key.first_chunk, run.key.num_chunks
    for rank, reader in enumerate(readers):
        plan = reader.retrieve(run.key)
        assert plan.num_chunks == num_chunks
        heads = {(chunk, head) for chunk, part in parts_of(plan) for head in range(4) if has_head(part, head)}
        mine = range(rank * 4 // read_by, (rank + 1) * 4 // read_by)
        assert {(chunk, head) for chunk in range(num_chunks) for head in mine} <= heads
        reader.release(plan.lease)
        assert reader.store(key_of(source).slice(first, first + num_chunks)).num_present == num_chunks


def test_a_run_goes_on_in_its_source_and_the_newest_one_is_preferred() -> None:
    worker = bench().worker()
    a, b = text(0, 200), text(1, 200)
    first, second = a + b, text(2, 48) + b
    learn(worker, first, (200,))
    learn(worker, second, (48,))
    (run,) = ask(worker, first, (200,))
    assert check([run], first, first) == run.length
    runs = ask(worker, text(3, 10) + b, (10,))
    assert check(runs, text(3, 10) + b, second, first) > 150
    assert runs[0].source_position == 48


def test_a_run_ends_where_only_another_prompt_goes_on() -> None:
    """Even if the other prompt has the next segment at the same position."""
    worker = bench().worker()
    a, b = text(0, 160), text(1, 160)
    first, second = a + text(2, 160), text(3, 160) + b
    learn(worker, first, (160,))
    learn(worker, second, (160,))
    runs = ask(worker, a + b, (160,))
    assert check(runs, a + b, first, second) > 200
    assert [run.source_position for run in runs] == [run.position for run in runs]


def test_a_run_does_not_go_on_behind_text_that_was_left_out() -> None:
    """Even within one chunk, where the key is the same before and after the omission."""
    large = Bench((m.GroupShape(FULL, 64),), chunk_tokens=64, pages=8, num_records=8)
    worker = large.worker()
    a, b, c = text(0, 16), text(1, 16), text(2, 32)
    key = hash_prefix(NAMESPACE, 64, a + b + c)
    worker.store(key)
    worker.ask(NoteContents(worker.context, key.digests, NAMER.name(a + b + c, (16, 32)).packed))
    runs = ask(worker, a + c, (16,))
    assert [(run.position, run.source_position) for run in runs] == [(0, 0), (16, 32)]
    assert runs[0].length == 16


def test_short_runs_are_left_out() -> None:
    worker = bench().worker()
    learn(worker, text(0, 64))
    assert ask(worker, text(0, 64)) != []
    assert ask(worker, text(0, 64), least=64) == []


def test_chunks_that_are_not_stored_are_no_source() -> None:
    worker = bench().worker()
    tokens = text(0, 320)
    worker.store(key_of(tokens).slice(0, 10))
    segments = NAMER.name(tokens)
    noted = worker.ask(NoteContents(worker.context, key_of(tokens).digests, segments.packed)).count
    lengths = [(position, length) for _, position, length in SEGMENT.iter_unpack(segments.packed)]
    assert noted == sum(position + length <= 160 for position, length in lengths) < len(lengths)
    assert len(worker.bench.depot.features.of(BlendLookups).contents) == noted
    assert all(run.source_position + run.length <= 160 for run in ask(worker, tokens))
    assert 0 < check(ask(worker, tokens), tokens, tokens) <= 160


def test_a_run_over_a_chunk_that_was_removed_is_left_out() -> None:
    scene = bench()
    worker = scene.worker()
    tokens = text(0, 320)
    key = learn(worker, tokens)
    (run,) = ask(worker, tokens)
    chunk = run.key.first_chunk + 4
    node = scene.index.nodes.find(scene.index.spaces[0], key.slice(chunk, chunk + 1).digests, chunk)
    assert node is not None
    entry = scene.index.entries.find(node, 0, 0)
    assert entry is not None
    scene.index.remove_entry(entry)  # as if its bytes were wrong; the chunks after it are still known
    runs = ask(worker, tokens)
    assert all(chunk not in range(each.key.first_chunk, each.key.first_chunk + each.key.num_chunks) for each in runs)
    worker.store(key.slice(chunk, chunk + 1))
    assert ask(worker, tokens) == [run]


def test_segments_that_are_too_long_are_not_noted() -> None:
    worker = bench().worker()
    key = learn(worker, text(0, 2048))
    known = len(worker.bench.depot.features.of(BlendLookups).contents)
    packed = SEGMENT.pack(bytes(16), 0, MAXIMUM_SEGMENT_TOKENS + 1) + SEGMENT.pack(bytes(16), 0, 0)
    worker.ask(NoteContents(worker.context, key.digests, packed))
    assert len(worker.bench.depot.features.of(BlendLookups).contents) == known


def test_chunks_that_left_are_not_found_and_a_lease_keeps_them() -> None:
    scene = bench(pages=20)
    worker = scene.worker()
    a, b = text(0, 320), text(1, 320)
    learn(worker, a)
    assert worker.ask(BlendLookup(worker.context, "r", NAMER.name(a).packed)).lease
    worker.store(key_of(b))
    assert worker.lookup(key_of(a)).num_chunks > 0  # held
    worker.ask(m.EndRequest(worker.context, "r"))
    worker.store(key_of(b))
    worker.store(key_of(text(2, 320)))
    assert worker.lookup(key_of(a)).num_chunks == 0
    assert ask(worker, a) == []
    assert len(scene.depot.features.of(BlendLookups).contents) == 0  # names that were asked for in vain are forgotten


def test_the_oldest_names_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAXIMUM_BYTES", 12 * contents.NAME_BYTES)
    worker = bench().worker()
    learn(worker, text(0, 320))
    learn(worker, text(1, 320))
    assert len(worker.bench.depot.features.of(BlendLookups).contents) == 12
    assert ask(worker, text(0, 320)) == []
    assert ask(worker, text(1, 320)) != []


def test_names_that_are_noted_again_outlast_those_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench().worker()
    for seed in (0, 1, 0):
        learn(worker, text(seed, 160))
    known = len(worker.bench.depot.features.of(BlendLookups).contents)
    monkeypatch.setattr(contents, "MAXIMUM_BYTES", known * contents.NAME_BYTES)
    learn(worker, text(2, 160))
    assert ask(worker, text(0, 160)) != []
    assert ask(worker, text(1, 160)) == []
    assert ask(worker, text(2, 160)) != []
    worker.bench.depot.features.of(BlendLookups).contents.check_integrity()


def note_many(worker: Worker, key: KeyRun, seed: int, num_segments: int = MAXIMUM_SEGMENTS) -> int:
    """Note segments with random names, by default as many as a request can have, in stored chunks."""
    names = np.random.default_rng(seed).bytes(16 * num_segments)
    packed = b"".join(SEGMENT.pack(names[16 * i : 16 * i + 16], 0, 16) for i in range(num_segments))
    return worker.ask(NoteContents(worker.context, key.digests, packed)).count


def test_one_bound_holds_for_the_whole_depot_however_many_caches_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAXIMUM_BYTES", 2000 * contents.NAME_BYTES)
    scene = bench()
    index = scene.depot.features.of(BlendLookups).contents
    for heads in range(4):
        layout = f"{heads} heads"
        space = scene.index.space(m.CacheSpec(CHUNK, (m.GroupShape(FULL, CHUNK),), layout))
        for part in range(20):
            names = np.random.default_rng(20 * heads + part).bytes(16 * 100)
            segments = ((names[16 * i : 16 * i + 16], 0, 16) for i in range(100))
            assert index.note(space, 0, bytes(DIGEST_BYTES), segments) == 100
            index.check_integrity()
    assert len(index) == 2000


@pytest.mark.parametrize("quotas", [{}, {"bob": 200}, {"alice": 60}], ids=["without quotas", "bob's", "alice's"])
def test_a_flood_of_one_tenants_names_pushes_out_no_others(
    quotas: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "MAXIMUM_BYTES", 1000 * contents.NAME_BYTES)
    worker = Bench((m.GroupShape(FULL, CHUNK),), chunk_tokens=CHUNK, pages=256, num_records=256, quotas=quotas).worker()
    of_alice, of_bob = text(0, 640), text(1, 640)
    learn(worker, of_alice, tenant="alice")
    before = ask(worker, of_alice)
    key = learn(worker, of_bob, tenant="bob")
    assert sum(note_many(worker, key, seed) for seed in range(4)) == 4 * MAXIMUM_SEGMENTS
    assert ask(worker, of_alice) == before != []
    assert len(worker.bench.depot.features.of(BlendLookups).contents) == 1000
    worker.bench.depot.features.of(BlendLookups).contents.check_integrity()


def test_many_segments_are_noted_in_steps_and_a_flood_of_such_notes_is_cut() -> None:
    worker = bench().worker()
    key, depot = learn(worker, text(0, 320)), worker.bench.depot
    packed = b"".join(SEGMENT.pack(i.to_bytes(16, "little"), 0, 16) for i in range(MAXIMUM_SEGMENTS))
    request = NoteContents(worker.context, key.digests, packed)
    replies = [depot.handle(worker.session, worker.writer, request) for _ in range(20)]
    waiting = [reply for reply in replies if isinstance(reply, PendingReply)]
    assert all(each.reply is None for each in waiting)
    assert depot.counters["blend_notes_dropped"] == 20 - len(waiting) > 0
    depot.background.work()
    assert [each.reply for each in waiting] == [m.Done(1, MAXIMUM_SEGMENTS)] * len(waiting)


def test_other_tenants_and_forged_names_find_nothing() -> None:
    worker = bench().worker()
    tokens = text(0, 320)
    learn(worker, tokens)
    assert ask(worker, tokens, namer=SegmentNamer(Namespace("model"))) == []
    forged = b"".join(SEGMENT.pack(random.Random(i).randbytes(16), 20 * i, 20) for i in range(100))
    assert worker.ask(BlendLookup(worker.context, "r", forged)).runs == b""


@pytest.mark.slow
def test_random_prompts_agree_with_their_tokens() -> None:
    rng, scene = random.Random(0), bench(pages=120)
    worker = scene.worker()
    documents = [text(seed, rng.randrange(40, 200)) for seed in range(8)]
    sources: list[list[int]] = []
    num_found = 0
    for number in range(60):
        tokens = [token for _ in range(3) for token in rng.choice(documents)] + text(100 + number, 30)
        num_found += check(ask(worker, tokens), tokens, *sources)
        learn(worker, tokens)
        sources.append(tokens)
        scene.index.check_integrity()
    assert num_found > 4000


def test_a_cache_with_windows_and_malformed_segments_are_refused() -> None:
    hybrid = Bench(groups=HYBRID).worker()
    assert hybrid.refusal(BlendLookup(hybrid.context, "r", b"")) is ErrorCode.BAD_LAYOUT
    worker = bench().worker()
    assert worker.refusal(BlendLookup(worker.context, "r", bytes(25))) is ErrorCode.BAD_KEY
    assert worker.refusal(NoteContents(worker.context, b"", bytes(25))) is ErrorCode.BAD_KEY
    assert worker.refusal(NoteContents(worker.context, bytes(33), b"")) is ErrorCode.BAD_KEY


def test_a_scheduler_asks_a_real_depot() -> None:
    chunk_tokens, tokens = SPEC.chunk_tokens, text(0, 640)
    key = hash_prefix(NAMESPACE, chunk_tokens, tokens)
    segments = NAMER.name(tokens, (100,))
    wanted = text(1, 33) + tokens[100:]
    asked = NAMER.name(wanted, (33,))
    with DepotProcess() as depot, SchedulerClient(SPEC, "engine", url=depot.url) as client:
        worker = Peer(depot)
        client.wait_until_connected(10)
        assert submit_blend_lookup(client, "r", asked).result().runs == ()
        worker.store(key)
        note_contents(client, key, segments)
        hit = submit_blend_lookup(client, "r", asked, min_run_tokens=32).result()
        (run,) = hit.runs
        assert (run.position, run.source_position) == (33, 100)
        assert run.length >= 500
        assert run.key.digests == key.slice(1, run.key.first_chunk + run.key.num_chunks).digests
        assert depot.status().num_leases == 1
        clipped = run.clip(100, 200, chunk_tokens)
        assert clipped is not None
        assert (clipped.position, clipped.length, clipped.source_position) == (100, 100, 167)
        assert clipped.key == run.key.slice(1, 4)  # tokens 128 to 320 of the source
        assert run.clip(0, 33, chunk_tokens) is None
        client.release(hit.lease)
        wait_until(lambda: depot.status().num_leases == 0)
        pending = submit_blend_lookup(client, "r", asked)
        pending.cancel()
        assert pending.result().runs == ()
        wait_until(lambda: depot.status().num_leases == 0)
        worker.close()


@pytest.mark.slow
def test_a_new_server_is_told_again_and_cleared_chunks_are_no_sources() -> None:
    tokens = text(0, 640)
    key, segments = hash_prefix(NAMESPACE, SPEC.chunk_tokens, tokens), NAMER.name(tokens)
    with DepotProcess() as depot, SchedulerClient(SPEC, "engine", url=depot.url) as client:

        def runs() -> tuple[BlendRun, ...]:
            found = submit_blend_lookup(client, "r", segments).result().runs
            client.end_request("r")
            return found

        worker = Peer(depot)
        client.wait_until_connected(10)
        worker.store(key)
        note_contents(client, key, segments)
        before = runs()
        assert before
        worker.close()
        epoch = depot.status().epoch
        depot.kill()
        depot.start()
        wait_until(lambda: client.lookup("r", key).num_chunks == key.num_chunks)  # until the table is read back
        client.end_request("r")
        assert depot.status().epoch != epoch
        assert runs() == ()
        note_contents(client, key, segments)
        assert runs() == before
        wait_until(lambda: depot.status().num_leases == 0)  # leased chunks would stay
        ask_depot(o.Clear(), depot.url)
        assert runs() == ()


def test_status_says_whether_an_engine_blends() -> None:
    with (
        DepotProcess() as depot,
        SchedulerClient(SPEC, "one", url=depot.url, remark="blend is on; self-test: fine") as client,
        SchedulerClient(SPEC, "two", url=depot.url) as other,
    ):
        client.wait_until_connected(10)
        other.wait_until_connected(10)
        said = {context.instance: context.remark for context in depot.status().contexts}
        assert said == {"one": "blend is on; self-test: fine", "two": ""}
        text = describe_status(depot.status())
        assert re.search(r"one, scheduler, pid \d+, 0 leases\n +blend is on; self-test: fine", text), text
