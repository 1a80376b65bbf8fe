# pyright: basic
"""The linker on a real depot, called as SGLang calls it, with a stand-in for SGLang's classes."""

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.client.transfers import WorkerTransfers
from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import operations as o
from kvdepot_sglang import places, stats
from kvdepot_sglang.pools import Unsupported
from support.sglang import stand_in
from support.sglang.stand_in import PAGE, Component, Scheduler, names_of

MakeEngine = Callable[..., Scheduler]


def server_args(**changes: Any) -> Any:
    facts = {
        "model_path": "a/model", "served_model_name": "model", "port": 30000, "dtype": "float32", "load_format": "auto",
        "kv_cache_dtype": "auto", "pp_size": 1, "attention_backend": "torch_native",
    }  # fmt: skip
    return SimpleNamespace(**{**facts, **changes})


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess(pool_size="64MiB") as depot:
        yield depot


@pytest.fixture
def engine(depot: DepotProcess) -> Iterator[MakeEngine]:
    """Make engines that differ in what is given."""
    made: list[Any] = []
    with stand_in.installed() as module:

        def make(pool: Any = None, arguments: Any = None, components: Any = None, **settings: Any) -> Scheduler:
            pool = pool or stand_in.MHATokenToKVPool()
            windows = {Component.SWA} if isinstance(pool, stand_in.SWAKVPool) else set()
            components = components or {Component.FULL, *windows}
            params = SimpleNamespace(
                page_size=PAGE,
                token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
                tp_cache_group=None,
                swa_retain_window=2 * PAGE,
            )
            settings = {"url": depot.url, "weights": "w", "lookup_seconds": 20.0, "deadline_seconds": 20.0, **settings}
            linker = module.KVDepotLinker(
                arguments or server_args(), params, components=components, extra_config=settings
            )
            made.append(linker)
            return Scheduler(linker, places, pool)

        yield make
        for linker in made:
            linker.close()


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


def test_pages_come_back_to_other_slots_of_another_engine(engine: MakeEngine) -> None:
    one, two, names = engine(), engine(), names_of(1, 5)
    values = fill(one, one.slots(3, 5), seed=1)
    assert one.store(names, one.slots(3, 5))
    assert two.look_up("r", names) == 5
    assert two.load("r", names[:4], two.slots(40, 4))
    assert equal(held(two, two.slots(40, 4)), [value[: 4 * PAGE] for value in values])


def test_a_tail_is_found_behind_what_the_device_has(engine: MakeEngine) -> None:
    one, names = engine(), names_of(1, 6)
    values = fill(one, one.slots(0, 6), seed=1)
    assert one.store(names[:2], one.slots(0, 2))
    assert one.store(names, one.slots(0, 6), first=2)  # a node of its own
    assert one.look_up("r", names, on_device=3) == 3
    assert one.load("r", names[3:], one.slots(20, 3))
    assert equal(held(one, one.slots(20, 3)), [value[3 * PAGE :] for value in values])


def test_an_answer_is_repeated_for_a_request_that_waits(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert [one.look_up("r", names) for _ in range(50)] == [4] * 50
    assert depot.status().counters["lookups"] == 1
    assert one.look_up("r", names, on_device=1) == 3  # the device has more by now
    assert depot.status().num_leases == 1


def test_no_lease_is_kept_for_what_the_device_has(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert one.look_up("r", [*names, *names_of(2, 6)[4:]], on_device=4) == 0
    wait_until(lambda: depot.status().num_leases == 0)


def test_a_prompt_that_the_device_has_is_used_in_the_depot_too(engine: MakeEngine, depot: DepotProcess) -> None:
    """SGLang asks for nothing then. Else the prefixes in greatest use would leave the depot first."""
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert [one.look_up("r", names, on_device=4) for _ in range(10)] == [0] * 10
    assert depot.status().counters["lookups"] == 1
    wait_until(lambda: depot.status().num_leases == 0)
    assert one.linker.stats.counts[stats.LOOKUP_MICROSECONDS] > 0


def test_the_depot_knows_a_session_by_its_name(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names[:2], one.slots(0, 2), session="chat")
    assert one.store(names, one.slots(0, 4), first=2, session="chat")
    wait_until(lambda: ask_depot(o.RetainSession("chat", 60.0), depot.url, 5.0).count == 4)


def test_a_load_gives_its_lease_back(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert one.look_up("r", names) == 4
    assert one.load("r", names, one.slots(10, 4))
    wait_until(lambda: depot.status().num_leases == 0)


def test_a_load_without_a_lookup_is_refused(engine: MakeEngine) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    assert not one.load("r", names, one.slots(10, 4))
    assert one.look_up("q", names) == 4
    one.linker.reset()
    assert not one.load("q", names, one.slots(10, 4))
    assert one.linker.stats.counts[stats.REFUSED_LOADS] == 2


def test_a_depot_that_dies_costs_misses_only(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(deadline_seconds=1.0, lookup_seconds=1.0), names_of(1, 4)
    values = fill(one, one.slots(0, 4), seed=1)
    assert one.store(names, one.slots(0, 4))
    assert one.look_up("r", names) == 4
    depot.kill()
    if one.load("r", names, one.slots(10, 4)):  # the mapping outlives the server, so that this may succeed
        assert equal(held(one, one.slots(10, 4)), values)
    assert one.look_up("s", names) == 0
    depot.start()
    requests = map(str, itertools.count())
    wait_until(lambda: one.look_up(rid := next(requests), names) == 4 and one.load(rid, names, one.slots(20, 4)))
    assert equal(held(one, one.slots(20, 4)), values)


def test_a_stopped_depot_costs_one_deadline(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(lookup_seconds=0.25), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    depot.signal(signal.SIGSTOP)
    try:
        assert [one.look_up(f"r{number}", names) for number in range(5)] == [0] * 5
        assert not one.load("r1", names, one.slots(10, 4))
    finally:
        depot.signal(signal.SIGCONT)
    wait_until(lambda: one.look_up("after", names) == 4)


def test_a_flush_begins_a_new_generation_of_keys(engine: MakeEngine) -> None:
    one, two, names = engine(), engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
    one.linker.reset()
    assert one.look_up("r", names) == 0
    assert two.look_up("r", names) == 4  # other engines keep theirs
    keeping = engine(keep_after_reset=True)
    keeping.linker.reset()
    assert keeping.look_up("r", names) == 4


def test_a_store_whose_parent_has_left_is_stored_with_its_path(engine: MakeEngine, depot: DepotProcess) -> None:
    one, names = engine(), names_of(1, 6)
    values = fill(one, one.slots(0, 6), seed=1)
    assert one.store(names[:4], one.slots(0, 4))
    depot.kill()
    for file in depot.pool_directory.glob("*"):
        file.unlink()  # the next server begins empty
    depot.start()
    # The device has four pages and thinks that the depot has them, too.
    requests = map(str, itertools.count())
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
    assert equal(held(two, two.slots(30, 6)), values)
    for mine, theirs in zip(_buffers(two.pool.swa_kv_pool), _buffers(one.pool.swa_kv_pool), strict=True):
        assert np.array_equal(mine[two.slots(34, 2)], theirs[one.slots(4, 2)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
    ],
)
def test_an_engine_that_cannot_be_kept_whole_is_refused_in_words(
    arguments: dict[str, Any], text: str, engine: MakeEngine
) -> None:
    with pytest.raises(Unsupported, match=text):
        engine(arguments=server_args(**arguments))


def test_small_pages_are_refused_with_the_way_out(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PAGE", 1)
    with pytest.raises(Unsupported, match="--page-size 64"):
        engine()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k_scale_buffer": [1]}, "--kv-cache-dtype auto"),
        ({"kv_cache_layout": "hnd"}, "SGLANG_USE_HND_KVCACHE"),
    ],
)
def test_a_pool_that_cannot_be_kept_is_refused(change: dict[str, Any], text: str, engine: MakeEngine) -> None:
    pool = stand_in.MHATokenToKVPool()
    pool.__dict__.update(change)
    with pytest.raises(Unsupported, match=text):
        engine(pool)


def test_a_model_with_states_is_refused(engine: MakeEngine) -> None:
    with pytest.raises(Unsupported, match="Mamba"):
        engine(components={Component.FULL, Component.MAMBA})


def test_an_unknown_pool_is_refused_by_its_name(engine: MakeEngine) -> None:
    with pytest.raises(Unsupported, match="OtherPool is not supported"):
        engine(type("OtherPool", (), {"device": "cpu", "layer_num": 1})())


def test_a_wrong_setting_stops_the_engine_at_start(engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="linker_extra_config has 'ulr'"):
        engine(ulr="typo")


def test_without_its_hooks_the_linker_does_not_start(depot: DepotProcess) -> None:
    with stand_in.installed(is_hooked=False) as module, pytest.raises(Unsupported, match="SGLANG_PLUGINS"):
        module.KVDepotLinker(server_args(), None, components=set(), extra_config={"url": depot.url})


def test_the_plugin_is_installed_and_imports_nothing_heavy() -> None:
    (entry,) = entry_points(group="sglang.srt.plugins", name="kvdepot")
    assert entry.value == "kvdepot_sglang.plugin:register"
    code = "import sys, kvdepot_sglang.plugin; sys.exit(bool({'sglang', 'torch', 'numpy', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_exception_costs_a_miss(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, names = engine(), names_of(1, 4)
    assert one.store(names, one.slots(0, 4))
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
    assert all(each.instance.startswith("sglang model port 30000 ") for each in depot.status().contexts)
    assert one.linker.stats.counts == {}
