# pyright: basic, reportMissingImports=false
"""The scheduler's side without an engine: its claims, loads, stores and holds."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.backends import NO_BLOCK
from kvdepot.client.answers import Lease
from kvdepot.engines.generation import Generation
from kvdepot.features.sessions import operations as sessions
from kvdepot.features.sessions.messages import Hint
from kvdepot.keys import KeyRun, Namespace, PrefixHasher, num_digests
from kvdepot.layout import GroupKind
from kvdepot.wire.operation import Operation, OperatorRequest
from kvdepot_vllm import loads, stores
from kvdepot_vllm.groups import EngineCache, EngineGroup
from kvdepot_vllm.jobs import StepPlan, WorkerReport
from kvdepot_vllm.scheduler import SchedulerSide
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.stores import Stores

FULL = EngineGroup(0, GroupKind.FULL_ATTENTION, 16, 0, ("a",), False, False)
WINDOW = EngineGroup(1, GroupKind.SLIDING_WINDOW, 16, 40, ("b",), False, False)
STATE = EngineGroup(2, GroupKind.RECURRENT, 16, 0, ("c",), False, False)


@dataclass
class Client:
    """A depot that has the first `num_chunks` chunks of every prompt."""

    num_chunks: int = 0
    answers: bool = True
    answers_soon: bool = False  # to a question that waits
    asked: list[int] = field(default_factory=list[int])
    released: list[Lease] = field(default_factory=list[Lease])
    operations: list[OperatorRequest] = field(default_factory=list[OperatorRequest])
    hints: list[Hint] = field(default_factory=list[Hint])
    token_seconds: float = 0.0
    num_pending: int = 0
    announced: list[int] = field(default_factory=list[int])  # tokens ahead of each announcing lookup
    ended: list[str] = field(default_factory=list[str])
    awaited: list[int] = field(default_factory=list[int])  # chunks that each lookup expects of another engine
    peers: list[str] = field(default_factory=list[str])
    handing_over: list[str] = field(default_factory=list[str])
    waits: list[float | None] = field(default_factory=list["float | None"])
    described: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # first chunk, chunks
    wants_tokens: bool = True

    def post(self, make: Any) -> None:
        for request in make(1):
            if isinstance(request, Hint):
                self.hints.append(request)
            elif isinstance(request, Operation):
                self.operations.append(request)
            else:
                self.described.append((request.first_chunk, request.num_chunks))

    def submit_lookup(
        self,
        request_id: str,
        key: KeyRun,
        *,
        joins: bool,
        announces: bool,
        ahead_tokens: int,
        awaits: int,
        hands_over: bool,
        peer: str,
        wait_seconds: float | None,
    ) -> Any:
        assert joins or not announces
        self.waits.append(wait_seconds)
        self.asked.append(key.num_chunks)
        self.awaited.append(awaits)
        self.peers.append(peer)
        if hands_over:
            self.handing_over.append(request_id)
        if announces:
            self.announced.append(ahead_tokens)
        lease = Lease(min(self.num_chunks, key.num_chunks), 7, num_pending=self.num_pending)
        return SimpleNamespace(
            query=lambda: self.answers,
            wait=lambda _seconds: self.answers or self.answers_soon,
            result=lambda: lease,
            cancel=self.cancel,
        )

    def cancel(self) -> None:
        pass

    def end_request(self, request_id: str) -> None:
        self.ended.append(request_id)

    def release(self, lease: Lease) -> None:
        self.released.append(lease)

    def change_weights(self, weights: str) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: str | None = None


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.null_block = self.blocks[0]
        for block in self.blocks[1:]:
            block.block_hash = f"hash {block.block_id}"

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterator[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1

    def held(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}

    @property
    def cached_block_hash_to_block(self) -> set[str]:
        return {block.block_hash for block in self.blocks if block.block_hash is not None}

    def get_num_free_blocks(self) -> int:
        return len(self.blocks) - 1 - len(self.held())


@dataclass
class Scene:
    side: SchedulerSide
    client: Client
    pool: Pool
    clock: list[float]

    def request(self, num_tokens: int, name: str = "r", **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "request_id": name,
            "num_computed_tokens": 0,
            "num_in_flight_tokens": 0,
            "num_prompt_tokens": num_tokens,
            "num_preemptions": 0,
            "skip_reading_prefix_cache": False,
            "resumable": False,
            "kv_transfer_params": None,
            "kv_hints": None,
            "cache_salt": None,
            "session_id": None,
            "lora_request": None,
            "mm_features": [],
            "prompt_embeds": None,
            "prompt_is_token_ids": None,
            "trace_headers": None,
            "num_tokens": num_tokens,
            "all_token_ids": list(range(num_tokens)),
        }
        request: Any = SimpleNamespace(**{**fields, **changes})
        self.side.begin(request)
        return request

    def asks(self, num_tokens: int, name: str = "r", **changes: Any) -> Any:
        """Begin a request and look it up."""
        request = self.request(num_tokens, name, **changes)
        self.side.matched_tokens(request, 0)
        return request

    def step(
        self, request: Any, num_tokens: int, table: Any, offers: Any = (), preempted: set[str] | None = None
    ) -> StepPlan:
        tables = SimpleNamespace(
            boundary_state_offloads={request.request_id: list(offers)}, get_block_ids=lambda _request_id: table
        )
        scheduled: dict[str, int] = {request.request_id: num_tokens} if num_tokens else {}
        step: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled, preempted_req_ids=preempted, kv_connector_block_state=tables
        )
        plan = self.side.plan_step(step)
        request.num_computed_tokens += num_tokens
        return plan

    def idle(self) -> StepPlan:
        """Take a step without requests."""
        step: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
        return self.side.plan_step(step)

    def report(self, plan: StepPlan, num_chunks: int | None = None, **told: Any) -> None:
        ended = {job.number: (1, job.key.num_chunks if num_chunks is None else num_chunks) for job in plan.stores}
        self.side.workers_reported(
            WorkerReport(ended), told.get("finished", ()), told.get("failed", ()), told.get("invalid", set())
        )


def scene(
    *groups: EngineGroup,
    num_chunks: int = 0,
    workers: int = 1,
    volatile: int = 0,
    chunk_tokens: int = 16,
    state_step: int = 0,
    **settings: Any,
) -> Scene:
    groups = groups or (FULL,)
    cache = EngineCache(groups, len(groups), chunk_tokens, 1, "bytes", "test", volatile, state_step)
    clock = [0.0]
    client, pool = Client(num_chunks), Pool(64)
    side = SchedulerSide(
        cache,
        Generation(Namespace("m"), workers),
        Settings(**settings),
        client,  # type: ignore[arg-type]
        workers,  # type: ignore[arg-type]
        describer=SimpleNamespace(describe=lambda *given: (given[-1], SimpleNamespace(requests=lambda *of: [of[-1]]))),  # type: ignore[arg-type]
        clock=lambda: clock[0],
    )
    side.bind_block_pool(pool)  # type: ignore[arg-type]
    return Scene(side, client, pool, clock)


def blocks(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_a_new_lookup_is_awaited_for_a_moment_though_others_are_computed() -> None:
    """Otherwise a hit would come a step later."""
    it = scene(num_chunks=4)
    it.client.answers, it.client.answers_soon = False, True
    busy = it.asks(64, "a")
    it.step(busy, 64, ((1, 2, 3, 4),))
    assert it.side.matched_tokens(it.request(80, "b"), 0) == (64, True)
    it.client.answers_soon, late = False, it.request(80, "c")
    assert it.side.matched_tokens(late, 0) == (None, False)
    it.client.answers_soon = True
    it.clock[0] += 0.001
    assert it.side.matched_tokens(late, 0) == (None, False), "no step waits for it"


def test_at_least_one_token_is_left_to_compute() -> None:
    it = scene(num_chunks=100)
    for num_tokens, expected in ((16, 0), (17, 16), (64, 48), (65, 64)):
        request = it.request(num_tokens, f"r{num_tokens}")
        assert it.side.matched_tokens(request, 0) == (expected, expected > 0)
    assert it.client.asked == [1, 3, 4]


@pytest.mark.promise(36, 48)
def test_the_scheduler_is_told_to_ask_later_and_no_second_lookup_is_sent() -> None:
    it = scene(num_chunks=2)
    it.client.answers = False
    request = it.request(100)
    assert [it.side.matched_tokens(request, 0) for _ in range(50)] == [(None, False)] * 50
    it.client.answers = True
    assert [it.side.matched_tokens(request, 0) for _ in range(50)] == [(32, True)] * 50
    assert len(it.client.asked) == 1


def test_an_old_answer_is_asked_for_again() -> None:
    it = scene()
    request = it.request(100)
    assert it.side.matched_tokens(request, 0) == (0, False)
    it.client.num_chunks = 3
    assert it.side.matched_tokens(request, 0) == (0, False)
    it.clock[0] += 60
    assert it.side.matched_tokens(request, 0) == (48, True)


def test_a_hit_that_vllm_does_not_take_is_given_back() -> None:
    it = scene(num_chunks=4)
    request = it.request(100)
    assert it.side.matched_tokens(request, 16) == (48, True)
    it.side.allocated(request, (blocks(1, 7),), 0)
    assert len(it.client.released) == 1
    assert it.step(request, 0, (blocks(1, 7),)).loads == ()


def test_vllm_may_take_fewer_tokens_than_were_offered() -> None:
    it = scene(num_chunks=4)
    request = it.request(100)
    it.side.matched_tokens(request, 16)
    it.side.allocated(request, (blocks(1, 7),), 32)
    (load,) = it.step(request, 0, (blocks(1, 7),)).loads
    assert (load.key.first_chunk, load.key.num_chunks, load.block_ids, load.skip_tokens) == (1, 2, ([2, 3],), 0)


def test_vllm_may_end_a_load_within_a_chunk() -> None:
    small = EngineGroup(0, GroupKind.FULL_ATTENTION, 4, 0, ("a",), False, False)
    window = EngineGroup(1, GroupKind.SLIDING_WINDOW, 16, 40, ("b",), False, False)
    it = scene(small, window, num_chunks=4)
    request = it.request(100)
    it.side.matched_tokens(request, 16)
    it.side.allocated(request, (blocks(1, 20), [0, 42, 43, 44]), 22)
    plan = it.step(request, 0, ((), ()))
    (load,) = plan.loads
    assert (load.key.first_chunk, load.key.num_chunks, load.skip_tokens) == (1, 2, 0)
    assert load.block_ids == ([5, 6, 7, 8, 9, 10, NO_BLOCK, NO_BLOCK], [42, 43])
    it.report(plan, finished=["r"])
    assert it.side.counters["hit_tokens"] == 22


def test_a_load_that_does_not_fit_is_reported_as_failed() -> None:
    it = scene(FULL, STATE, num_chunks=4)
    request = it.asks(100)
    it.side.allocated(request, (blocks(1, 7), [0, 0, 11, 0]), 40)  # a chunk has no state inside
    (load,) = it.step(request, 0, (blocks(1, 7),)).loads
    assert load.key.num_chunks == 0


def test_a_failed_load_is_not_tried_again_but_after_a_preemption() -> None:
    it = scene(num_chunks=4)
    request = it.asks(100)
    it.side.allocated(request, (blocks(1, 4),), 64)
    it.report(it.step(request, 0, (blocks(1, 4),)), finished=["r"], failed=["r"])
    assert it.side.counters["failed_loads"] == 1
    assert it.side.matched_tokens(request, 0) == (0, False)
    request.num_preemptions = 1
    assert it.side.matched_tokens(request, 0) == (64, True)


def test_a_window_loads_the_blocks_that_it_has() -> None:
    it = scene(FULL, WINDOW, num_chunks=5)
    request = it.asks(100)
    it.side.allocated(request, (blocks(1, 5), [0, 0, 0, 12, 13]), 80)
    (load,) = it.step(request, 0, ((), ())).loads
    assert load.block_ids == ([1, 2, 3, 4, 5], [12, 13])


def test_a_window_may_begin_within_a_chunk() -> None:
    half = EngineGroup(1, GroupKind.SLIDING_WINDOW, 8, 20, ("b",), False, False)
    it = scene(FULL, half, num_chunks=3)
    request = it.asks(60)
    it.side.allocated(request, (blocks(1, 3), [0, 0, 0, 13, 14, 15]), 48)
    (load,) = it.step(request, 0, ((), ())).loads
    assert load.block_ids[1] == [NO_BLOCK, 13, 14, 15]


SHORT = EngineGroup(1, GroupKind.SLIDING_WINDOW, 4, 7, ("b",), False, False)  # its window spans two of four blocks


def test_a_load_fills_the_blocks_of_a_short_window_before_its_end() -> None:
    it = scene(FULL, SHORT, num_chunks=3)
    request = it.asks(60)
    it.side.allocated(request, (blocks(1, 3), [*([0] * 10), 41, 42]), 48)
    (load,) = it.step(request, 0, ((), ())).loads
    assert load.block_ids == ([1, 2, 3], [41, 42])


def test_a_load_behind_a_local_prefix_fills_the_blocks_of_a_short_window() -> None:
    """The blocks 38 and 39 of the prefix stay as they are."""
    it = scene(FULL, SHORT, num_chunks=3)
    request = it.request(60)
    it.side.matched_tokens(request, 16)
    it.side.allocated(request, (blocks(1, 3), [0, 0, 38, 39, *([0] * 6), 41, 42]), 32)
    (load,) = it.step(request, 0, ((), ())).loads
    assert (load.block_ids, load.skip_tokens) == (([2, 3], [41, 42]), 0)


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ([*([0] * 9), 40, 41, 42], 48),  # vLLM has a block that no chunk keeps
        ([*([0] * 9), 40, 41], 44),  # vLLM ends the load within a chunk
        ([*([0] * 10), 41], 48),
    ],
)
def test_a_load_whose_short_window_no_chunk_keeps_is_reported_as_failed(row: list[int], tokens: int) -> None:
    it = scene(FULL, SHORT, num_chunks=3)
    request = it.asks(60)
    it.side.allocated(request, (blocks(1, 3), row), tokens)
    (load,) = it.step(request, 0, ((), ())).loads
    assert load.key.num_chunks == 0


def test_a_load_behind_a_local_prefix_whose_window_no_chunk_keeps_is_reported_as_failed() -> None:
    it = scene(FULL, SHORT, num_chunks=3)
    request = it.request(60)
    it.side.matched_tokens(request, 16)
    it.side.allocated(request, (blocks(1, 3), [0, 0, 38, 39, *([0] * 5), 40, 41, 42]), 32)
    (load,) = it.step(request, 0, ((), ())).loads
    assert load.key.num_chunks == 0


def test_a_store_reads_the_blocks_of_a_short_window_before_each_chunk_s_end() -> None:
    """Of chunk 0, vLLM has freed one of the two blocks. Of chunk 1, it has freed only a block before them."""
    it = scene(FULL, SHORT)
    request = it.asks(60)
    row = [0, 0, 0, 33, 34, 0, 36, 37, 38, 39, 40, 41, 42]
    (job,) = it.step(request, 52, (blocks(1, 4), row)).stores
    assert job.block_ids == ([1, 2, 3], [36, 37, 40, 41])


def test_chunks_that_keep_the_end_of_a_window_have_no_tail_and_a_format_of_their_own() -> None:
    def cache(window: EngineGroup) -> EngineCache:
        return EngineCache((FULL, window), 2, 128, 1, "bfloat16", state_step=16)

    short = [replace(WINDOW, window_tokens=tokens) for tokens in (113, 114)]  # of 7 and 8 of 8 blocks
    assert [cache(window).tail_end(300) for window in short] == [0, 300]
    assert [cache(window).division for window in short] == [" ends8-7", ""]


@pytest.mark.promise(13, 18)
def test_chunks_are_stored_as_they_fill_up_and_held_until_every_worker_is_done() -> None:
    it = scene(workers=2)
    request = it.asks(100)
    first = it.step(request, 40, (blocks(1, 3),))
    assert [job.block_ids for job in first.stores] == [([1, 2],)]
    second = it.step(request, 60, (blocks(1, 7),))
    assert [(job.key.first_chunk, job.block_ids) for job in second.stores] == [(2, ([3, 4, 5, 6],))]
    assert it.client.described == [(0, 2), (2, 4)], "before they are stored: the engine may fall idle then"
    it.report(first, num_chunks=1)
    it.report(second)
    assert it.pool.held() == {1, 2, 3, 4, 5, 6}, "one of two workers has reported"
    it.report(first)
    assert it.pool.held() == {3, 4, 5, 6}
    it.report(second, num_chunks=1)
    assert (it.pool.held(), it.side.has_pending_stores) == (set(), False)


def test_tokens_that_a_draft_model_may_write_again_are_stored_later() -> None:
    it = scene(volatile=3)
    request = it.request(100)
    assert it.step(request, 34, (blocks(1, 3),)).stores[0].key.num_chunks == 1
    assert it.step(request, 1, (blocks(1, 3),)).stores[0].key.first_chunk == 1


def test_a_run_ends_where_a_state_is_offered() -> None:
    it = scene(FULL, STATE)
    request = it.request(100)
    table = (blocks(1, 7), (), [0, 0, 33, 0, 0, 36, 0])
    plan = it.step(request, 96, table, [(2, 33, 48), (2, 36, 96), (2, 37, 100)])
    assert [(job.key.first_chunk, job.key.num_chunks, job.block_ids[1]) for job in plan.stores] == [
        (0, 3, [33]),
        (3, 3, [36]),
    ]
    late = it.step(request, 1, table, [(2, 35, 80)])
    assert [(job.key.first_chunk, job.block_ids) for job in late.stores] == [(4, ([5], [35]))]


def test_nothing_of_a_load_that_has_not_come_is_stored_when_the_request_ends() -> None:
    it = scene(num_chunks=4)
    request = it.asks(100)
    it.side.allocated(request, (blocks(1, 7),), 64)
    it.step(request, 0, (blocks(1, 7),))
    request.num_computed_tokens = 64  # vLLM counts the tokens before they are loaded
    it.side.finished(request, (blocks(1, 7),))
    assert it.pool.held() == set()
    it.report(StepPlan(), finished=["r"])  # by then, its request is gone


def test_chunks_that_fill_up_last_are_stored_at_the_end() -> None:
    it = scene()
    request = it.asks(20)
    it.step(request, 20, (blocks(1, 2),))
    for _ in range(12):  # the ids of tokens under way are not known yet
        assert it.step(request, 1, (blocks(1, 2),)).stores == ()
    request.all_token_ids.extend(range(12))
    request.num_tokens = 32
    it.side.finished(request, (blocks(1, 2),))
    empty: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
    (job,) = it.side.plan_step(empty).stores
    assert (job.key.first_chunk, job.block_ids) == (1, ([2],))


def test_a_vllm_that_gives_no_block_pool_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    it = scene()
    it.side.bind_block_pool(None)  # type: ignore[arg-type]
    for name in "ab":
        request = it.asks(40, name)
        assert (it.step(request, 8, (blocks(1, 3),)).stores, len(caplog.records)) == ((), name == "b")
        assert it.step(request, 32, (blocks(1, 3),)).stores == ()
    (record,) = caplog.records
    assert (record.levelname, "bind_gpu_block_pool" in record.getMessage()) == ("WARNING", True)


def test_no_more_blocks_are_held_than_allowed() -> None:
    it = scene(max_pinned_share=0.1)  # of 64 blocks
    request = it.request(200)
    first = it.step(request, 200, (blocks(1, 13),))
    assert [job.key.num_chunks for job in first.stores] == [6]
    assert it.step(request, 1, (blocks(1, 13),)).stores == ()
    it.report(first)
    assert [job.key.first_chunk for job in it.step(request, 1, (blocks(1, 13),)).stores] == [6]


def test_chunks_without_room_at_the_end_of_their_request_are_stored_later() -> None:
    it = scene(max_pinned_share=0.1)  # of 64 blocks
    request = it.asks(200)
    plans = [it.step(request, 200, (blocks(1, 13),))]
    it.side.finished(request, (blocks(1, 13),))
    assert (it.idle().stores, it.side.has_pending_stores) == ((), True), "the first six hold all blocks that stores may"
    it.report(plans[-1])
    plans.append(it.idle())
    (rest,) = plans[-1].stores
    assert (rest.key.first_chunk, rest.key.num_chunks, rest.block_ids) == (6, 6, (blocks(7, 6),))
    assert it.client.ended == [], "others still wait for these"
    it.report(plans[-1])
    assert (it.client.ended, it.side.has_pending_stores, it.pool.held()) == (["r"], False, set())


@pytest.mark.parametrize("block_hash", [None, "of another prompt"])
def test_chunks_whose_blocks_were_taken_are_not_stored_and_nobody_waits_for_them(block_hash: str | None) -> None:
    it = scene(max_pinned_share=0.1)
    request = it.asks(200)
    plan = it.step(request, 200, (blocks(1, 13),))
    it.side.finished(request, (blocks(1, 13),))
    it.pool.blocks[9].block_hash = block_hash
    it.report(plan)
    plan = it.idle()
    assert [job.block_ids for job in plan.stores] == [(blocks(7, 2),)]
    it.report(plan)
    assert (it.idle().stores, it.client.ended, it.side.has_pending_stores) == ((), ["r"], False)
    assert it.pool.held() == set()


def mixed_prompt() -> dict[str, Any]:
    """Return what makes a request of 200 tokens a mix of tokens and embeddings."""
    torch = pytest.importorskip("torch")
    return {"prompt_embeds": torch.ones(200, 2), "prompt_is_token_ids": [True] * 100 + [False] * 100}


@pytest.mark.promise(84)
def test_a_mixed_prompt_that_vllm_hit_in_its_own_cache_is_not_stored_and_nobody_waits_for_it() -> None:
    it = scene()
    hit, cold = it.asks(200, "hit", **mixed_prompt()), it.asks(200, "cold", **mixed_prompt())
    it.side.matched_tokens(hit, 16)
    assert it.client.ended == ["hit"]
    assert it.step(hit, 184, (blocks(1, 13),)).stores == ()
    assert [job.key.num_chunks for job in it.step(cold, 200, (blocks(14, 13),)).stores] == [12]
    plain = it.request(200, "plain")
    it.side.matched_tokens(plain, 16)
    assert [job.key.num_chunks for job in it.step(plain, 200, (blocks(27, 13),)).stores] == [12]


@pytest.mark.promise(84)
def test_chunks_of_a_mixed_prompt_are_not_stored_after_its_end_on_the_word_of_vllm_s_hashes() -> None:
    it = scene(max_pinned_share=0.1)
    request = it.asks(200, **mixed_prompt())
    plan = it.step(request, 200, (blocks(1, 13),))
    it.side.finished(request, (blocks(1, 13),))
    it.report(plan)
    assert (len(plan.stores), it.idle().stores, it.side.has_pending_stores) == (1, (), False)


@pytest.mark.parametrize("wishes", [{"load": False}, {"store": False}, "nonsense", {"load": "no"}])
def test_a_request_says_what_it_wants(wishes: Any) -> None:
    it = scene(num_chunks=1)
    request = it.request(40, kv_transfer_params={"kvdepot": wishes})
    wants = wishes if isinstance(wishes, dict) else {}
    assert it.side.matched_tokens(request, 0)[1] == (wants.get("load") is not False)
    it.side.allocated(request, (blocks(1, 3),), 0)
    stores = it.step(request, 40, (blocks(1, 3),)).stores
    assert bool(stores) == (wants.get("store") is not False)


def test_hints_go_to_the_depot_when_all_of_the_request_is_there() -> None:
    it = scene()
    request = it.asks(40, kv_transfer_params={"kvdepot": {"session_end": True}})
    plan = it.step(request, 40, (blocks(1, 3),))
    it.side.finished(request, (blocks(1, 3),))
    assert it.client.hints == []
    it.report(plan)
    [hint] = it.client.hints
    assert (num_digests(hint.digests), hint.session_ended, hint.session) == (2, True, "")


@pytest.mark.parametrize(
    ("names", "wishes", "retain_seconds"),
    [
        ({"session_id": "agent"}, {}, 0.0),
        ({}, {"session": "agent"}, 0.0),
        ({"session_id": "agent"}, {"retain_seconds": 90}, 90.0),
    ],
)
def test_the_last_prefix_of_a_session_is_told_when_all_of_it_is_there(
    names: dict[str, Any], wishes: dict[str, Any], retain_seconds: float
) -> None:
    it = scene()
    request = it.asks(40, kv_transfer_params={"kvdepot": wishes}, **names)
    plan = it.step(request, 40, (blocks(1, 3),))
    it.side.finished(request, (blocks(1, 3),))
    it.report(plan)
    told = [(num_digests(hint.digests), hint.session, hint.retain_seconds) for hint in it.client.hints]
    assert told == [(2, "agent", retain_seconds)]


def test_a_request_names_sessions_that_are_moved_when_it_arrives() -> None:
    it = scene()
    wishes = {"retain": {"a": 60}, "prefetch": ["b"], "demote": ["c", "d"], "forget": ["e"], "forget_at_once": ["f"]}
    it.request(40, kv_transfer_params={"kvdepot": wishes})
    tenant = "default"
    assert it.client.operations == [
        sessions.RetainSession("a", 60.0, tenant),
        sessions.PrefetchSession("b", tenant),
        sessions.DemoteSession("c", tenant),
        sessions.DemoteSession("d", tenant),
        sessions.ForgetSession("e", tenant),
        sessions.ForgetSession("f", tenant, at_once=True),
    ]
    it.request(40, "timed", kv_transfer_params={"kvdepot": {"prefetch": {"b": 300}}})
    assert it.client.operations[6:] == [sessions.PrefetchSession("b", tenant, 300.0)]


@pytest.mark.parametrize(
    "wishes",
    [
        {"retain": ["a"]},
        {"retain": {"a": -1}},
        {"prefetch": "a"},
        {"prefetch": {"a": "60"}},
        {"forget": [""]},
        {"forget_at_once": {"a": True}},
        {"demote": ["a"] * 65},
    ],
)
def test_wrong_names_of_sessions_move_none(wishes: dict[str, Any]) -> None:
    it = scene()
    it.request(40, kv_transfer_params={"kvdepot": wishes})
    assert it.client.operations == []


@pytest.mark.parametrize("wishes", [{"session_end": 1}, {"session_id": 5}, {"retain_seconds": True}, {}])
def test_a_bad_hint_is_one_line_in_the_log(wishes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    it = scene()
    request = it.request(40, kv_transfer_params={"kvdepot": wishes})
    it.report(it.step(request, 40, (blocks(1, 3),)))
    it.side.finished(request, (blocks(1, 3),))
    lines = [record for record in caplog.records if record.name == "kvdepot_vllm.params"]
    assert (it.client.hints, len(lines)) == ([], len(wishes))
    other = it.request(40, "other", kv_transfer_params={"kvdepot": {**wishes, "session": "agent"}})
    it.report(it.step(other, 40, (blocks(1, 3),)))
    it.side.finished(other, (blocks(1, 3),))
    assert [hint.session for hint in it.client.hints] == ["agent"]


def test_a_store_that_goes_wrong_stops_nothing_but_itself() -> None:
    it = scene()
    request = it.request(40)
    assert it.step(request, 40, ([1, 999],)).stores == ()
    assert it.step(request, 1, (blocks(1, 3),)).stores == (), "this request is not stored any further"
    assert it.step(it.request(40, "other"), 40, (blocks(1, 3),)).stores


def test_spans_join_the_trace_of_their_request() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    it = scene(num_chunks=4)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    request = it.asks(100, trace_headers=headers)
    it.side.allocated(request, (blocks(1, 4),), 64)
    it.report(it.step(request, 0, (blocks(1, 4),)), finished=["r"])
    request.num_computed_tokens = 64
    it.report(it.step(request, 36, (blocks(1, 7),)))
    aborted = it.request(100, "aborted", trace_headers=headers)
    it.side.finished(aborted, ((),))
    it.report(it.step(it.request(50, "untraced"), 50, (blocks(8, 4),)))
    spans = exporter.get_finished_spans()
    told = [
        (span.name, {k: v for k, v in (span.attributes or {}).items() if k.startswith("kvdepot.")}) for span in spans
    ]
    assert told == [
        ("kvdepot lookup", {"kvdepot.wanted_tokens": 96, "kvdepot.found_tokens": 64}),
        ("kvdepot load", {"kvdepot.tokens": 64, "kvdepot.failed": False}),
        ("kvdepot store", {"kvdepot.tokens": 32, "kvdepot.stored_tokens": 32}),
        ("kvdepot lookup", {"kvdepot.wanted_tokens": 96, "kvdepot.cancelled": True}),
    ]
    assert {format(span.context.trace_id, "032x") for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert {span.parent.span_id for span in spans if span.parent} == {0xB7AD6B7169203331}
    assert {(span.attributes or {})["gen_ai.request.id"] for span in spans} == {"r", "aborted"}


# --- whatever fails ---------------------------------------------------------------------------------------------------

ERRORS = [RuntimeError("a bug"), MemoryError(), TypeError("another")]


def raising(error: Exception) -> Callable[..., Any]:
    def raises(*_: object, **__: object) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["blocks_to_fill", "run", "start_span"])
@pytest.mark.promise(32)
def test_a_load_that_cannot_be_planned_is_given_to_the_workers_as_failed(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM waits for every load for which it allocated blocks."""
    it = scene(num_chunks=4)
    request = it.request(100)
    assert it.side.matched_tokens(request, 0) == (64, True)
    target: Any = {"run": PrefixHasher}.get(place, loads)
    monkeypatch.setattr(target, place, raising(error))
    with contextlib.suppress(type(error)):  # the connector's hooks would catch it here
        it.side.allocated(request, (blocks(1, 7),), 64)
    (load,) = it.step(request, 0, (blocks(1, 7),)).loads
    assert (load.request_id, load.key.num_chunks) == ("r", 4 if place == "start_span" else 0)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", ["blocks_to_store", "run", "start_span", "touch"])
@pytest.mark.promise(18)
def test_a_store_that_cannot_be_planned_holds_no_block(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = scene()
    request, other = it.request(100), it.request(32, "other")
    target: Any = {"run": PrefixHasher, "touch": it.pool}.get(place, stores)
    with monkeypatch.context() as broken:
        broken.setattr(target, place, raising(error))
        assert it.step(request, 100, (blocks(1, 7),)).stores == ()
    assert (it.pool.held(), it.side.has_pending_stores) == (set(), False)
    assert len(it.step(other, 32, (blocks(11, 2),)).stores) == 1, "others are stored as before"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failure_after_a_store_keeps_no_other_store_s_blocks(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = scene()
    request = it.request(100)
    plans = [it.step(request, 48, (blocks(1, 7),)), it.step(request, 48, (blocks(1, 7),))]
    monkeypatch.setattr(it.client, "post", raising(error))
    it.side.workers_reported(WorkerReport({job.number: (1, 3) for plan in plans for job in plan.stores}), (), (), set())
    assert (it.pool.held(), it.side.has_pending_stores) == (set(), False)


def test_a_request_whose_last_store_fails_gives_its_lease_back(monkeypatch: pytest.MonkeyPatch) -> None:
    it = scene(num_chunks=4)
    request = it.asks(100)
    monkeypatch.setattr(Stores, "plan", raising(RuntimeError("a bug")))
    with pytest.raises(RuntimeError):
        it.side.finished(request, (blocks(1, 7),))
    assert len(it.client.released) == 1


# --- computations of other engines ----------------------------------------------------------------------------------


def test_a_request_waits_for_what_others_compute_and_no_longer_than_twice_computing_it() -> None:
    it = scene(num_chunks=2, deadline_seconds=2.0)
    it.client.num_pending, it.client.token_seconds = 3, 0.1
    request = it.request(100)
    assert it.side.matched_tokens(request, 0) == (None, False)
    it.clock[0] = 8.0
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert [lease.num_chunks for lease in it.client.released] == [2, 2], "each question begins anew"
    it.clock[0] = 19.0
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.waits[0] is None
    assert it.client.waits[1:] == pytest.approx([20.05, 12.05, 1.05]), "no question outlives the wait in all"
    it.clock[0] = 20.1
    assert it.side.matched_tokens(request, 0) == (32, True)


def test_a_request_waits_no_longer_than_a_deadline_while_the_pace_is_unknown() -> None:
    it = scene(deadline_seconds=2.0)
    it.client.num_pending = 3
    request = it.request(100)
    it.clock[0] = 1.9
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.waits[1:] == pytest.approx([0.1])
    it.clock[0] = 2.0
    assert it.side.matched_tokens(request, 0) == (0, False)


def test_a_request_of_a_quick_engine_does_not_wait_a_deadline() -> None:
    it = scene(deadline_seconds=2.0)
    it.client.num_pending, it.client.token_seconds = 3, 0.001
    request = it.request(100)
    it.clock[0] = 0.3
    assert it.side.matched_tokens(request, 0) == (0, False)


def test_it_is_done_waiting_when_the_chunks_are_here() -> None:
    it = scene()
    it.client.num_pending = 6
    request = it.request(100)
    assert it.side.matched_tokens(request, 0) == (None, False)
    it.client.num_chunks, it.client.num_pending = 6, 0
    it.side.matched_tokens(request, 0)  # takes the answer to the previous question
    assert it.side.matched_tokens(request, 0) == (96, True)


def test_a_lookup_says_what_is_computed_before() -> None:
    it = scene()
    first = it.request(100, "first")
    it.side.matched_tokens(first, 0)
    it.step(first, 60, (blocks(1, 7),))
    it.request(50, "second")
    assert it.client.announced == [0, 40]


@pytest.mark.parametrize("settings", [{"wait_for_others": False}, {"store": "none"}])
def test_an_engine_that_does_not_store_or_share_announces_nothing(settings: dict[str, Any]) -> None:
    it = scene(**settings)
    request = it.asks(100)
    it.side.finished(request, ([],))
    assert (it.client.asked, it.client.announced, it.client.ended) == ([6], [], [])


def test_an_announcement_is_withdrawn_after_the_last_store() -> None:
    it = scene()
    request = it.asks(48)
    plan = it.step(request, 48, (blocks(1, 3),))
    it.side.finished(request, (blocks(1, 3),))
    assert it.client.ended == []
    it.report(plan)
    assert it.client.ended == ["r"]


def test_the_end_of_an_old_store_does_not_touch_a_new_request_of_the_same_name() -> None:
    """Callers choose request ids, and may reuse one while stores of its first request are under way."""
    it = scene()
    old = it.request(48)
    it.side.matched_tokens(old, 0)
    first = it.step(old, 48, (blocks(1, 3),))
    it.side.finished(old, (blocks(1, 3),))
    new = it.request(64)
    it.side.matched_tokens(new, 0)
    second = it.step(new, 32, (blocks(4, 2),))
    it.report(first, num_chunks=1)
    assert (it.client.ended, it.pool.held()) == ([], {4, 5}), "the new request still announces what it computes"
    third = it.step(new, 32, (blocks(4, 4),))
    assert [(job.key.first_chunk, job.block_ids) for job in third.stores] == [(2, ([6, 7],))]
    it.side.finished(new, (blocks(4, 4),))
    it.report(second)
    assert it.client.ended == []
    it.report(third)
    assert (it.client.ended, it.pool.held()) == (["r"], set())


def key_of(num_tokens: int) -> KeyRun:
    hasher = PrefixHasher(Namespace("m"), 16)
    hasher.extend(list(range(num_tokens)))
    return hasher.run(0, num_tokens // 16)


def test_a_prefill_engine_says_what_it_computed_if_it_is_asked() -> None:
    it = scene()
    told = []
    for name, params in (("a", {"do_remote_decode": True}), ("b", None)):
        request = it.request(50, name, kv_transfer_params=params)
        it.side.matched_tokens(request, 0)
        it.step(request, 50, (blocks(1, 4),))
        told.append(it.side.finished(request, (blocks(1, 4),)))
    assert it.client.handing_over == ["a"]
    prefix = key_of(48).digests[-32:].hex()
    assert told == [
        {"do_remote_prefill": True, "do_remote_decode": False, "kvdepot": {"num_tokens": 48, "prefix": prefix}},
        None,
    ]


def handed(num_tokens: int, **told: Any) -> dict[str, Any]:
    prefix = key_of(num_tokens).digests[-32:].hex()
    return {"do_remote_prefill": True, "kvdepot": {"num_tokens": num_tokens, "prefix": prefix, **told}}


def test_a_decode_engine_waits_for_what_is_handed_over_and_then_computes() -> None:
    it = scene(num_chunks=1)
    request = it.request(100, kv_transfer_params=handed(48, wait_ms=500))
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.asked == [6], "it does not ask in every step"
    assert it.client.awaited == [3], "the depot waits for those, too, if they come from another node"
    it.clock[0] = 0.4
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.announced == []
    it.client.num_chunks = 3
    it.clock[0] = 0.41
    assert it.side.matched_tokens(request, 0) == (48, True)


def test_a_decode_engine_waits_as_long_as_chunks_arrive() -> None:
    it = scene(num_chunks=1, deadline_seconds=2.0)
    request = it.request(100, kv_transfer_params=handed(96))
    it.client.num_pending = 1
    for it.clock[0], it.client.num_chunks in ((0.1, 1), (1.9, 2), (3.7, 3), (5.5, 4), (7.3, 4), (9.2, 4)):
        assert it.side.matched_tokens(request, 0) == (None, False)
    it.clock[0] = 9.4
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.announced == [0], "no chunk came for as long as a deadline"
    assert it.side.matched_tokens(request, 0) == (64, True)


def test_a_decode_engine_computes_what_never_comes() -> None:
    it = scene(num_chunks=1)
    request = it.request(100, kv_transfer_params=handed(48, wait_ms=500))
    it.clock[0] = 0.5
    assert it.side.matched_tokens(request, 0) == (None, False)
    assert it.client.announced == [0], "others may wait for it now"
    assert it.client.awaited == [3, 0]
    assert it.side.matched_tokens(request, 0) == (16, True)
    assert it.side.counters["hand_overs_missed"] == 1


def test_the_last_incomplete_chunk_of_a_prompt_is_handed_over() -> None:
    """With chunks of 128 tokens and blocks of 16, a prompt of 300 has two chunks, and 44 tokens in three blocks."""
    it = scene(chunk_tokens=128, max_pinned_share=1.0)
    request = it.request(300, "prefill", kv_transfer_params={"do_remote_decode": True})
    assert it.side.matched_tokens(request, 0) == (0, False)
    plans = [it.step(request, 256, (blocks(1, 19),)), it.step(request, 44, (blocks(1, 19),))]
    (whole,), (tail,) = (plan.stores for plan in plans)
    assert (whole.key.num_chunks, tail.key.first_chunk, tail.key.num_chunks) == (2, 2, 1)
    assert tail.key.parent == whole.key.digests[-32:]
    assert tail.block_ids == ([17, 18, 19, 19, 19, 19, 19, 19],), "one extent, whatever the prompt fills of it"
    request.num_tokens, request.all_token_ids = 301, list(range(301))  # the output must not change the key
    told: Any = it.side.finished(request, (blocks(1, 19),))
    assert told["kvdepot"] == {"num_tokens": 300, "prefix": tail.key.digests.hex()}
    for plan in plans:
        it.report(plan)
    assert it.client.described == [(0, 2)], "no event names an incomplete block"
    assert it.pool.held() == set()

    decode = scene(chunk_tokens=128, num_chunks=2)
    request = decode.request(300, "decode", kv_transfer_params=told)
    assert decode.side.matched_tokens(request, 0) == (None, False), "the tail is awaited, too"
    assert decode.client.awaited == [3]
    decode.client.num_chunks, decode.clock[0] = 3, 0.01
    assert decode.side.matched_tokens(request, 0) == (299, True), "one token is left to compute"
    decode.side.allocated(request, (blocks(1, 19),), 299)
    (job,) = decode.step(request, 0, (blocks(1, 19),)).loads
    assert job.key.digests == whole.key.digests + tail.key.digests
    assert job.block_ids == (blocks(1, 19) + [NO_BLOCK] * 5,)


def test_an_incomplete_chunk_without_room_is_stored_when_another_store_has_ended() -> None:
    it = scene(chunk_tokens=128, max_pinned_share=0.25)  # of 64 blocks: two chunks
    request = it.asks(300, "prefill", kv_transfer_params={"do_remote_decode": True})
    whole = it.step(request, 300, (blocks(1, 19),))
    assert [job.key.num_chunks for job in whole.stores] == [2]
    assert it.step(request, 1, (blocks(1, 19),)).stores == ()
    it.report(whole)
    (tail,) = it.step(request, 1, (blocks(1, 19),)).stores
    assert tail.block_ids == ([17, 18, 19, 19, 19, 19, 19, 19],)
    assert it.step(request, 1, (blocks(1, 19),)).stores == (), "once"


@pytest.mark.parametrize(
    ("prompt_tokens", "told_tokens", "found", "expected"),
    [
        (256, 256, 2, 255),  # no incomplete chunk: the last chunk without its last token
        (300, 256, 2, 256),  # from an engine that hands over only whole chunks
        (400, 300, 3, 384),  # the prompt continues after the handed-over part
    ],
)
def test_a_decode_engine_takes_whole_chunks_where_no_tail_fits(
    prompt_tokens: int, told_tokens: int, found: int, expected: int
) -> None:
    it = scene(chunk_tokens=128, num_chunks=found)
    params = {"do_remote_prefill": True, "kvdepot": {"num_tokens": told_tokens}}
    request = it.request(prompt_tokens, kv_transfer_params=params)
    assert it.side.matched_tokens(request, 0) == (expected, True)
    assert it.side.counters["hand_overs_missed"] == 0


def test_small_chunks_have_no_tail() -> None:
    it = scene(chunk_tokens=64, max_pinned_share=1.0)
    request = it.asks(300, kv_transfer_params={"do_remote_decode": True})
    jobs = it.step(request, 300, (blocks(1, 19),)).stores
    assert [job.key.num_chunks for job in jobs] == [4]


def test_the_tail_of_a_window_may_need_a_chunk_more() -> None:
    """The window of 150 tokens before token 300 begins in chunk 1, and vLLM has blocks for all its tokens."""
    window = EngineGroup(1, GroupKind.SLIDING_WINDOW, 16, 150, ("b",), False, False)
    params = {"do_remote_prefill": True, "kvdepot": {"num_tokens": 300}}
    it = scene(FULL, window, chunk_tokens=128, num_chunks=3)
    request = it.request(300, kv_transfer_params=params)
    assert it.side.matched_tokens(request, 0) == (299, True)
    row = [0] * 9 + blocks(40, 10)
    it.side.allocated(request, (blocks(1, 19), row), 299)
    (job,) = it.step(request, 0, (blocks(1, 19), row)).loads
    assert job.key.num_chunks == 3
    assert job.block_ids[1] == [NO_BLOCK] + blocks(40, 10) + [NO_BLOCK] * 5, "of chunks 1 and 2"


LARGE_STATE = EngineGroup(1, GroupKind.RECURRENT, 128, 0, ("c",), False, False)


@pytest.mark.parametrize(("prompt_tokens", "state_tokens"), [(300, 288), (256, 224)])
def test_a_hybrid_hands_over_up_to_the_last_state(prompt_tokens: int, state_tokens: int) -> None:
    """vLLM keeps a state at a multiple of 32 before the last token. In these prompts, that is not a chunk's end."""
    full, num_whole = EngineGroup(0, GroupKind.FULL_ATTENTION, 128, 0, ("a",), False, False), state_tokens // 128
    num_blocks = -(-prompt_tokens // 128)
    it = scene(full, LARGE_STATE, chunk_tokens=128, state_step=32, max_pinned_share=1.0)
    request = it.request(prompt_tokens, "prefill", kv_transfer_params={"do_remote_decode": True})
    assert it.side.matched_tokens(request, 0) == (0, False)
    table = (blocks(1, num_blocks), [0] * (num_blocks - 1) + [20])
    jobs = [
        *it.step(request, state_tokens, table, [(1, 30, 128)]).stores,
        *it.step(request, prompt_tokens - state_tokens, table, [(1, 31, state_tokens)]).stores,
    ]
    (tail,) = [job for job in jobs if job.block_ids[1] == [31]]
    assert tail.block_ids[0] == [num_whole + 1], "the block in which the state's token lies"
    told: Any = it.side.finished(request, table)
    assert told["kvdepot"] == {"num_tokens": state_tokens, "prefix": tail.key.digests.hex()}

    decode = scene(full, LARGE_STATE, chunk_tokens=128, state_step=32, num_chunks=num_whole + 1)
    request = decode.request(prompt_tokens, "decode", kv_transfer_params=told)
    assert decode.side.matched_tokens(request, 0) == (state_tokens, True)
    assert decode.client.awaited == [num_whole + 1]
    table = (blocks(1, num_whole + 1), [0] * num_whole + [25])
    decode.side.allocated(request, table, state_tokens)
    (job,) = decode.step(request, 0, table).loads
    assert job.key.digests[-32:] == tail.key.digests
    assert job.block_ids == (blocks(1, num_whole + 1), [25])


def test_a_hybrid_that_offers_no_state_hands_over_whole_chunks() -> None:
    full = EngineGroup(0, GroupKind.FULL_ATTENTION, 128, 0, ("a",), False, False)
    it = scene(full, LARGE_STATE, chunk_tokens=128, state_step=32, max_pinned_share=1.0)
    request = it.asks(300, kv_transfer_params={"do_remote_decode": True})
    table = (blocks(1, 3), [0, 0, 20])
    it.step(request, 300, table, [(1, 30, 256)])
    told: Any = it.side.finished(request, table)
    assert told["kvdepot"]["num_tokens"] == 256

    decode = scene(full, LARGE_STATE, chunk_tokens=128, state_step=32, num_chunks=3)
    request = decode.request(300, kv_transfer_params=told)
    assert decode.client.awaited == [2]
    decode.side.allocated(request, table, 270)
    (job,) = decode.step(request, 0, table).loads
    assert not job.key.num_chunks, "no state is kept at token 270"


@pytest.mark.parametrize(
    "params",
    [
        handed(48, prefix="00" * 32),
        {"do_remote_prefill": False, "kvdepot": {"num_tokens": 48}},
        {"kvdepot": {"num_tokens": 48}},
        {"do_remote_prefill": True, "kvdepot": {"num_tokens": 16, "prefix": "nonsense", "wait_ms": "x"}},
    ],
)
def test_nothing_is_waited_for_that_is_not_handed_over(params: dict[str, Any]) -> None:
    it = scene(num_chunks=1)
    request = it.request(100, kv_transfer_params=params)
    assert it.side.matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize(
    ("role", "extra", "store"),
    [
        ("kv_producer", {}, "prompt"),
        ("kv_producer", {"kvdepot.store": "all"}, "all"),
        ("kv_consumer", {}, "all"),
        ("kv_both", {}, "all"),
    ],
)
def test_a_prefill_engine_stores_prompts(role: str, extra: dict[str, Any], store: str) -> None:
    assert Settings.parse(extra, role=role).store == store


@pytest.mark.parametrize("how", ["abort", "preemption", "reset"])
def test_the_announcement_of_chunks_that_will_not_be_computed_is_withdrawn_at_once(how: str) -> None:
    it = scene()
    request = it.asks(100)
    if how == "abort":
        it.side.finished(request, ([],))
    elif how == "preemption":
        it.step(request, 0, ([],), preempted={"r"})
    else:
        it.side.reset()
    assert it.client.ended == ["r"]


def test_settings_come_in_the_hints_of_a_router_too() -> None:
    def hints(*payloads: Any, kind: str = "kvdepot") -> Any:
        return SimpleNamespace(actions=[SimpleNamespace(action_type=kind, payload=payload) for payload in payloads])

    it = scene(num_chunks=4)
    assert it.side.matched_tokens(it.request(100, kv_hints=hints({"load": False})), 0) == (0, False)
    assert it.side.matched_tokens(it.request(100, "b", kv_hints=hints({"load": False}, kind="other")), 0) == (64, True)
    assert it.side.matched_tokens(it.request(100, "c", kv_hints=hints("load")), 0) == (64, True)
    own = {"kvdepot": {"load": True}}
    request = it.request(100, "d", kv_hints=hints({"load": False, "session_end": True}), kv_transfer_params=own)
    assert it.side.matched_tokens(request, 0) == (64, True)
    it.side.finished(request, (blocks(1, 7),))
    assert it.client.hints[-1].session_ended
    named = {"session_id": "agent", "retain_seconds": 5, "prefetch": ["other"], "forget": ["third"]}
    request = it.request(100, "e", kv_hints=hints(named))
    assert it.side.matched_tokens(request, 0) == (64, True)
    it.side.finished(request, (blocks(1, 7),))
    assert (it.client.hints[-1].session, it.client.hints[-1].retain_seconds) == ("agent", 5.0)
    assert it.client.operations == [
        sessions.PrefetchSession("other", "default"),
        sessions.ForgetSession("third", "default"),
    ]


def test_the_log_tells_each_decision_about_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "kvdepot_vllm")
    it = scene(num_chunks=2, deadline_seconds=2.0)
    it.client.num_pending = 3
    request = it.request(100, "asked")
    assert it.side.matched_tokens(request, 0) == (None, False)
    it.clock[0] = 2.0
    assert it.side.matched_tokens(request, 0) == (32, True)
    it.side.allocated(request, (blocks(1, 7),), 32)
    it.report(it.step(request, 0, (blocks(1, 7),)), finished=["asked"], failed=["asked"])
    it.report(it.step(request, 100, (blocks(1, 7),)), num_chunks=5)
    it.request(100, "declined", kv_transfer_params={"kvdepot": {"load": False}})
    told = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    lookup = "request asked: lookup of 6 chunks (announces them: True, awaits 0 of a prefill engine)"
    assert told == [
        lookup,
        "request asked: pending, the depot has 2 of 6 chunks and others bring up to 3: waits 2.000 s at most",
        lookup,
        "request asked: the depot has 2 of 6 chunks",
        "request asked: load of tokens 0 to 32 begins",
        "request asked: the load failed, its tokens are recomputed",
        "request asked: store 1 of chunks 0 to 6 begins",
        "request asked: a store of 6 chunks from 0 on ended, 1 were cut",
        "request declined: no lookup, as it may not load",
    ]


def test_the_log_names_the_namespace_again_once_the_weights_are_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvdepot_vllm")

    def named(**settings: Any) -> list[str]:
        caplog.clear()
        it = scene(**settings)
        it.side.log_namespace()
        it.side.reset()
        request = it.request(100)
        it.side.matched_tokens(request, 0)
        plan = it.step(request, 0, (blocks(1, 7),))
        it.side.workers_reported(WorkerReport(weights={0: (plan.asks_for_weights, "others")}), (), (), set())
        return re.findall(r'beside "tokens": \{"namespace": "(.*?)"', caplog.text)

    before, after = named()
    assert before == Namespace("m").digest(16).hex()
    assert after != before
    assert named(tenant_salt="secret") == []
