# pyright: basic
"""The linker on a real depot, called as by SGLang, with a stand-in for SGLang's classes."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfers import WorkerTransfers
from kvdepot.engines.settings import EngineSettings
from kvdepot.errors import ConfigError
from kvdepot.features.sessions import operations as sessions
from kvdepot.features.sessions.messages import Hint
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_sglang import HOOKS, around_add_one_req, around_load_back, around_offload_nodes, around_on_idle, register
from kvdepot_sglang.identity import engine_namespace
from kvdepot_sglang.loads import Load, Loads
from kvdepot_sglang.pools import Unsupported
from kvdepot_sglang.ranks import Ranks
from support.sglang import stand_in
from support.sglang.stand_in import PAGE, Component, MakeEngine, Scheduler, engines, names_of, server_args
from support.stopped import stopped


@pytest.fixture
def engine(depot: DepotProcess) -> Iterator[MakeEngine]:
    """Make engines that differ in the given options."""
    with engines(depot.url) as make:
        yield make


def fill(engine: Scheduler, slots: Any, seed: int) -> list[Any]:
    """Write random KV into slots of the full pool and return it by buffer."""
    pool = getattr(engine.pool, "full_kv_pool", engine.pool)
    source = np.random.default_rng(seed)
    values = [source.random((len(slots), stand_in.HEADS, stand_in.DIM), np.float32) for _ in _buffers(pool)]
    for buffer, value in zip(_buffers(pool), values, strict=True):
        buffer[slots] = value
    return values


def held(engine: Scheduler, slots: Any) -> list[Any]:
    return [buffer[slots] for buffer in _buffers(getattr(engine.pool, "full_kv_pool", engine.pool))]


def _buffers(pool: Any) -> list[Any]:
    return [*pool.k_buffer, *pool.v_buffer]


def equal(one: list[Any], two: list[Any]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def stored(engine: MakeEngine, **settings: Any) -> tuple[Scheduler, Any]:
    """Return an engine that has stored four pages, and their names."""
    one, names = engine(**settings), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    return one, names


def test_pages_come_back_to_other_slots_of_another_engine(engine: MakeEngine, depot: DepotProcess) -> None:
    one, two, names = engine(), engine(), names_of(1, 5)
    values = fill(one, one.slots(3, 5), seed=1)
    assert one.store(names, one.slots(3, 5))
    assert two.look_up("r", names) == 5
    assert two.load("r", names[:4], two.slots(40, 4))
    assert equal(held(two, two.slots(40, 4)), [value[: 4 * PAGE] for value in values])
    wait_until(lambda: depot.status().num_leases == 0)


def test_a_tail_is_found_behind_what_the_device_has(engine: MakeEngine) -> None:
    one, names = engine(), names_of(1, 6)
    values = fill(one, one.slots(0, 6), seed=1)
    assert one.store(names[:2], one.slots(0, 2))
    assert one.store(names, one.slots(0, 6), first=2)  # a tree node of its own
    assert one.look_up("r", names, on_device=3) == 3
    assert one.load("r", names[3:], one.slots(20, 3), before=one.slots(0, 3))
    assert equal(held(one, one.slots(20, 3)), [value[3 * PAGE :] for value in values])
    assert one.look_up("s", names) == 6  # the device has none of it, and its pages of "r" are forgotten


def test_each_of_several_nodes_is_offloaded_with_the_pages_before_it(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = engine(), names_of(1, 4)
    monkeypatch.setattr(one, "get_prefix_hash_values", lambda node: names[:node])
    offloaded: list[Any] = []
    around_offload_nodes(lambda _, nodes: offloaded.append((nodes, one.linker.before)), one, [0, 2, 3])
    assert offloaded == [([node], names[:node]) for node in (0, 2, 3)]


def test_an_answer_is_repeated_for_a_request_that_waits(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = stored(engine)
    assert [one.look_up("r", names) for _ in range(50)] == [4] * 50
    assert depot.status().counters["lookups"] == 1
    assert one.look_up("r", names, on_device=1) == 3  # the device has more by now
    assert depot.status().num_leases == 1


def test_no_lease_is_kept_for_what_the_device_has(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = stored(engine)
    assert one.look_up("r", [*names, *names_of(2, 6)[4:]], on_device=4) == 0
    wait_until(lambda: depot.status().num_leases == 0)


def test_a_prompt_that_the_device_has_is_used_in_the_depot_too(engine: MakeEngine, depot: DepotProcess) -> None:
    """SGLang does not ask for such a prompt. Otherwise the most used prefixes would leave the depot first."""
    one, names = stored(engine)
    assert [one.look_up("r", names, on_device=4) for _ in range(10)] == [0] * 10
    assert depot.status().counters["lookups"] == 1
    wait_until(lambda: depot.status().num_leases == 0)
    assert one.linker.stats.counts["lookup_microseconds"] > 0


def test_what_is_stored_counts_for_its_tenant(engine: MakeEngine, depot: DepotProcess) -> None:
    one = engine(tenant="other")
    assert one.store(names_of(1, 4), one.slots(0, 4))
    assert depot.status().tenants["other"].used_bytes > 0


def test_the_depot_knows_a_session_by_its_name(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names[:2], one.slots(0, 2), session="chat")
    assert one.store(names, one.slots(0, 4), first=2, session="chat")
    wait_until(lambda: ask_depot(sessions.RetainSession("chat", 60.0), depot.url, 5.0).count == 4)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_store_that_failed_is_no_session_s_last_prefix(
    is_stored: bool, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = engine(), names_of(1, 4)
    job = SimpleNamespace(query=lambda: True, result=lambda: is_stored, num_bytes=0)
    monkeypatch.setattr(WorkerTransfers, "submit_store", lambda *_: job)
    said: list[Hint] = []
    monkeypatch.setattr(SchedulerClient, "post", lambda _, make: said.extend(make(1)))
    assert one.store(names, one.slots(0, 4), session="chat") == is_stored
    assert [hint.session for hint in said] == ["chat"] * is_stored


def test_a_load_without_a_lookup_is_refused(engine: MakeEngine) -> None:
    one, names = stored(engine)
    assert not one.load("r", names, one.slots(10, 4))
    assert one.look_up("q", names) == 4
    one.linker.reset()
    assert not one.load("q", names, one.slots(10, 4))
    assert one.linker.stats.counts["refused_loads"] == 2


def test_a_depot_that_dies_costs_misses_only(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(deadline_seconds=1.0, lookup_seconds=1.0), names_of(1, 4)
    values = fill(one, one.slots(0, 4), seed=1)
    assert one.store(names, one.slots(0, 4))
    assert one.look_up("r", names) == 4
    depot.kill()
    if one.load("r", names, one.slots(10, 4)):  # the mapping outlives the server, so this may succeed
        assert equal(held(one, one.slots(10, 4)), values)
    assert one.look_up("s", names) == 0
    depot.start()
    requests = map(str, itertools.count())
    wait_until(lambda: one.look_up(rid := next(requests), names) == 4 and one.load(rid, names, one.slots(20, 4)))
    assert equal(held(one, one.slots(20, 4)), values)


def test_a_stopped_depot_costs_one_deadline(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = stored(engine, lookup_seconds=0.25)
    with stopped(depot):
        assert [one.look_up(f"r{number}", names) for number in range(5)] == [0] * 5
        assert not one.load("r1", names, one.slots(10, 4))
    wait_until(lambda: one.look_up("after", names) == 4)


def test_a_load_that_the_depot_does_not_confirm_is_refused(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = stored(engine, deadline_seconds=0.3)
    assert one.look_up("r", names) == 4
    with stopped(depot):
        assert not one.load("r", names, one.slots(10, 4))


def looked_up(engine: MakeEngine, **settings: Any) -> tuple[Scheduler, Any]:
    """Return an engine that can load four pages for the request "r", and their names."""
    one, names = stored(engine, **settings)
    assert one.look_up("r", names) == 4
    return one, names


def test_a_load_that_failed_on_another_rank_is_refused(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, names = looked_up(engine)
    monkeypatch.setattr(Ranks, "all_agree", lambda _, flags: [*flags[: len(flags) // 2], *[False] * (len(flags) // 2)])
    assert not one.load("r", names, one.slots(10, 4))
    assert one.linker.stats.counts["refused_loads"] == 1
    assert one.linker.stats.counts["loads"] == 0


def test_a_load_that_another_rank_has_not_ended_is_under_way(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = looked_up(engine)
    with monkeypatch.context() as patch:
        patch.setattr(Ranks, "all_agree", lambda _, flags: [False] * len(flags))
        assert one.begin_load("r", names, one.slots(10, 4)) is None
        wait_until(lambda: one.linker.wait_for_load() and one.linker.stats.counts["loads"] == 0)
        one.linker.num_completed_offloads()
        assert one.linker.is_loading("r")
        assert not one.inserted + one.freed
    one.end_loads()
    assert one.linker.stats.counts["loads"] == 1


def test_the_tokens_of_a_refused_load_are_computed(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks again in the same step, and would load for ever if it found the pages again."""
    one, names = looked_up(engine)
    failed = SimpleNamespace(query=lambda: True, result=lambda *_: False, num_bytes=0, seconds=0.0)
    monkeypatch.setattr(WorkerTransfers, "submit_retrieve", lambda *_: failed)
    assert not one.load("r", names, one.slots(10, 4))
    assert one.look_up("r", names) == 0
    assert one.look_up("other", names) == 4


def pending(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each load wait for an event, and return that."""
    done = threading.Event()

    def result(seconds: float | None = None) -> bool:
        if not done.wait(seconds):
            raise TimeoutError
        return True

    job = SimpleNamespace(query=done.is_set, result=result, num_bytes=7, seconds=0.5)
    monkeypatch.setattr(WorkerTransfers, "submit_retrieve", lambda *_: job)
    return done


class Adder:
    """SGLang's `PrefillAdder`, which admits requests."""

    def __init__(self, scheduler: Scheduler, verdict: Any = stand_in.Verdict.CONTINUE) -> None:
        self.tree_cache = SimpleNamespace(linker=scheduler)
        self.verdict = verdict
        self.asked: list[str] = []

    def add(self, rid: str, begin: Callable[[], Any] = lambda: 1) -> Any:
        """Admit a request as SGLang does: "other" if `begin` tells it to try again."""

        def original(adder: Any, req: Any, has_chunked_req: bool, *, truncation_align_size: int | None) -> Any:
            assert (adder, has_chunked_req, truncation_align_size) == (self, True, 3)
            self.asked.append(req.rid)
            return stand_in.Verdict.OTHER if begin() is None else self.verdict

        return around_add_one_req(original, self, SimpleNamespace(rid=rid), True, truncation_align_size=3)


def test_a_request_that_waits_for_its_load_stops_no_other(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, names = looked_up(engine)
    done, adder, verdicts = pending(monkeypatch), Adder(one), stand_in.Verdict
    assert adder.add("r", lambda: one.begin_load("r", names, one.slots(10, 4))) is verdicts.CONTINUE
    for _ in range(3):
        one.linker.num_completed_offloads()
        assert adder.add("r") is verdicts.CONTINUE
        assert one.look_up("r", names) == 0, "it is looked up no more"
        assert adder.add("other") is verdicts.CONTINUE
    assert adder.asked == ["r", "other", "other", "other"]
    assert not one.inserted
    done.set()
    one.linker.num_completed_offloads()
    (inserted,) = one.inserted
    assert inserted.value.tolist() == one.slots(10, 4).tolist()
    assert (inserted.priority, inserted.prev_prefix_len) == (0, 0)
    assert (one.request.storage_hit_start, one.request.storage_hit_length) == (0, 4 * PAGE)
    assert adder.add("r") is verdicts.CONTINUE
    assert adder.asked[-1] == "r"
    assert one.linker.stats.counts["load_bytes"] == 7
    assert one.linker.stats.counts["load_microseconds"] == 500_000


def test_a_full_cache_closes_admission_only_if_no_load_is_under_way(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = looked_up(engine)
    done, adder, verdicts = pending(monkeypatch), Adder(one, stand_in.Verdict.NO_TOKEN), stand_in.Verdict
    assert adder.add("other") is verdicts.NO_TOKEN
    adder.add("r", lambda: one.begin_load("r", names, one.slots(10, 4)))
    assert adder.add("other") is verdicts.OTHER
    done.set()
    one.end_loads()
    assert adder.add("other") is verdicts.NO_TOKEN
    adder.verdict = verdicts.OTHER
    assert adder.add("other") is verdicts.OTHER


def test_pages_are_inserted_under_the_key_of_their_prompt(engine: MakeEngine) -> None:
    """Under another key, requests with another salt or adapter would find them."""
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert one.look_up("r", names, on_device=1) == 3
    facts = {"extra_key": "adapter", "cache_salt": "salt", "priority": 3, "session_id": "chat"}
    assert one.begin_load("r", names[1:], one.slots(10, 3), before=one.slots(0, 2)[:PAGE], **facts) is None
    one.end_loads()
    (inserted,) = one.inserted
    assert inserted.key == (list(range(4 * PAGE)), "adapter", {"cache_salt": "salt"})
    assert inserted.value.tolist() == [*range(PAGE), *one.slots(10, 3).tolist()]
    assert (inserted.priority, inserted.session_id, inserted.prev_prefix_len) == (3, "chat", PAGE)
    assert (one.request.storage_hit_start, one.request.storage_hit_length) == (PAGE, 3 * PAGE)


def test_requests_that_begin_with_the_same_pages_load_them_once(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = looked_up(engine)
    assert one.look_up("s", names) == 4
    done, adder = pending(monkeypatch), Adder(one)
    adder.add("r", lambda: one.begin_load("r", names, one.slots(10, 4)))
    for _ in range(2):
        verdict = adder.add("s", lambda: one.begin_load("s", names[1:], one.slots(20, 3)))
        assert verdict is stand_in.Verdict.CONTINUE
        assert not one.linker.is_loading("s")
        assert "s" not in one.hit_markers
    done.set()
    one.end_loads()
    assert len(one.inserted) == 1


def test_an_idle_scheduler_waits_for_loads_and_checks_for_leaks_after_them(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = looked_up(engine)
    done, checks = pending(monkeypatch), list[Any]()
    waiting = ["r"]
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(linker=one), is_fully_idle=lambda: not waiting)
    assert one.begin_load("r", names, one.slots(10, 4)) is None
    around_on_idle(checks.append, scheduler)
    assert checks == [scheduler]
    waiting.clear()  # it was aborted
    around_on_idle(checks.append, scheduler)
    assert checks == [scheduler]
    done.set()
    one.end_loads()
    around_on_idle(checks.append, scheduler)
    assert checks == [scheduler] * 2


def test_an_idle_scheduler_waits_for_the_oldest_load_alone() -> None:
    """Without a wait, it would poll in a busy loop. A load that could not be submitted has nothing to wait for."""
    waited: list[Any] = []

    def load(name: str) -> Any:
        def result(seconds: float) -> bool:
            waited.append((name, seconds))
            raise TimeoutError

        job = SimpleNamespace(result=result) if name else None
        return Load(None, SimpleNamespace(rid=name), 0, (), None, None, None, job)  # type: ignore[arg-type]

    loads = [Loads(SimpleNamespace(), lambda *_: None) for _ in range(3)]  # type: ignore[arg-type]
    for each in (load("a"), load("b")):
        loads[0].begin(each)
    loads[1].begin(load(""))
    assert [each.wait(0.5) for each in loads] == [True, True, False]
    assert waited == [("a", 0.5)]


def test_a_flush_waits_for_loads_and_forgets_them(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, names = looked_up(engine)
    waited: list[Any] = []
    job = SimpleNamespace(query=lambda: False, result=lambda *given: waited.append(given))
    monkeypatch.setattr(WorkerTransfers, "submit_retrieve", lambda *_: job)
    assert one.begin_load("r", names, one.slots(10, 4)) is None
    one.linker.reset()
    assert waited == [()]
    assert not one.linker.is_loading()
    assert not one.freed, "SGLang frees all slots itself"


def test_other_caches_and_linkers_are_left_alone() -> None:
    wrapper = SimpleNamespace(cache_linker=object(), hit_markers={"r": 1})
    request = SimpleNamespace(rid="r")
    assert around_load_back(lambda *given: given, wrapper, request) == (wrapper, request)
    adder = SimpleNamespace(tree_cache=object())
    assert around_add_one_req(lambda *given: given, adder, request, True) == (adder, request, True)
    for cache in (object(), SimpleNamespace(linker=wrapper)):
        seen: list[Any] = []
        around_on_idle(seen.append, SimpleNamespace(tree_cache=cache))
        assert len(seen) == 1


def test_a_store_waits_for_the_forward_pass(engine: MakeEngine) -> None:
    one, two, names = engine(), engine(), names_of(1, 4)
    values: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: values.extend(fill(one, one.slots(0, 4), seed=1)))
    one.linker.record_offload_ready = lambda: [event]
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 4
    assert two.load("r", names, two.slots(10, 4))
    assert equal(held(two, two.slots(10, 4)), values)


def test_stores_are_reported_in_their_order_and_a_flush_waits_for_them(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, names = engine(), names_of(1, 4)
    waited: list[int] = []

    def store(number: int) -> Any:
        return SimpleNamespace(query=lambda: number == 1, result=lambda: waited.append(number), num_bytes=0)

    numbers = itertools.count()
    monkeypatch.setattr(WorkerTransfers, "submit_store", lambda *_: store(next(numbers)))
    for _ in range(2):
        assert one.linker.offload(one.transfers(names, one.slots(0, 4)))
    assert one.linker.num_completed_offloads() == 0
    one.linker.reset()
    assert waited == [0, 1]


@pytest.mark.parametrize("num_named", [0, 1])
def test_a_prompt_whose_pages_on_the_device_have_no_names_is_not_looked_up(
    num_named: int, engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, depot: DepotProcess
) -> None:
    one, names = stored(engine)
    monkeypatch.setattr(one, "get_prefix_hash_values", lambda _: names[:num_named] if num_named else 1 / 0)
    assert one.look_up("r", names, on_device=2) == 0
    assert depot.status().counters["lookups"] == 0


def test_a_flush_begins_a_new_generation_of_keys(engine: MakeEngine) -> None:
    one, two, names = engine(), engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    one.linker.reset()
    assert one.look_up("r", names) == 0
    assert two.look_up("r", names) == 4  # other engines keep theirs
    keeping = engine(keep_after_reset=True)
    keeping.linker.reset()
    assert keeping.look_up("r", names) == 4


def test_replicas_with_the_same_new_weights_share_at_once_and_one_that_is_behind_does_not(engine: MakeEngine) -> None:
    one, two, behind, names = engine(), engine(), engine(), names_of(1, 4)
    assert behind.store(names, behind.slots(0, 4))
    for each in (one, two):
        each.update("new")
    assert one.look_up("r", names) == 0
    values = fill(one, one.slots(0, 4), seed=1)
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 4
    assert two.load("r", names, two.slots(10, 4))
    assert equal(held(two, two.slots(10, 4)), values)
    two.update("newer")
    assert two.look_up("s", names) == 0
    behind.update("new")
    assert behind.look_up("t", names) == 4


def test_the_last_of_several_updates_names_the_weights(engine: MakeEngine) -> None:
    """SGLang packs the new weights after the last update, and a trainer may flush with an earlier one."""
    one, two, names = engine(), engine(), names_of(1, 4)
    one.update("a half", flush=True)
    one.update("all", flush=False)
    two.update("other half", flush=False)
    two.update("not packed", flush=True)
    two.update("all", flush=False)
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 4


def test_an_update_without_a_flush_shares_with_nobody(engine: MakeEngine) -> None:
    """The device keeps pages of the previous weights and adds pages of the new ones."""
    one, same, before, names = engine(), engine(), engine(), names_of(1, 4)
    assert before.store(names, before.slots(0, 4))
    one.update("new", flush=False)
    same.update("new", flush=True)
    assert one.look_up("r", names) == 0
    other = names_of(2, 4)
    assert one.store(other, one.slots(0, 4))
    assert same.look_up("r", other) == before.look_up("r", other) == 0
    assert one.look_up("s", other) == 4
    one.linker.reset()
    assert one.look_up("t", other) == 0
    assert same.store(names, same.slots(0, 4))
    assert one.look_up("u", names) == 4


def test_a_flush_without_an_update_shares_with_nobody(engine: MakeEngine) -> None:
    one, two, names = engine(), engine(), names_of(1, 4)
    for each in (one, two):
        each.update("new")
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 4
    two.linker.reset()
    assert two.look_up("s", names) == 0
    assert two.store(names, two.slots(0, 4))
    one.linker.reset()
    assert one.look_up("r", names) == 0
    for each in (one, two):
        each.update("new")
        assert each.look_up("again", names) == 4


def test_weights_without_a_digest_are_shared_with_nobody(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, names = engine(), engine(), names_of(1, 4)
    monkeypatch.setattr(stand_in.Model, "state_dict", lambda _: 1 / 0)
    one.update("new")
    two.update("new")
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 0
    assert one.look_up("r", names) == 4


def test_the_depot_knows_the_weights_by_their_digest_and_version(engine: MakeEngine, depot: DepotProcess) -> None:
    one = engine()
    sys.modules["sglang.srt.runtime_context"].get_serving().weight_version = "7"
    one.update("new")
    one.look_up("r", names_of(1, 4))

    def names() -> set[str]:
        return {each.weights for each in depot.status().contexts}

    wait_until(lambda: any(name.startswith("7 ") and len(name) == 34 for name in names()))


@pytest.mark.parametrize("num_kept", [0, 2])
def test_a_store_whose_parent_has_left_is_stored_with_its_path(
    num_kept: int, engine: MakeEngine, depot: DepotProcess
) -> None:
    one, names = engine(), names_of(1, 6)
    values = fill(one, one.slots(0, 6), seed=1)
    assert one.store(names[:4], one.slots(0, 4))
    depot.kill()
    for file in depot.pool_directory.glob("*"):
        file.unlink()  # the next server starts empty
    depot.start()
    requests = map(str, itertools.count())
    if num_kept:
        wait_until(lambda: one.store(names[:num_kept], one.slots(0, num_kept)))
        wait_until(lambda: one.look_up(next(requests), names[:num_kept]) == num_kept)
    # The device has four pages and believes that the depot has them, too.
    wait_until(
        lambda: one.look_up(next(requests), names, on_device=4) == 0 and one.store(names, one.slots(0, 6), first=4)
    )
    two = engine()
    assert two.look_up("s", names) == 6
    assert two.load("s", names, two.slots(10, 6))
    assert equal(held(two, two.slots(10, 6)), values)


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "other"}, {"tenant_salt": "secret"}, {"namespace": "canary"}, {"weights": "v2"},
        {"arguments": server_args(dtype="bfloat16")}, {"arguments": server_args(attention_backend="other")},
        {"arguments": server_args(quantization="awq")},
    ],
    ids=str,
)  # fmt: skip
def test_engines_that_differ_never_share(change: dict[str, Any], engine: MakeEngine) -> None:
    one, two, names = engine(), engine(**change), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 0
    assert engine().look_up("r", names) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_path", "b/model"), ("revision", "2"), ("kv_cache_dtype", "bfloat16"), ("load_format", "pt"),
        ("prefill_attention_backend", "a"), ("decode_attention_backend", "a"), ("model_loader_extra_config", "{1}"),
        ("json_model_override_args", "{1}"), ("context_length", 64), ("torchao_config", "int8"),
        ("modelopt_quant", "a"),
    ],
)  # fmt: skip
def test_what_changes_the_bytes_of_kv_changes_the_namespace(name: str, value: Any) -> None:
    def digest(**changes: Any) -> bytes:
        config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
        return engine_namespace(server_args(**changes), config, "cpu", 1, EngineSettings(weights="w")).digest(PAGE)

    assert digest(**{name: value}) != digest() == digest()


@pytest.mark.promise(82)
def test_the_content_of_adapters_that_keep_their_id_over_a_restart_counts(tmp_path: Path) -> None:
    """SGLang makes the id of an adapter of `--lora-paths` of its name and path, not of its content."""
    folder = tmp_path / "one"
    ways: list[Any] = [
        [SimpleNamespace(lora_name="a", lora_path=str(folder))],
        [f"a={folder}"],
        [str(folder)],
        [{"lora_name": "a", "lora_path": str(folder)}],
        {"a": str(folder)},
    ]

    def digests() -> set[bytes]:
        config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
        settings = EngineSettings(weights="w")
        return {
            engine_namespace(server_args(lora_paths=way), config, "cpu", 1, settings).digest(PAGE)
            for way in [*ways, None]
        }

    seen: list[set[bytes]] = []
    folder.mkdir()
    for content in (b"1", b"2", b"1"):
        (folder / "adapter_model.bin").write_bytes(content * 64)
        seen.append(digests())
    assert [len(each) for each in seen] == [2, 2, 2], "one with the adapter, given in any way, and one without"
    assert seen[0] == seen[2]
    assert len(seen[0] & seen[1]) == 1, "the one without"


def test_the_scales_of_an_fp8_cache_that_a_file_has_count(tmp_path: Path) -> None:
    """SGLang writes pages of fp8 without their scales, and reads these from a file or from the checkpoint."""
    file, config = tmp_path / "scales.json", SimpleNamespace(to_dict=lambda: {"hidden_size": 8})

    def digest(path: str | None) -> bytes:
        arguments = server_args(quantization_param_path=path)
        return engine_namespace(arguments, config, "cpu", 1, EngineSettings(weights="w")).digest(PAGE)

    found = [digest(None), digest(str(file))]
    for content in ("1", "2", "1"):
        file.write_text(content)
        found.append(digest(str(file)))
    assert found[0] == found[1] != found[2] == found[4] != found[3] != found[0]


@pytest.mark.parametrize("dtype", ["torch.float8_e4m3fn", "torch.float8_e5m2"])
def test_pages_of_fp8_come_back(dtype: str, engine: MakeEngine, depot: DepotProcess) -> None:
    def pool() -> Any:
        found = pool_with(dtype=dtype)
        for buffers in (found.k_buffer, found.v_buffer):
            buffers[:] = [buffer.astype(np.uint8) for buffer in buffers]  # in which SGLang stores them
        return found

    one, two, names = engine(pool()), engine(pool()), names_of(1, 4)
    values = [np.random.default_rng(number).integers(0, 255, (4 * PAGE, 2, 4), np.uint8) for number in range(4)]
    for buffer, value in zip(_buffers(one.pool), values, strict=True):
        buffer[one.slots(0, 4)] = value
    assert one.store(names, one.slots(0, 4))
    assert two.look_up("r", names) == 4
    assert two.load("r", names, two.slots(10, 4))
    assert equal(held(two, two.slots(10, 4)), values)
    assert {each.dtype for each in depot.status().contexts if each.role == "worker"} == {dtype.removeprefix("torch.")}


def test_random_weights_are_shared_by_seed_and_number_of_ranks() -> None:
    def digest(num_ranks: int = 1, **changes: Any) -> bytes:
        config = SimpleNamespace(to_dict=lambda: {"hidden_size": 8})
        return engine_namespace(server_args(**changes), config, "cpu", num_ranks, EngineSettings()).digest(PAGE)

    random = digest(load_format="dummy", random_seed=1)
    assert random == digest(load_format="dummy", random_seed=1)
    assert len({random, digest(load_format="dummy", random_seed=2), digest(2, load_format="dummy", random_seed=1)}) == 3


def test_a_window_is_stored_for_the_last_pages_and_found_where_it_ends(engine: MakeEngine) -> None:
    one, two, names = engine(stand_in.SWAKVPool()), engine(stand_in.SWAKVPool()), names_of(1, 6)
    values = fill(one, one.slots(0, 6), seed=1)
    for number, buffer in enumerate(_buffers(one.pool.swa_kv_pool)):
        buffer[:] = np.arange(buffer.size, dtype=np.float32).reshape(buffer.shape) + number
    assert one.store(names, one.slots(0, 6), window_pages=2)
    assert two.linker.lookup("q", two.transfers([*names[:5], *names_of(2, 6)[5:]], None, 2)) == []
    two.linker.before = []
    assert two.linker.lookup("r", two.transfers(names, None, 2)) == [6]
    assert two.load("r", names, two.slots(30, 6), window_pages=2)
    assert two.inserted[0].component_evicted_seqlens == {Component.SWA: 6 * PAGE - 2}
    assert equal(held(two, two.slots(30, 6)), values)
    for mine, theirs in zip(_buffers(two.pool.swa_kv_pool), _buffers(one.pool.swa_kv_pool), strict=True):
        assert np.array_equal(mine[two.slots(34, 2)], theirs[one.slots(4, 2)])


def pool_with(**changes: Any) -> Any:
    pool = stand_in.MHATokenToKVPool()
    pool.__dict__.update(changes)
    return pool


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"arguments": server_args(pp_size=2)}, "--pp-size"),
        ({"arguments": server_args(enable_hierarchical_cache=True)}, "--enable-hierarchical-cache"),
        ({"arguments": server_args(enable_lmcache=True)}, "--enable-lmcache"),
        ({"arguments": server_args(attn_cp_size=2)}, "--attn-cp-size"),
        ({"pool": pool_with(k_scale_buffer=[1], dtype="torch.float8_e4m3fn")}, "scales of a KV cache of float8_e4m3fn"),
        ({"pool": pool_with(native_k_scale_buffer=[1])}, "--kv-cache-dtype auto, fp8_e4m3"),
        ({"pool": pool_with(dtype="torch.int8")}, "of int8 is not supported: .* auto"),
        ({"pool": pool_with(kv_cache_layout="hnd")}, "SGLANG_USE_HND_KVCACHE"),
        ({"pool": type("OtherPool", (), {"device": "cpu", "layer_num": 1})()}, "OtherPool is not supported"),
        ({"components": {Component.FULL, Component.MAMBA}}, "Mamba"),
    ],
)
def test_an_engine_that_cannot_be_kept_whole_is_refused_in_words(
    options: dict[str, Any], text: str, engine: MakeEngine
) -> None:
    with pytest.raises(Unsupported, match=text):
        engine(**options)


def test_small_pages_are_refused_with_the_way_out(depot: DepotProcess) -> None:
    with engines(depot.url, page_size=1) as make, pytest.raises(Unsupported, match="--page-size 64"):
        make()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"ulr": "typo"}, "linker_extra_config has 'ulr'"),
        ({"kvdepot.tenant_salt": "s"}, "linker_extra_config has 'kvdepot.tenant_salt'; known are url, "),
        ({"tenant": "x" * 300}, "tenant: 300 characters"),
        ({"url": "http://x"}, "url: 'http://x'"),
    ],
    ids=["typo", "prefix", "tenant", "url"],
)
def test_a_wrong_setting_stops_the_engine_at_start(wrong: dict[str, Any], text: str, engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=text):
        engine(**wrong)


def test_without_its_hooks_the_linker_does_not_start(depot: DepotProcess) -> None:
    with (
        stand_in.installed(is_hooked=False) as module,
        pytest.raises(Unsupported, match=r"add_one_req: .* SGLANG_PLUGINS"),
    ):
        module.KVDepotLinker(server_args(), None, components=set(), extra_config={"url": depot.url})


def test_the_plugin_is_installed_and_imports_nothing_heavy() -> None:
    (entry,) = entry_points(group="sglang.srt.plugins", name="kvdepot")
    assert entry.value == "kvdepot_sglang:register"
    code = "import sys, kvdepot_sglang; sys.exit(bool({'sglang', 'torch', 'numpy', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_plugin_hooks_all_that_tells_places_and_writes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[str] = []
    registry = SimpleNamespace(register=lambda target, *_: hooked.append(target))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND=1))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    register()
    updates = [f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")]
    methods = ["insert", "match", "offload_nodes", "load_back", "add_one_req", "on_idle", *updates, "end_weight_update"]
    assert [each.rpartition(".")[2] for each in hooked] == methods
    assert hooked[: len(HOOKS)] == list(HOOKS)


def test_an_exception_costs_a_miss(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, names = stored(engine)
    assert one.linker.lookup("bad", [SimpleNamespace(name="kv", keys=["no digest"])]) == []
    assert one.look_up("r", names) == 4

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(WorkerTransfers, "submit_retrieve", fail)
    assert not one.load("r", names, one.slots(10, 4))
    monkeypatch.setattr(WorkerTransfers, "submit_store", fail)
    assert not one.linker.offload(one.transfers(names, one.slots(0, 4)))


def test_the_depot_s_status_says_that_it_is_an_sglang_engine(engine: MakeEngine, depot: DepotProcess) -> None:
    one = engine()
    wait_until(lambda: len(depot.status().contexts) == 2)
    contexts = depot.status().contexts
    assert all(each.instance.startswith("sglang model port 30000 ") for each in contexts)
    assert [each.groups[0].attention_backend for each in contexts if each.role == "worker"] == ["torch_native"]
    assert one.linker.stats.counts == {}
