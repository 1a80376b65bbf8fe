"""Entries of engines of different sizes: found together, read by all, and stored once."""

from dataclasses import replace

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.index.entries import PartPlace
from kvdepot.keys import KeyRun
from kvdepot.layout import MAXIMUM_HEADS, GroupKind, Part
from kvdepot.operate.report import status_of
from kvdepot.pool.table import SEALED, IndexTable
from kvdepot.server.turns import Refused
from kvdepot.wire import messages as m
from support.index import PAGE, Bench, Worker, prompt
from support.records import write_record

FULL, WINDOW = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW
HEADS = (m.GroupShape(FULL, 1, heads=4),)
STAGES = (m.GroupShape(FULL, 1, layers=4, heads=2),)
TWO_GROUPS = (m.GroupShape(FULL, 1, heads=4), m.GroupShape(WINDOW, 1, window_tokens=2, heads=4))


def engine(bench: Bench, ranks: int) -> list[Worker]:
    return [bench.worker(rank, ranks=ranks) for rank in range(ranks)]


def parts(plan: m.RetrievePlan | m.StorePlan) -> list[tuple[int, int, Part]]:
    """Return chunk, group and part of each extent. Check that its size matches the part."""
    found: list[tuple[int, int, Part]] = []
    for chunk, group, heads, _, layers, _, _, num_bytes in m.EXTENT.iter_unpack(plan.extents):
        part = Part.of(layers << 16 | heads)
        assert num_bytes == PAGE * part.num_cells
        found.append((chunk, group, part))
    return found


def found_by(worker: Worker, run: KeyRun) -> int:
    """Return how many chunks a lookup finds."""
    reply = worker.lookup(run)
    worker.release(reply.lease)
    return reply.num_chunks


def read_by(worker: Worker, run: KeyRun) -> list[Part]:
    """Return the parts that a worker gets of each chunk. Check that they are the same for all chunks."""
    plan = worker.retrieve(run)
    assert plan.num_chunks == run.num_chunks
    by_chunk = [[part for number, _, part in parts(plan) if number == chunk] for chunk in range(run.num_chunks)]
    assert all(each == by_chunk[0] for each in by_chunk)
    worker.release(plan.lease)
    return by_chunk[0]


def test_every_engine_finds_what_one_of_another_size_stored() -> None:
    for ranks in (1, 2, 4, 8):
        bench = Bench(HEADS)
        writers, run = engine(bench, ranks), prompt(3)
        for writer in writers:
            assert found_by(writer, run) == (3 if bench.index.entries.num_sealed == 3 * min(ranks, 4) else 0)
            writer.store(run)
        assert bench.index.entries.num_sealed == 3 * min(ranks, 4), "replicas store a head once"
        for others in (1, 2, 4, 8):
            for rank, reader in enumerate(engine(bench, others)):
                assert found_by(reader, run) == 3
                plan = reader.prepare(run)
                assert (plan.ticket, plan.num_present) == (0, 3)
                mine = Part(0, 1, rank * 4 // others, max(1, 4 // others))
                step = max(1, 4 // ranks)
                heads = range(mine.first_head // step * step, mine.first_head + mine.num_heads, step)
                assert sorted(read_by(reader, run)) == [Part(0, 1, head, step) for head in heads]
        bench.drain()


@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_every_engine_finds_what_one_of_other_stages_stored(stages: int, ranks: int) -> None:
    bench, run = Bench(STAGES), prompt(2)
    for place in range(stages * ranks):
        writer = bench.worker(place, ranks=ranks, stages=stages)
        assert found_by(writer, run) == 0, "some layers are missing"
        writer.store(run)
    for other_stages, other_ranks in ((1, 1), (2, 1), (1, 2), (4, 2)):
        for place in range(other_stages * other_ranks):
            reader = bench.worker(place, ranks=other_ranks, stages=other_stages)
            assert found_by(reader, run) == 2
            assert reader.prepare(run).num_present == 2
            stage, rank = divmod(place, other_ranks)
            mine = {
                (layer, head)
                for layer in range(stage * 4 // other_stages, (stage + 1) * 4 // other_stages)
                for head in range(rank * 2 // other_ranks, (rank + 1) * 2 // other_ranks)
            }
            given = [
                {
                    (layer, head)
                    for layer in range(part.first_layer, part.first_layer + part.num_layers)
                    for head in range(part.first_head, part.first_head + part.num_heads)
                }
                for part in read_by(reader, run)
            ]
            assert {cell for each in given for cell in each} >= mine
            assert all(each & mine for each in given)
    bench.drain()


def test_stages_with_other_pages_for_the_same_layers_are_refused() -> None:
    bench = Bench(STAGES)
    bench.worker(1, stages=2)
    bench.worker(0, stages=4, page=2 * PAGE)  # with other layers
    with pytest.raises(Refused, match="with other pages under the same spec"):
        bench.worker(0, page=2 * PAGE)


def test_states_with_more_of_the_same_rows_are_refused() -> None:
    bench = Bench((m.GroupShape(GroupKind.RECURRENT, 1),))
    worker = bench.worker()
    for rows in (1, 2):
        detail = m.GroupDetail((rows * PAGE,), 8, rows=rows)
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, "e", 0, 1, "none", "none", "model", bench.spec, (detail,))
        if rows == 1:
            worker.ask(request)
        else:
            assert worker.refusal(request) is ErrorCode.BAD_LAYOUT


def test_blocks_that_do_not_divide_a_chunk_are_refused() -> None:
    bench = Bench((m.GroupShape(FULL, 16),), chunk_tokens=64)
    worker, detail = bench.worker(), m.GroupDetail((3 * PAGE,), 8, rows=3)
    request = m.RegisterKVCache(m.PROTOCOL_VERSION, "e", 0, 1, "none", "none", "model", bench.spec, (detail,))
    with pytest.raises(Refused, match="chunks of 64 tokens are not whole blocks of 48"):
        worker.ask(request)


def test_writers_of_different_sizes_that_race_store_a_head_twice_at_most() -> None:
    bench, run = Bench(HEADS), prompt(2)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    first, all_heads, second = left.prepare(run), whole.prepare(run), right.prepare(run)
    assert (first.num_present, all_heads.num_present, second.num_present) == (0, 0, 2)
    whole.commit(all_heads)
    assert read_by(left, run) == [Part(0, 1, 0, 4)], "not its own entry, which is not sealed"
    left.commit(first)
    assert read_by(left, run) == [Part(0, 1, 0, 2)]
    assert read_by(right, run) == [Part(0, 1, 0, 4)]
    assert bench.index.entries.num_sealed == 4
    bench.drain()


def test_a_reader_takes_the_fewest_parts_that_racing_writers_left() -> None:
    """The left heads of all layers are the largest part, but the reader needs all others even with it."""
    bench, run = Bench(STAGES), prompt(2)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    layers = [bench.worker(stage, stages=4) for stage in range(4)]
    plans = [(worker, worker.prepare(run)) for worker in (left, *layers)]
    assert right.prepare(run).num_present == 2
    for worker, plan in plans:
        worker.commit(plan)
    for reader in (whole, right):
        assert sorted(read_by(reader, run)) == [Part(layer, 1, 0, 2) for layer in range(4)]
    assert read_by(left, run) == [Part(0, 4, 0, 1)]
    bench.drain()


def test_parts_that_overlap_are_counted_and_leave_with_their_chunk() -> None:
    bench, run = Bench(HEADS, pages=6), prompt(1)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    plans = left.prepare(run), whole.prepare(run)
    left.commit(plans[0])
    whole.commit(plans[1])
    assert right.store(run).num_present == 1
    assert bench.index.num_overlapping == status_of(bench.depot).counters["entries_overlapping"] == 1
    assert bench.index.extents.used_bytes == 6 * PAGE, "two of its heads twice"
    whole.store(prompt(1, name=1))
    assert found_by(left, run) == 0
    assert bench.index.extents.used_bytes == 4 * PAGE, "neither part of the chunk is left"
    assert bench.index.num_overlapping == 1
    bench.drain()


def test_half_a_plane_leaves_when_room_is_needed_and_parts_beside_each_other_do_not_overlap() -> None:
    bench = Bench(HEADS, pages=6)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    left.store(prompt(1))
    for name in (1, 2):
        assert whole.store(prompt(1, name=name)).ticket
    assert bench.index.extents.used_bytes == 4 * PAGE
    assert right.store(prompt(1)).ticket
    assert found_by(left, prompt(1)) == 0
    left.store(prompt(1))
    assert found_by(left, prompt(1)) == 1
    assert bench.index.num_overlapping == 0
    bench.drain()


def test_entries_that_are_being_written_cover_nothing() -> None:
    bench, run = Bench(HEADS), prompt(1)
    left, right = engine(bench, 2)
    plan = left.prepare(run)
    right.store(run)
    index, whole = bench.index, Part(0, 1, 0, 4).number
    record = next(record for record in index.table.records() if record.state == SEALED)
    node, place = index.entries.node_of(record.entry), PartPlace(0, whole, 4 * PAGE, record.check)
    assert index.entries.has(node, 0, whole)
    assert index.entries.cover(node, place) == []
    left.commit(plan)
    assert [part for part, _ in index.entries.cover(node, place)] == [Part(0, 1, 2, 2).number, Part(0, 1, 0, 2).number]
    assert index.entries.cover(node, replace(place, check=record.check ^ 1)) == [], "other pages"
    bench.drain()


def test_half_a_plane_is_invisible_and_the_next_writer_stores_its_own_part() -> None:
    bench, run = Bench(HEADS), prompt(2)
    left, right = engine(bench, 2)
    left.store(run)
    assert right.prepare(run).ticket
    bench.depot.end_session(right.session)
    bench.depot.end_process(right.writer)
    (whole,) = engine(bench, 1)
    successor = bench.successor()
    assert successor.visibility.match(successor.spaces[0], run.digests)[0] == found_by(whole, run) == 0
    assert whole.store(run).num_present == 0
    assert found_by(whole, run) == 2
    bench.drain()


def test_a_corrupt_part_hides_a_chunk_only_if_nobody_else_has_its_heads() -> None:
    bench, run = Bench(HEADS), prompt(2)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    plans = left.prepare(run), whole.prepare(run)
    left.commit(plans[0])
    whole.commit(plans[1])

    def lose(part: Part) -> None:
        index = bench.index
        node = index.nodes.find(index.spaces[0], run.digests[:32], 0)
        assert node is not None
        entry = index.entries.find(node, 0, part.number)
        assert entry is not None
        assert bench.depot.remove_corrupt(entry, index.table.header(entry))
        index.check_integrity()

    lose(Part(0, 1, 0, 2))
    assert found_by(right, run) == 2
    assert read_by(left, run.slice(0, 1)) == [Part(0, 1, 0, 4)]
    lose(Part(0, 1, 0, 4))
    assert found_by(whole, run) == 0
    right.store(run)
    assert found_by(whole, run) == 0
    left.store(run)
    assert found_by(whole, run) == 2
    bench.drain()


def test_heads_of_one_group_are_not_those_of_another() -> None:
    bench, run = Bench(TWO_GROUPS), prompt(2)
    (whole,), (left, right) = engine(bench, 1), engine(bench, 2)
    whole.store(run, 2, 0)
    assert found_by(whole, run) == 0
    plan = left.store(run, 2, 2)
    assert (plan.num_present, {group for _, group, _ in parts(plan)}) == (2, {1})
    assert found_by(whole, run) == 0
    right.store(run, 2, 2)
    assert found_by(whole, run) == 2
    bench.drain()


def test_a_lease_of_an_engine_keeps_what_one_of_another_size_stored() -> None:
    bench = Bench(HEADS, pages=8)
    (whole,), (left, _) = engine(bench, 1), engine(bench, 2)
    whole.store(prompt(2))
    lease = left.retrieve(prompt(2)).lease
    assert whole.store(prompt(1, name=1)).num_declined == 1
    left.release(lease)
    assert whole.store(prompt(1, name=1)).ticket
    bench.drain()


def test_a_record_whose_part_is_not_in_its_plane_is_dropped() -> None:
    bench, run = Bench(HEADS), prompt(2)
    (whole,) = engine(bench, 1)
    whole.store(run)
    for part in (Part(0, 1, 3, 2), Part(1), Part(0, 2)):
        memory = bytearray(bench.memory)
        table = IndexTable(memory, bench.num_records)
        fields = next(record for record in table.records() if record.depth == 1)
        table.free([fields.entry])
        write_record(
            table,
            fields.entry,
            space=0,
            group=0,
            part=part.number,
            offset=fields.offset,
            num_bytes=PAGE,
            key=fields.key,
            parent=fields.parent,
            depth=1,
            check=fields.check,
            label=fields.label,
            writer=fields.writer,
            owner=fields.owner,
        )
        table.seal([fields.entry], 0)
        successor = bench.successor(memory)
        assert successor.visibility.match(successor.spaces[0], run.digests)[0] == 1
        successor.check_integrity()
        assert successor.entries.num_sealed == 1


def test_an_engine_of_256_heads_can_be_read_one_by_one() -> None:
    bench = Bench((m.GroupShape(FULL, 1, heads=MAXIMUM_HEADS),), pages=512)
    (whole,) = engine(bench, 1)
    whole.store(prompt(1))
    last = bench.worker(MAXIMUM_HEADS - 1, ranks=MAXIMUM_HEADS)
    assert read_by(last, prompt(1)) == [Part(0, 1, 0, MAXIMUM_HEADS)]


def test_a_retrieve_names_a_bounded_number_of_extents() -> None:
    bench = Bench((m.GroupShape(FULL, 1, heads=64),), pages=8192, num_records=8192)
    ranks, (whole,) = engine(bench, 64), engine(bench, 1)
    for start in range(0, 96, 32):
        for rank in ranks:
            rank.store(prompt(96).slice(start, start + 32))
    assert whole.lookup(prompt(96)).num_chunks == 96
    plan = whole.retrieve(prompt(96))
    assert plan.num_chunks == m.MAXIMUM_RETRIEVE_EXTENTS // 64
    assert len(parts(plan)) == m.MAXIMUM_RETRIEVE_EXTENTS


@pytest.mark.promise(20)
def test_pages_that_are_not_cells_of_the_part_are_refused() -> None:
    bench = Bench(HEADS)
    (whole,) = engine(bench, 1)
    for detail, text in (
        (m.GroupDetail((PAGE,), 8, part=Part(0, 1, 3, 2).number), "Part"),
        (m.GroupDetail((PAGE + 2,), 8, part=Part(0, 1, 0, 4).number), "not 1 rows"),
        (m.GroupDetail((PAGE,), 8, part=Part(0, 1, 0, 4).number, rows=3), "not 3 rows"),
        (m.GroupDetail((PAGE,), 8, part=Part(0, 1, 0, 4).number), "other pages"),
    ):
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, "e", 0, 1, "none", "none", "model", bench.spec, (detail,))
        assert whole.refusal(request) is ErrorCode.BAD_LAYOUT, text
    huge = m.CacheSpec(1, (m.GroupShape(FULL, 1, layers=65_536, heads=2),), "bytes")
    assert whole.refusal(m.RegisterScheduler(m.PROTOCOL_VERSION, "e", "model", huge)) is ErrorCode.BAD_LAYOUT
