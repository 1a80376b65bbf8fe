"""The simulation, compared with models that share no code with it and with the real index."""

import json
import os
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.features.estimates.feature import Ends, HitRateCurve
from kvdepot.index.entries import NewRun, PartPlace
from kvdepot.index.eviction import POLICIES
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable
from kvdepot.wire.messages import CacheSpec, GroupShape
from kvdepot_plan.plot import colors_of, curves_as_svg
from kvdepot_plan.simulate import (
    BELADY,
    BYTES_PER_TOKEN,
    UNLIMITED,
    SimulationRow,
    SimulationTable,
    Workload,
    parse_pool_sizes,
    replay,
    simulate,
)
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace

BYTES = 8  # per token, so that one chunk is one extent
CHUNK = BLOCK_TOKENS * BYTES
PAGE = 4096
PLACE = PartPlace(0, 0, PAGE, 0)

Prompts = list[list[int]]
# Many requests for few chunks, so that chunks are requested again after evictions.
prompts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=60) | st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=30, max_size=60
)
capacities = st.integers(1, 20)


def requests_of(prompts: Sequence[Sequence[int]], last_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Return requests whose last block has `last_tokens`."""
    return [TraceRequest(0, (len(ids) - 1) * BLOCK_TOKENS + last_tokens, 1, tuple(ids)) for ids in prompts]


def prefixes(prompt: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(prompt[: end + 1]) for end in range(len(prompt))]


def hits_without_limit(prompts: Prompts) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    found: list[int] = []
    for prompt in prompts:
        found.append(sum(prefix in seen for prefix in prefixes(prompt)))
        seen.update(prefixes(prompt))
    return found


def replay_index(workload: Workload, ends: Sequence[int], policy: str, capacity: int) -> tuple[list[int], int]:
    """Return the chunks that each request finds and the number of evicted chunks, with the real index and estimates."""
    index = ChunkIndex(ExtentAllocator(capacity * PAGE), IndexTable.in_memory(capacity), policy)
    hit_rates = HitRateCurve(capacity * PAGE, preference=index.preference)
    index.watchers.all.append(Ends(hit_rates))
    space = index.space(CacheSpec(1, (GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes"))
    found: list[int] = []
    for path, packed, is_end in zip(workload.paths, workload.packed, ends, strict=True):
        hit_rates.looked_up(packed, PAGE)
        hits, nodes = index.visibility.match(space, packed)
        found.append(hits)
        parent = NO_NODE
        if hits:
            parent = nodes[0]
            sum(index.shares.used(parent) or ())
        run = NewRun(space, b"".join(workload.digests[name] for name in path[hits:]), hits, parent)
        begun, _ = index.reserve(run, [(chunk, PLACE) for chunk in range(len(path) - hits)])
        nodes = index.seal([extent[0] for _, _, extent in begun])
        parent = nodes[-1] if nodes else parent  # if a prompt is longer than the pool, its beginning stays
        if is_end and parent != NO_NODE:
            sum(index.shares.end_session(parent, lambda _label: True))
    return found, index.evictor.num_evicted


# Hints change a long prefix in steps.
long_prompts_of = st.lists(st.lists(st.integers(0, 1), min_size=45, max_size=60), min_size=3, max_size=8)


@example([[1, 0], [1, 0], [0, 0, 0], [1, 0, 0, 0], [0], [2], [0]], 3, 0)  # a request that does not fit
@given(prompts_of | long_prompts_of, capacities | st.integers(50, 300), st.integers(0, 2**60))
def test_without_records_and_extents_it_is_what_the_real_index_does(prompts: Prompts, capacity: int, ends: int) -> None:
    workload = Workload.of(requests_of(prompts))
    for hints in (bytearray(len(prompts)), bytearray(ends >> number & 1 for number in range(len(prompts)))):
        for policy in POLICIES:
            assert replay(workload, policy, capacity, hints) == replay_index(workload, hints, policy, capacity)


def naive_lru(prompts: Prompts, capacity: int) -> tuple[int, int]:
    """Return hits and evictions of a set of prefixes that evicts its least recently used leaf."""
    last_use: dict[tuple[int, ...], int] = {}
    hits = evictions = 0
    for now, prompt in enumerate(prompts):
        path = prefixes(prompt)
        found = sum(prefix in last_use for prefix in path)
        hits += found
        stored = path[:found]
        for prefix in path[found:]:
            if len(last_use) == capacity:
                parents = {other[:-1] for other in last_use}
                leaves = [other for other in last_use if other not in parents and other not in path]
                if not leaves:
                    break
                del last_use[min(leaves, key=last_use.__getitem__)]
                evictions += 1
            stored.append(prefix)
            last_use[prefix] = now
        last_use.update(dict.fromkeys(stored, now))
    return hits, evictions


def row(prompts: Prompts, policy: str, capacity: int) -> SimulationRow:
    policies = [policy] if policy in POLICIES else []
    return simulate(requests_of(prompts), [capacity * CHUNK], policies, BYTES).row(policy, capacity * CHUNK)


@given(prompts_of, st.integers(1, BLOCK_TOKENS), st.sampled_from(sorted(POLICIES)))
def test_pool_that_holds_everything_hits_all_that_came_before(prompts: Prompts, last: int, policy: str) -> None:
    requests = requests_of(prompts, last)
    found = hits_without_limit(prompts)
    tokens = sum(min(n * BLOCK_TOKENS, r.input_length) for n, r in zip(found, requests, strict=True))
    unique = len({prefix for prompt in prompts for prefix in prefixes(prompt)})
    table = simulate(requests, [unique * CHUNK], [policy], BYTES)
    assert table.unique_chunks == unique
    for name in (policy, BELADY, UNLIMITED):
        found_row = table.row(name, unique * CHUNK)
        assert (found_row.hit_tokens, found_row.hit_chunks, found_row.evictions) == (tokens, sum(found), 0)


@given(prompts_of, capacities)
def test_lru_is_that_of_a_naive_model(prompts: Prompts, capacity: int) -> None:
    simulated = row(prompts, "lru", capacity)
    assert (simulated.hit_chunks, simulated.evictions) == naive_lru(prompts, capacity)


@given(prompts_of, capacities, st.sampled_from(sorted(POLICIES)))
def test_no_policy_beats_belady_nor_belady_the_ceiling(prompts: Prompts, capacity: int, policy: str) -> None:
    best = row(prompts, BELADY, capacity).hit_chunks
    assert row(prompts, policy, capacity).hit_chunks <= best <= sum(hits_without_limit(prompts))


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=7), st.integers(1, 3))
def test_belady_is_the_best_of_all_choices(prompts: Prompts, capacity: int) -> None:
    best: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}  # by set of kept prefixes: the most hits so far
    for prompt in prompts:
        path = prefixes(prompt)
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for kept, hits in best.items():
            hits += next((n for n, prefix in enumerate(path) if prefix not in kept), len(path))
            for choice in subsets(sorted(kept.union(path)), capacity):
                following[choice] = max(hits, following.get(choice, 0))
        best = following
    assert row(prompts, BELADY, capacity).hit_chunks == max(best.values())


def subsets(items: Sequence[tuple[int, ...]], size: int) -> list[frozenset[tuple[int, ...]]]:
    return [frozenset(choice) for choice in combinations(items, min(size, len(items)))]


def test_same_block_after_another_prefix_is_another_chunk() -> None:
    assert row([[1, 2], [3, 2], [1, 2]], "lru", 4).hit_chunks == 2


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_prompt_longer_than_the_pool_leaves_its_beginning(policy: str) -> None:
    found = row([[1, 2, 3, 4], [1, 2, 3, 4]], policy, 2)
    assert (found.hit_chunks, found.evictions) == (2, 0)


def test_pool_smaller_than_a_chunk_hits_nothing() -> None:
    table = simulate(requests_of([[1], [1]]), [CHUNK // 2], bytes_per_token=BYTES)
    assert [found.hit_chunks for found in table.rows if found.policy != UNLIMITED] == [0, 0, 0, 0]


def test_default_sizes_are_shares_of_what_all_chunks_take() -> None:
    table = simulate(requests_of([[n] for n in range(100)]))
    assert table.unique_bytes == 100 * BLOCK_TOKENS * BYTES_PER_TOKEN
    sizes = [found.pool_bytes for found in table.rows if found.policy == "lru"]
    assert sizes == [table.unique_bytes * percent // 100 for percent in (5, 10, 20, 40, 80)]


def test_rows_are_told_as_they_come() -> None:
    told: list[SimulationRow] = []
    table = simulate(requests_of([[1], [1]]), [2 * CHUNK], bytes_per_token=BYTES, on_row=told.append)
    assert tuple(told) == table.rows
    assert {found.policy for found in told if found.reachable} == set(POLICIES)


def test_table_for_people_has_a_column_for_each_size() -> None:
    text = simulate(
        requests_of([[1, 2], [3], [1, 2]]), parse_pool_sizes("8KiB,12KiB"), bytes_per_token=BYTES
    ).describe()
    cells = {line.split("  ")[0]: line.split()[-2:] for line in text.splitlines() if "%" in line}
    assert cells == {
        "of all chunks": ["66.7%", "100.0%"],
        "auto": ["20.0%", "40.0%"],
        "lru": ["20.0%", "40.0%"],
        "arc": ["20.0%", "40.0%"],
        "belady *": ["40.0%", "40.0%"],
        "unlimited *": ["40.0%", "40.0%"],
    }
    assert "no server reaches these" in text


def test_table_for_machines_is_json() -> None:
    table = json.loads(json.dumps(simulate(requests_of([[1], [1]]), [CHUNK], ["lru"], BYTES).as_dict()))
    assert table["unique_bytes"] == CHUNK
    assert table["rows"][-1] == {
        "policy": "lru",
        "pool_bytes": CHUNK,
        "reachable": True,
        "prompt_tokens": 2 * BLOCK_TOKENS,
        "hit_rate": 0.5,
        "hit_tokens": BLOCK_TOKENS,
        "hit_chunks": 1,
        "evictions": 0,
    }


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_sessions_that_say_when_they_end_leave_room_for_the_others(policy: str) -> None:
    prompts = [[1, 2], [3, 4], [5, 6], [1, 2]]
    hits = [
        simulate(requests_of(prompts), [4 * CHUNK], [policy], BYTES, share).row(policy, 4 * CHUNK).hit_chunks
        for share in (0.0, 1.0)
    ]
    assert (hits, row(prompts, BELADY, 4).hit_chunks) == ([0, 2], 2)


def test_impossible_simulations_are_refused_in_words() -> None:
    requests = requests_of([[1]])
    with pytest.raises(ConfigError, match="no eviction policy 'fifo': there are arc, auto, lru"):
        simulate(requests, [CHUNK], ["fifo"])
    with pytest.raises(ConfigError, match="above 0"):
        simulate(requests, [0])
    with pytest.raises(ConfigError, match="above 0"):
        simulate(requests, [CHUNK], bytes_per_token=0)
    with pytest.raises(ConfigError, match="is not a size"):
        parse_pool_sizes("4GiB,many")
    with pytest.raises(ConfigError, match="give a number from 0 to 1"):
        simulate(requests, [CHUNK], session_ends=2)
    with pytest.raises(TraceError, match="no requests"):
        simulate([])


@pytest.mark.skipif(
    "KVDEPOT_TRACE" not in os.environ, reason="KVDEPOT_TRACE does not name Mooncake's conversation trace"
)
def test_production_trace_has_the_known_hit_rates() -> None:
    requests = list(read_trace(Path(os.environ["KVDEPOT_TRACE"])))
    chunk = BLOCK_TOKENS * BYTES_PER_TOKEN
    sizes = [182_790 * percent // 100 * chunk for percent in (5, 10, 20)]
    table = simulate(requests, sizes)
    assert (table.num_requests, table.unique_chunks) == (12_031, 182_790)
    of_chunks = {
        policy: [round(table.row(policy, size).hit_chunks / table.num_chunks, 3) for size in sizes]
        for policy in ("lru", "arc", BELADY)
    }
    # Measured earlier with another simulator, as shares of the chunks. The ceiling is a share of the tokens.
    assert of_chunks["lru"] == [0.196, 0.279, 0.345]
    assert of_chunks["arc"] == pytest.approx([0.212, 0.284, 0.320], abs=0.004)
    assert of_chunks[BELADY] == [0.366, 0.366, 0.366]
    assert table.row(UNLIMITED, table.unique_bytes).hit_rate == pytest.approx(0.374, abs=5e-4)


def table_of(rates: dict[int, dict[str, float]]) -> SimulationTable:
    rows = [
        SimulationRow(policy, size, True, 1000, round(1000 * rate), 0, 0)
        for size, each in rates.items()
        for policy, rate in each.items()
    ]
    rows.append(SimulationRow(UNLIMITED, 40, False, 1000, 500, 0, 0))
    return SimulationTable(3, 1000, 10, 10, 4, tuple(rows))


def test_a_policy_that_is_nearly_the_best_everywhere_is_recommended_and_else_the_best_of_each_size() -> None:
    near = table_of({10: {"lru": 0.2, "arc": 0.205}, 20: {"lru": 0.3, "arc": 0.25}})
    assert near.recommendation() == "recommended: --policy lru, at most one point below the best at every size"
    far = table_of({10: {"lru": 0.2, "arc": 0.25}, 20: {"lru": 0.3, "arc": 0.25}})
    assert far.recommendation() == "recommended: --policy arc from 10 B on, --policy lru from 20 B on"


def test_a_curve_shows_through_another_one_of_the_same_values() -> None:
    same = [(1.0, 0.45), (2.0, 0.45)]
    picture = ElementTree.fromstring(curves_as_svg("title", [("first", same), ("second", same), ("third", same)]))
    lines = [curve.attrib for curve in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [line["stroke-dasharray"] for line in lines] == ["none", "8 4", "2 4"], "the whole one is drawn first"
    assert len({line["stroke"] for line in lines}) == 3


def test_a_name_has_one_color_in_all_pictures_and_the_axis_has_round_steps() -> None:
    few, more = colors_of(["heads", "deviation", "mixkq"]), colors_of(["heads", "deviation", "query", "mixkq"])
    assert few.items() <= more.items()
    assert len(set(more.values())) == 4
    assert len(set(colors_of([str(number) for number in range(10)]).values())) == 10
    for most in (0.42, 0.5):
        picture = curves_as_svg("title", [("one", [(1.0, most)])])
        assert re.findall(r'text-anchor="end">(\d+%)<', picture) == ["0%", "10%", "20%", "30%", "40%", "50%"]


def test_the_picture_has_a_curve_for_each_policy() -> None:
    picture = ElementTree.fromstring(table_of({10: {"lru": 0.2, "arc": 0.25}, 20: {"lru": 0.3, "arc": 0.25}}).plot())
    namespace = "{http://www.w3.org/2000/svg}"
    assert {"lru", "arc", UNLIMITED} <= {text.text for text in picture.iter(f"{namespace}text")}
    assert [len(curve.get("points", "").split()) for curve in picture.iter(f"{namespace}polyline")] == [2, 2, 2]
    for curve in picture.iter(f"{namespace}polyline"):
        places = [float(place.split(",")[0]) for place in curve.get("points", "").split()]
        assert 0 < places[0] < places[1] < 720
