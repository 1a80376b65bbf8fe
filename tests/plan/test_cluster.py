"""Nodes, routers and a shared tier over a trace, checked with hand-made traffic and another simulator's figures."""

import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot_plan.cluster import (
    ENGINE_AWARE,
    KV_AWARE,
    LEAST_LOADED,
    RANDOM,
    ROUTINGS,
    STICKY,
    UNLIMITED,
    Cluster,
    ClusterTable,
    parse_routings,
    parse_shared_sizes,
    simulate_cluster,
)
from kvdepot_plan.simulate import UNLIMITED as UNLIMITED_POOL
from kvdepot_plan.simulate import simulate
from kvdepot_plan.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace

CHUNK = Cluster(1).chunk_bytes


def request(second: float, *ids: int) -> TraceRequest:
    """Return a prompt of whole blocks and one more token, so that all its blocks can be found."""
    return TraceRequest(second * 1000, len(ids) * BLOCK_TOKENS + 1, 1, (*ids, 1 << 40))


def conversations(num_turns: int, num_conversations: int) -> list[TraceRequest]:
    """Return conversations that begin with block 0. Each turn is the previous one and one more block."""
    return [
        request(20 * (turn * num_conversations + number), 0, *(1 + number * 100 + place for place in range(turn + 1)))
        for turn in range(num_turns)
        for number in range(num_conversations)
    ]


def test_one_node_finds_what_one_pool_finds() -> None:
    trace = conversations(10, 5)
    counted = trace[int(len(trace) * 0.2) :]
    row = simulate_cluster(trace, Cluster(1), (1000 * CHUNK,), (RANDOM,)).rows[0]
    every = simulate(trace, (1000 * CHUNK,), ("lru",))
    cold = simulate(trace[: len(trace) - len(counted)], (1000 * CHUNK,), ("lru",))
    hit_tokens = every.row("lru", 1000 * CHUNK).hit_tokens - cold.row("lru", 1000 * CHUNK).hit_tokens
    assert row.hit_rate == pytest.approx(hit_tokens / sum(each.input_length for each in counted))


def test_sticky_and_kv_aware_find_what_random_scatters() -> None:
    table = simulate_cluster(conversations(12, 16), Cluster(8), (1000 * CHUNK,))
    hits = {row.routing: row.hit_rate for row in table.rows}
    assert hits[STICKY] > hits[RANDOM] + 0.2
    assert hits[KV_AWARE] > hits[LEAST_LOADED] + 0.2


def test_a_router_that_is_never_told_of_evictions_sends_prompts_where_nothing_is_left() -> None:
    # A node computes the conversation, then long prompts evict it from every pool. Its next turn goes to the node where
    # the router expects it, and the turn after that finds it only on this node.
    trace = [request(0, 0, 1, 2, 3)]
    trace += [request(10 + number, *range(100 * number, 100 * number + 8)) for number in range(1, 9)]
    trace += [request(100 + 50 * turn, 0, 1, 2, 3) for turn in range(4)]
    exact = simulate_cluster(trace, Cluster(2), (8 * CHUNK,), (KV_AWARE,)).rows[0]
    add_only = simulate_cluster(trace, Cluster(2), (8 * CHUNK,), (ENGINE_AWARE,)).rows[0]
    assert exact.hit_rate >= add_only.hit_rate
    assert exact.mean_seconds <= add_only.mean_seconds


def test_a_router_that_knows_nodes_finds_what_a_neighbour_engine_stored() -> None:
    trace = conversations(12, 16)
    engines = simulate_cluster(trace, Cluster(2, engines_per_node=4), (1000 * CHUNK,), (ENGINE_AWARE, KV_AWARE))
    assert engines.row(KV_AWARE, 1000 * CHUNK).mean_seconds <= engines.row(ENGINE_AWARE, 1000 * CHUNK).mean_seconds


def test_an_unlimited_tier_finds_what_one_unlimited_pool_finds_whatever_routes() -> None:
    trace = conversations(10, 5)
    table = simulate_cluster(trace, Cluster(4), (3 * CHUNK,), ROUTINGS, (UNLIMITED,))
    one = simulate_cluster(trace, Cluster(1), (UNLIMITED,), (RANDOM,)).rows[0]
    assert {row.hit_rate for row in table.rows} == {one.hit_rate}
    assert all(row.tier_hit_rate > 0 for row in table.rows)


def test_peers_bring_what_other_nodes_hold_and_only_if_that_is_sooner_than_computing() -> None:
    trace = conversations(12, 16)
    slow = Cluster(4, prefill_tokens_per_second=10_000)
    peers = simulate_cluster(trace, slow, (1000 * CHUNK,), (RANDOM,), peers=(False, True))
    without, beside = (peers.row(RANDOM, 1000 * CHUNK, has_peers=each) for each in (False, True))
    one = simulate_cluster(trace, Cluster(1), (UNLIMITED,), (RANDOM,)).rows[0]
    assert without.hit_rate < beside.hit_rate == pytest.approx(one.hit_rate)
    assert beside.mean_seconds < without.mean_seconds
    # At 128 KiB a token, 10 GB/s are 76,000 tokens a second.
    fast = Cluster(4, prefill_tokens_per_second=80_000)
    assert simulate_cluster(trace, fast, (1000 * CHUNK,), (RANDOM,), peers=(True,)).rows[0].peer_hit_rate == 0


def test_an_evicted_chunk_is_read_from_no_peer() -> None:
    trace = [request(100 * number, number % 2, 10 + number % 2) for number in range(20)]  # one evicts the other
    table = simulate_cluster(trace, Cluster(1), (2 * CHUNK,), (RANDOM,), peers=(True,))
    assert table.rows[0].hit_rate == 0


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([0, 4 * CHUNK, UNLIMITED]),
)
def test_no_routing_finds_more_than_one_pool_without_limit(
    prompts: list[list[int]], nodes: int, engines: int, chunks: int, shared: int
) -> None:
    trace = [request(number, *ids) for number, ids in enumerate(prompts)]
    one = simulate_cluster(trace, Cluster(1), (UNLIMITED,), (RANDOM,)).rows[0].hit_rate
    table = simulate_cluster(trace, Cluster(nodes, engines), (chunks * CHUNK,), ROUTINGS, (shared,), (False, True))
    for row in table.rows:
        assert 0 <= row.tier_hit_rate + row.peer_hit_rate <= row.hit_rate + 1e-12 <= one + 2e-12
        assert row.has_peers or row.peer_hit_rate == 0
        assert 0 < row.mean_seconds <= row.p99_seconds or row.p99_seconds > 0


def test_copies_share_the_first_block_and_nothing_else() -> None:
    trace = conversations(4, 4)
    table = simulate(trace, (1000 * CHUNK,), ("lru",))
    copied = simulate_cluster(trace, Cluster(1, copies=3), (1000 * CHUNK,), (RANDOM,))
    assert copied.num_requests == 3 * table.num_requests
    # Like a single trace, each copy finds its own blocks. Only the common block is found by later copies.
    own = simulate_cluster(trace, Cluster(1), (1000 * CHUNK,), (RANDOM,)).rows[0]
    assert copied.rows[0].hit_rate == pytest.approx(own.hit_rate, abs=0.15)
    assert table.row(UNLIMITED_POOL, table.unique_bytes).hit_rate > 0


def test_the_table_and_the_plot_name_every_row() -> None:
    table = simulate_cluster(conversations(3, 3), Cluster(2), (), (STICKY, KV_AWARE), (0, 64 << 30, UNLIMITED))
    text = table.describe()
    assert all(word in text for word in ("sticky", "kv-aware", "none", "64.0 GiB", "unlimited", "2 nodes"))
    ElementTree.fromstring(table.plot())
    assert "kv-aware + unlimited" in table.plot()
    assert "sticky + peers<" in simulate_cluster(conversations(3, 3), Cluster(2), (), (STICKY,), peers=(True,)).plot()
    assert " s</text>" in table.plot(), "times, because the routing that finds most is not the fastest"


def test_arguments_that_cannot_be_are_named() -> None:
    with pytest.raises(ConfigError, match="no routing 'nearest': there are random, least-loaded"):
        parse_routings("sticky,nearest")
    with pytest.raises(ConfigError, match="not a size"):
        parse_shared_sizes("0,much")
    with pytest.raises(ConfigError, match="0 nodes"):
        Cluster(0)
    with pytest.raises(ConfigError, match="one chunk takes"):
        simulate_cluster(conversations(1, 1), Cluster(2), (4096,))
    with pytest.raises(TraceError, match="no requests"):
        simulate_cluster([], Cluster(2))


# Mooncake's conversation trace (FAST'25) on 8 nodes, and eight copies of it on 64, with pools of 2,000 blocks: share of
# the prompt tokens that another simulator found.
ELSEWHERE = {
    8: {
        (RANDOM, 0): 0.081,
        (LEAST_LOADED, 0): 0.081,
        (STICKY, 0): 0.269,
        (KV_AWARE, 0): 0.233,
        (ENGINE_AWARE, 0): 0.226,
        (LEAST_LOADED, UNLIMITED): 0.395,
        (KV_AWARE, UNLIMITED): 0.395,
        (LEAST_LOADED, 8 * 1000 * CHUNK): 0.190,
        (KV_AWARE, 8 * 1000 * CHUNK): 0.255,
        (LEAST_LOADED, 8 * 4000 * CHUNK): 0.350,
    },
    64: {
        (RANDOM, 0): 0.048,
        (LEAST_LOADED, 0): 0.048,
        (STICKY, 0): 0.274,
        (KV_AWARE, 0): 0.204,
        (ENGINE_AWARE, 0): 0.190,
        (LEAST_LOADED, UNLIMITED): 0.394,
        (KV_AWARE, UNLIMITED): 0.394,
        (LEAST_LOADED, 64 * 1000 * CHUNK): 0.189,
    },
}


@pytest.mark.skipif("KVDEPOT_TRACE" not in os.environ, reason="KVDEPOT_TRACE names Mooncake's conversation trace")
@pytest.mark.slow
@pytest.mark.parametrize("nodes", sorted(ELSEWHERE))
def test_a_real_trace_on_many_nodes_finds_what_another_simulator_found(nodes: int) -> None:
    trace = list(read_trace(Path(os.environ["KVDEPOT_TRACE"])))
    tables: dict[int, ClusterTable] = {}
    for (routing, shared), hit_rate in ELSEWHERE[nodes].items():
        tables[shared] = simulate_cluster(
            trace, Cluster(nodes, copies=nodes // 8), (2000 * CHUNK,), (routing,), (shared,)
        )
        assert tables[shared].rows[0].hit_rate == pytest.approx(hit_rate, abs=0.01), (routing, shared)


# The same, with peers.
WITH_PEERS = {
    8: {RANDOM: 0.239, LEAST_LOADED: 0.258, STICKY: 0.273, KV_AWARE: 0.270},
    64: {LEAST_LOADED: 0.259, KV_AWARE: 0.234},
}


@pytest.mark.skipif("KVDEPOT_TRACE" not in os.environ, reason="KVDEPOT_TRACE names Mooncake's conversation trace")
@pytest.mark.slow
@pytest.mark.parametrize("nodes", sorted(WITH_PEERS))
def test_a_real_trace_on_nodes_with_peers_finds_what_another_simulator_found(nodes: int) -> None:
    trace, fleet = list(read_trace(Path(os.environ["KVDEPOT_TRACE"]))), Cluster(nodes, copies=nodes // 8)
    for routing, hit_rate in WITH_PEERS[nodes].items():
        table = simulate_cluster(trace, fleet, (2000 * CHUNK,), (routing,), peers=(True,))
        assert table.rows[0].hit_rate == pytest.approx(hit_rate, abs=0.01), routing


@pytest.mark.skipif("KVDEPOT_TRACE" not in os.environ, reason="KVDEPOT_TRACE names Mooncake's conversation trace")
@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "add_only", "exact"), [(2000, 0.068, 0.099), (8000, 0.159, 0.249)])
def test_a_router_that_knows_nodes_finds_more_than_one_that_hears_from_engines(
    chunks: int, add_only: float, exact: float
) -> None:
    trace = list(read_trace(Path(os.environ["KVDEPOT_TRACE"])))
    fleet = Cluster(8, engines_per_node=4, copies=4)
    table = simulate_cluster(trace, fleet, (chunks * CHUNK,), (ENGINE_AWARE, KV_AWARE))
    assert table.row(ENGINE_AWARE, chunks * CHUNK).hit_rate == pytest.approx(add_only, abs=0.01)
    assert table.row(KV_AWARE, chunks * CHUNK).hit_rate == pytest.approx(exact, abs=0.01)
